"""Operations that are not atomic: an interrupted one is nobody's to guess."""

import logging
from datetime import timedelta

import pytest
import sqlalchemy as sa

from flask_idempotency import (
    ConfigurationError,
    OperationInterrupted,
    Retryable,
    TransactionConflict,
    current_operation,
)
from flask_idempotency.cli import cli
from flask_idempotency.core.errors import LeaseLost
from tests.killed import Killed
from tests.log import ours
from tests.web.leased.records import begun, end_lease, kill, steps

FOUND = {"found": True}, 201


def ending(*ends):
    """A view, or a function, that ends so each time: raises it or returns it; then it names itself."""
    left = list(ends)

    def end(*_operation):
        found = left.pop(0) if left else {"attempt": current_operation.attempt}
        if isinstance(found, (BaseException, type)):
            raise found
        return found

    return end


def expire(world):
    world.sql("update idempotency_record set expires_at = clock_timestamp() - interval '2 days'")
    assert world.app.test_cli_runner().invoke(cli, ["purge"]).exit_code == 0


def test_an_interrupted_operation_is_held(world, add, assert_problem, heard, caplog):
    runs = add(ending(Killed))
    kill(world)
    assert [line.levelname for line in ours(caplog)] == ["ERROR"]
    heard.clear()
    assert_problem(world.post(), 409, "operation-interrupted")
    assert [(name, event.outcome) for name, event in heard] == [
        ("operation_interrupted", None),
        ("operation_rejected", "rejected"),
    ]
    assert_problem(world.post(json={"amount": 6}), 422, "key-reused")
    assert runs == [1]


def test_where_the_route_says_so_it_runs_again_as_long_as_the_other_side_may_know_its_keys(
    world, add, assert_problem
):
    """That counts from the view's first call, however often it was interrupted since."""
    runs = add(ending(Killed), on_interrupted="retry", ttl=3600, refuse_old_keys=True)
    kill(world)
    begun(world, ago="3601 seconds")
    assert_problem(world.post(), 409, "operation-interrupted")
    begun(world, ago="3590 seconds")
    assert [world.post().json for _ in range(2)] == [{"attempt": 2}] * 2
    assert runs == [1, 2]


ASKED = {
    "it does not know": ([None], [201, 201], [1, 2]),
    "it knows": ([FOUND], [201, 201], [1]),
    "it fails": ([LookupError, FOUND], [500, 201], [1]),
    "it cannot ask": ([Retryable, FOUND], [503, 201], [1]),
    "it asks in vain": ([OperationInterrupted, FOUND], [503, 201], [1]),
}


@pytest.mark.parametrize("found", ASKED)
@pytest.mark.parametrize("when", ["at once", "long ago", "released"])
def test_the_application_may_find_out_what_came_of_it(app, world, add, found, when):
    """Also of what an operator released: it may have happened, and the route may know."""
    answers, statuses, expected = ASKED[found]
    answer = ending(*answers)

    def find_out(operation):
        assert (operation.key, operation.attempt) == ("key-1", current_operation.attempt)
        assert world.db.session.scalar(sa.text("select 2")) == 2
        return answer()

    app.before_request(lambda: world.db.session.scalar(sa.text("select null")))
    runs = add(ending(Killed), on_interrupted=find_out, ttl=3600)
    kill(world)
    if when == "long ago":
        end_lease(world, ago="30 days")
        begun(world, ago="31 days")
    if when == "released":
        world.sql(
            "update idempotency_record set completed_at = clock_timestamp(), released_attempt = attempt"
        )
        begun(world, ago="3601 seconds")
        assert world.post().status_code == 409, "it is open as long as one that is tried again"
        begun(world, ago="3590 seconds")
    assert [world.post().status_code for _ in statuses] == statuses
    assert runs == expected
    if FOUND in answers:
        assert world.post().json == FOUND[0]


def test_what_the_application_found_out_may_be_a_step(world, add):
    death = ending(Killed, None)
    add(
        lambda: death() or current_operation.step("charge", lambda: pytest.fail("it ran")),
        on_interrupted=lambda operation: operation.step("charge", lambda: "found") and None,
    )
    kill(world)
    assert world.post().json == "found"


def test_who_does_not_know_the_outcome_is_run_again_where_the_route_says_so(world, add, assert_problem):
    """So the client is told to come back, and nobody forgets an effect whose client does not."""
    silent = OperationInterrupted("The provider is silent.", retry_after=7)
    runs = add(ending(silent, OperationInterrupted()), on_interrupted="retry")
    first = world.post()
    problem = assert_problem(first, 503, "try-again", retry=True)
    assert problem["detail"] == "The outcome is not known yet; try again with the same key."
    assert first.headers["Retry-After"] == "7"
    assert_problem(world.post(), 503, "try-again", retry=True)
    assert world.post().json == {"attempt": 3}
    assert runs == [1, 2, 3]


