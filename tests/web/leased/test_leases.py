"""Operations that are not atomic: one runs at a time, as long as its lease, and a late writer loses."""

import logging
from datetime import timedelta

import pytest

from flask_idempotency import ConfigurationError, current_operation
from flask_idempotency.core.errors import LeaseLost
from tests.log import ours
from tests.web.leased.records import end_lease, steps


def test_it_runs_once_without_a_transaction_and_replays(world, add):
    def view():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        assert world.count() == 1, "the view's own commit is a commit"
        with pytest.raises(RuntimeError, match="no transaction"):
            current_operation.connection  # noqa: B018
        return {"done": True}, 201

    runs = add(view)
    first, retry = world.post(), world.post()
    assert first.status_code == retry.status_code == 201
    assert first.data == retry.data
    assert retry.headers["Idempotent-Replayed"] == "true"
    assert (runs, world.count()) == ([1], 1)
    (record,) = world.records()
    assert (record.state, record.lease_expires_at) == ("completed", None)


def test_a_duplicate_is_told_how_long_the_lease_runs(world, add, gate, background, assert_problem):
    runs = add(lambda: gate() or ({}, 201), lease=30)
    first = background(world.post)
    gate.wait_until_reached()
    duplicate = world.post()
    assert_problem(duplicate, 409, "request-in-progress", retry=True)
    assert 25 <= int(duplicate.headers["Retry-After"]) <= 30
    assert_problem(world.post(json={"amount": 6}), 422, "key-reused")
    gate.open()
    assert first.result().status_code == 201
    assert runs == [1]


def test_a_duplicate_that_may_wait_gets_the_response(world, add, gate, background):
    runs = add(lambda: gate() or ({}, 201), wait=10)
    first = background(world.post)
    gate.wait_until_reached()
    duplicate = background(world.post)
    gate.open()
    assert first.result().data == duplicate.result().data
    assert runs == [1]


def test_the_retention_cannot_end_before_the_operation(app, world, add, gate, background):
    runs = add(lambda: gate() or ({}, 201), ttl=1)
    first = background(world.post)
    gate.wait_until_reached()
    world.sql("update idempotency_record set expires_at = clock_timestamp() - interval '1 hour'")
    assert world.post().status_code == 409
    assert list(app.extensions["idempotency"].records.admin().purge(100)) == []
    gate.open()
    assert first.result().status_code == 201
    assert world.post().headers["Idempotent-Replayed"] == "true"
    assert runs == [1]


def test_who_was_taken_over_writes_nothing(world, add, gate, background, assert_problem):
    def view():
        if current_operation.attempt == 1:
            gate()
            with pytest.raises(LeaseLost):
                current_operation.extend(10)
            with pytest.raises(LeaseLost):
                current_operation.step("charge", lambda: pytest.fail("it ran"))
        return {"attempt": current_operation.attempt}, 201

    runs = add(view, on_interrupted="retry")
    first = background(world.post)
    gate.wait_until_reached()
    end_lease(world)
    assert world.post().json == {"attempt": 2}
    gate.open()
    assert_problem(first.result(), 409, "request-in-progress", retry=True)
    assert world.post().json == {"attempt": 2}
    assert runs == [1, 2]
    assert steps(world) == []


def test_a_call_whose_attempt_was_taken_over_meanwhile_is_warned_of(
    world, add, gate, background, caplog
):
    """Both attempts may have called, and nobody else notices."""

    def view():
        current_operation.step("charge", lambda: current_operation.attempt == 1 and gate())
        return {}, 201

    add(view, on_interrupted="retry")
    first = background(world.post)
    gate.wait_until_reached()
    end_lease(world)
    assert world.post().status_code == 201
    gate.open()
    assert first.result().status_code == 409
    [warning] = ours(caplog, logging.ERROR)
    assert warning.message == (
        f"operation charge, record {world.records()[0].key.hex()[:8]}: another request took it over, or"
        " an operator decided, while its step 'charge' ran: both may have called"
    )


@pytest.mark.parametrize("seconds", [None, "30", 0, -1, True, float("nan"), float("inf"), 10**12])
def test_a_lease_that_could_not_be_one_is_refused(world, add, seconds):
    def view():
        with pytest.raises(ConfigurationError, match="lease is .*; allowed: seconds"):
            current_operation.extend(seconds)
        return {}, 201

    add(view, lease=20)
    assert world.post().status_code == 201


def test_a_lease_may_be_extended_by_a_timedelta(world, add):
    def view():
        current_operation.extend(timedelta(hours=1))
        ((left,),) = world.sql(
            "select extract(epoch from lease_expires_at - now()) from idempotency_record"
        )
        return {"long": left > 3500}, 201

    add(view, lease=20)
    assert world.post().json == {"long": True}
