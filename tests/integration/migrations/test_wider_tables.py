"""A table that has more columns and indexes than ours serves.

An application may add some. So may a later release, whose tables are there after going back from it.
"""

import pytest

from flask_idempotency import current_operation, idempotent
from tests.integration.commands.running import runner
from tests.killed import Killed
from tests.web.leased.records import kill, steps

WIDER = """
ALTER TABLE idempotency_record ADD later JSON;
CREATE INDEX ix_idempotency_record_later ON idempotency_record (created_at) WHERE later IS NOT NULL;
"""


@pytest.fixture
def world(make_world, probing_at_once):
    world = make_world(PROPAGATE_EXCEPTIONS=False)
    world.sql(WIDER)
    return world


@pytest.fixture
def run(world):
    """Runs a command, which must succeed; gives its output."""
    return lambda *arguments: (done := runner(world.app)(*arguments)).exit_code == 0 and done.output


def test_requests_are_run_replayed_taken_over_and_purged(
    world, run, add_view, assert_replayed, assert_problem
):
    def fail_at_first():
        if current_operation.attempt == 1 and not world.sql("select 1 from payment"):
            raise RuntimeError

    runs = add_view(world, during=fail_at_first)
    assert world.post().status_code == 500
    assert_replayed(world.post(), world.post())
    assert_problem(world.post(json={"amount": 6}), 422, "key-reused")
    world.sql("update idempotency_record set expires_at = created_at")
    assert world.post().status_code == 201
    assert runs == [1, 2, 1]
    world.sql("update idempotency_record set expires_at = created_at")
    assert run("purge") == "1 expired record deleted\n"
    assert "advice" not in run("check")
    assert run("create-table") == "idempotency_record: nothing to do\n"


def test_a_dead_workers_operation_is_shown_and_decided_about(world, run):
    """It has steps of either kind, which are not repeated."""
    calls = []

    def call(name):
        calls.append(name)
        return len(calls)

    @world.app.post("/payments")
    @idempotent(atomic=False)
    def charge():
        first = current_operation.step("charge", lambda: call("charge"))
        with_it = current_operation.step("book", lambda: call("book"), atomic=True)
        if current_operation.attempt == 1:
            raise Killed
        return {"results": [first, with_it]}, 201

    kill(world)
    digits = world.records()[0].key[:4].hex()
    assert "charge" in run("show", digits)
    run("release", digits, "--why=seen")
    assert world.post().json == {"results": [1, 2]}
    assert calls == ["charge", "book"]
    assert steps(world) == [("charge", 1), ("book", 1)]