@pytest.mark.parametrize("end", [OperationInterrupted, Killed])
def test_nobody_asks_what_happened_before_the_lease_has_ended(world, add, assert_problem, end):
    """What was called may still be at work, and would say that nothing has happened."""
    asked = []
    runs = add(ending(end, end), on_interrupted=lambda operation: asked.append(operation.attempt))
    for attempt in (1, 2):
        if end is Killed:
            with pytest.raises(Killed):
                world.post()
        else:
            assert_problem(world.post(), 503, "try-again", retry=True)
        assert_problem(world.post(), 409, "request-in-progress", retry=True)
        assert runs == [*range(1, attempt + 1)]
        end_lease(world)
    assert asked == [2]


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("end", [Retryable, ({"error": "slow down"}, 429)])
def test_what_was_interrupted_once_stays_so_until_it_has_ended(world, add, assert_problem, end, asks):
    """That this attempt has done nothing says nothing about the one that was cut off."""
    asked = []
    policy = (lambda operation: asked.append(operation.attempt)) if asks else "retry"
    runs = add(ending(Killed, end), on_interrupted=policy, ttl=3600)
    kill(world)
    assert world.post().status_code in (429, 503)
    expire(world)
    begun(world, ago="2 days")
    if not asks:
        assert_problem(world.post(), 409, "operation-interrupted")
        begun(world, ago="1 minute")
    assert world.post().status_code == 201
    assert (runs, asked) == ([1, 2, 3], [2, 3] if asks else [])


@pytest.mark.parametrize(
    "end", [Retryable, TransactionConflict, ({"error": "slow down"}, 429), RuntimeError]
)
def test_what_has_finished_a_step_is_never_forgotten(world, add, end):
    """Something was charged, and its client may never come back."""
    after = ending(end)

    def view():
        charge = current_operation.step("charge", lambda: 17)
        after_it = after()
        return after_it if isinstance(after_it, tuple) else {"charge": charge}

    runs = add(view)
    assert world.post().status_code in (429, 500, 503)
    end_lease(world, ago="2 days")
    expire(world)
    again = world.post()
    if end is RuntimeError:  # it waits for somebody, and its response is stored
        assert (again.status_code, again.headers["Idempotent-Replayed"]) == (500, "true")
    else:
        assert (again.json, runs) == ({"charge": 17}, [1, 2])


# One attempt runs at a time, as long as its lease, and a late writer loses.


def test_a_duplicate_is_rejected_while_the_lease_runs_though_the_retention_is_over(
    world, add, gate, background, assert_problem
):
    runs = add(lambda: gate() or {}, lease=30)
    first = background(world.post)
    gate.wait_until_reached()
    expire(world)
    duplicate = world.post()
    assert_problem(duplicate, 409, "request-in-progress", retry=True)
    assert 25 <= int(duplicate.headers["Retry-After"]) <= 30
    assert_problem(world.post(json={"amount": 6}), 422, "key-reused")
    gate.open()
    assert first.result().status_code == 201
    assert world.post().headers["Idempotent-Replayed"] == "true"
    assert runs == [1]


@pytest.mark.parametrize("place", ["between steps", "in a step"])
def test_who_was_taken_over_writes_nothing(world, add, gate, background, assert_problem, caplog, place):
    """Where both attempts may have called, the log says so: nobody else notices."""

    def view():
        if place == "in a step":
            current_operation.step("charge", lambda: current_operation.attempt == 1 and gate())
        elif current_operation.attempt == 1:
            gate()
            with pytest.raises(LeaseLost):
                current_operation.extend(10)
            with pytest.raises(LeaseLost):
                current_operation.step("charge", lambda: pytest.fail("it ran"))
        return {"attempt": current_operation.attempt}

    runs = add(view, on_interrupted="retry")
    first = background(world.post)
    gate.wait_until_reached()
    end_lease(world)
    assert world.post().json == {"attempt": 2}
    gate.open()
    assert_problem(first.result(), 409, "request-in-progress", retry=True)
    assert world.post().json == {"attempt": 2}
    assert runs == [1, 2]
    assert steps(world) == ([("charge", 2)] if place == "in a step" else [])
    expected = f"operation charge, record {world.records()[0].key.hex()[:8]}: another request took it"
    said = [line.message.startswith(expected) for line in ours(caplog, logging.ERROR)]
    assert said == ([True] if place == "in a step" else [])


def test_a_lease_is_extended_by_what_could_be_one(world, add):
    def view():
        for seconds in None, "30", 0, -1, True, float("nan"), float("inf"), 10**12:
            with pytest.raises(ConfigurationError, match="lease is .*; allowed: seconds"):
                current_operation.extend(seconds)
        current_operation.extend(timedelta(hours=1))
        with pytest.raises(RuntimeError, match="no transaction"):
            current_operation.connection  # noqa: B018
        left = "select extract(epoch from lease_expires_at - now()) from idempotency_record"
        return {"long": world.sql(left)[0][0] > 3500}

    add(view, lease=20)
    assert world.post().json == {"long": True}
