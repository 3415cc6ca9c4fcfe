"""A table that has more columns and indexes than ours serves.

An application may add some. So may a later release, whose tables are there after going back from it.
"""

from __future__ import annotations

import pytest

from flask_idempotency import Retryable, current_operation, idempotent
from tests.integration.commands.running import runner
from tests.killed import Killed
from tests.web.leased.records import end_lease, steps

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

    def run(*arguments):
        result = runner(world.app)(*arguments)
        assert result.exit_code == 0, result.output
        return result.output

    return run


def test_a_first_request_its_replay_and_a_changed_one(world, add_view, assert_replayed, assert_problem):
    runs = add_view(world)
    first = world.post()
    assert_replayed(first, world.post())
    assert_problem(world.post(json={"amount": 6}), 422, "key-reused")
    assert (runs, world.count()) == ([1], 1)


def test_what_was_rolled_back_is_taken_over_and_what_has_expired_starts_afresh(world, add_view):
    def fail_at_first():
        if current_operation.attempt == 1 and not world.sql("select 1 from payment"):
            raise RuntimeError

    runs = add_view(world, during=fail_at_first)
    assert [world.post().status_code for _ in range(3)] == [500, 201, 201]
    world.sql("update idempotency_record set expires_at = created_at")
    assert world.post().status_code == 201
    assert runs == [1, 2, 1]


@pytest.fixture
def charge(world):
    """Adds a view that is not atomic: it has a step of either kind, and ends badly in its attempt 1."""

    def add(ending, **options):
        calls = []

        @world.app.post("/payments")
        @idempotent(atomic=False, **options)
        def charge():
            first = current_operation.step("charge", lambda: calls.append("charge") or len(calls))
            with_it = current_operation.step("book", lambda: book(calls), atomic=True)
            if current_operation.attempt == 1:
                raise ending
            return {"results": [first, with_it]}, 201

        def book(calls):
            world.db.session.add(world.Payment(amount=5))
            calls.append("book")
            return len(calls)

        return calls

    return add


def test_a_leased_operation_is_freed_and_its_steps_are_not_repeated(world, charge, assert_replayed):
    calls = charge(Retryable)
    assert world.post().status_code == 503
    second = world.post()
    assert second.json == {"results": [1, 2]}
    assert_replayed(second, world.post())
    assert (calls, world.count()) == (["charge", "book"], 1)
    assert steps(world) == [("charge", 1), ("book", 1)]


def test_a_dead_workers_operation_is_shown_and_taken_over(world, charge, run):
    calls = charge(Killed, on_interrupted="retry")
    with pytest.raises(Killed):
        world.post()
    end_lease(world)
    assert "charge" in run("list", "--state", "interrupted")
    assert world.post().json == {"results": [1, 2]}
    assert calls == ["charge", "book"]


def test_a_purge_deletes_what_has_expired(world, add_view, run):
    add_view(world)
    world.post()
    world.sql("update idempotency_record set expires_at = created_at")
    assert run("purge") == "1 expired record deleted\n"
    assert world.records() == []


DECIDE = {
    "in_progress": ["release", "--why", "not there"],
    "completed": ["resolve", "--status", "200", "--why", "seen", "--yes"],
}


@pytest.mark.parametrize("state", DECIDE)
def test_an_operator_sees_a_record_and_decides(world, charge, run, state):
    charge(Killed)
    with pytest.raises(Killed):
        world.post()
    end_lease(world)
    digits = world.records()[0].key[:4].hex()
    assert "interrupted" in run("show", digits)
    name, *options = DECIDE[state]
    run(name, digits, *options)
    assert world.records()[0].state == state


def test_check_finds_nothing_wrong_and_create_table_nothing_to_do(run):
    assert "advice" not in run("check")
    assert run("create-table") == "idempotency_record: nothing to do\n"
