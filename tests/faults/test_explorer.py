"""The explorer: no schedule of the short bounds breaks a guarantee, and each mutant is caught."""

import time
from types import SimpleNamespace

import pytest

from flask_idempotency.core.engine import ROUNDS, DecisionEngine
from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.ports import Lock
from flask_idempotency.core.records import Claim, Record, Sealer, State, StoredResponse
from tests.drivers import EACH
from tests.faults.explore import schedules
from tests.faults.explore.world import BOUNDS, explore_bound
from tests.faults.mutants import MUTANTS

# Well below what there are: so that a bound which shrinks is noticed.
LEAST = {
    "two": 2,
    "a changed body": 100,
    "a changed body, no Redis": 50,
    "two, connection lost": 12,
    "two, answer lost": 6,
    "two retries after a failure": 30,
    "three, FLUSHALL": 40,
}
LOSSES = ("two, connection lost", "two, answer lost")  # what drivers say in words of their own
SHORT = [(name, "psycopg2") for name in LEAST] + [(name, "psycopg") for name in LOSSES]


@pytest.mark.parametrize(("name", "driver"), SHORT, indirect=["driver"])
def test_every_schedule_keeps_every_guarantee(postgres, redis_server, name):
    report = explore_bound(BOUNDS[name], postgres, redis_server)
    assert report.violations == []
    assert report.exhausted
    assert report.schedules >= LEAST[name], report.outcomes


def test_what_the_last_look_shows_is_believed():
    """Found here: each look showed a change, and the last one the answer; the client was told 503."""
    claim = Claim(b"k" * 32, "pay", Fingerprint(1, b"a" * 16), "owner", 60)
    answer = StoredResponse(201, (), b"")
    completed = Record(claim.key, "pay", State.COMPLETED, claim.fingerprint, 1, response=answer)
    looks = iter([None] * (ROUNDS - 1) + [completed])
    records = SimpleNamespace(claim=lambda claim: None, look=lambda key: next(looks))
    assert DecisionEngine(records, Lock(), Sealer(), time).decide(claim).response == answer


@EACH
@pytest.mark.of_tests
@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.bound])
def test_a_mutant_is_caught(postgres, redis_server, name, monkeypatch):
    monkeypatch.setattr(schedules, "PATIENCE_SECONDS", 3)  # one of them shows by hanging
    with MUTANTS[name].apply():
        report = explore_bound(MUTANTS[name].bound, postgres, redis_server, limit=200)
    assert report.violations, report.outcomes
    assert "not repeatable" not in report.violations[0]
