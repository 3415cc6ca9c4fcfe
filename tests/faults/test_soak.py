"""The soak in short: this package keeps its promises for a while, and one that does not is caught."""

import pytest

from tests.faults.__main__ import report
from tests.faults.checker import emptiness, violations
from tests.faults.soak import LONGEST_VIEW_SECONDS, Machines, Plan, run
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def machines():
    with Machines() as running:
        yield running


@pytest.mark.parametrize(("driver", "wait"), [("psycopg2", 0.0), ("psycopg", 0.3)], indirect=["driver"])
def test_every_guarantee_holds_while_workers_and_servers_crash(machines, tmp_path, wait):
    plan = Plan(seconds=8, seed=1, wait=wait, pause_seconds=0.4)
    history, truth = run(plan, tmp_path / "journal.jsonl", machines, plan.quota())
    # Other tests run beside it; `make faults`, which runs alone, has less patience.
    found = violations(history, truth, LONGEST_VIEW_SECONDS + PATIENCE_SECONDS)
    empty = emptiness(history, plan.quota())
    print(report(plan, history, found, empty))
    assert (found, empty) == ([], [])
