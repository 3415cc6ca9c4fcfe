"""Operations that are not atomic: an interrupted one is nobody's to guess."""

from contextlib import suppress

import pytest
import sqlalchemy as sa

from flask_idempotency import (
    OperationInterrupted,
    Retryable,
    TransactionConflict,
    current_operation,
    idempotent,
    operation_interrupted,
)
from flask_idempotency.cli import cli
from tests.killed import Killed
from tests.web.leased.records import begun, end_lease, lease_is_over


def interrupt(world, add, **options):
    """A view that is killed in its first attempt; its lease is over."""
    killed = []

    def view():
        if not killed:
            killed.append(True)
            raise Killed
        return {"attempt": current_operation.attempt}, 201

    runs = add(view, **options)
    with pytest.raises(Killed):
        world.post()
    end_lease(world)
    return runs


def test_an_interrupted_operation_is_held(app, world, add, assert_problem):
    runs = interrupt(world, add)
    events = []
    with operation_interrupted.connected_to(lambda _app, event: events.append(event), app):
        assert_problem(world.post(), 409, "operation-interrupted")
    assert [event.operation for event in events] == ["charge"]
    assert_problem(world.post(json={"amount": 6}), 422, "key-reused")
    assert runs == [1]


def test_an_interrupted_operation_is_run_again_where_the_route_says_so(world, add):
    runs = interrupt(world, add, on_interrupted="retry")
    assert world.post().json == {"attempt": 2}
    assert world.post().json == {"attempt": 2}
    assert runs == [1, 2]


def test_it_is_held_once_the_other_side_may_have_forgotten_its_keys(world, add, assert_problem):
    """It counts from the view's first call, however often it was interrupted since."""
    runs = interrupt(world, add, on_interrupted="retry", ttl=3600, refuse_old_keys=True)
    begun(world, ago="3601 seconds")
    assert_problem(world.post(), 409, "operation-interrupted")
    begun(world, ago="3590 seconds")
    assert world.post().json == {"attempt": 2}
    assert runs == [1, 2]


def test_who_does_not_know_the_outcome_is_run_again_where_the_route_says_so(world, add, assert_problem):
    """So the client is told to come back, and nobody forgets an effect whose client does not."""
    errors = [OperationInterrupted("The provider is silent.", retry_after=7), OperationInterrupted()]

    def view():
        if errors:
            raise errors.pop(0)
        return {"attempt": current_operation.attempt}, 201

    runs = add(view, on_interrupted="retry")
    first = world.post()
    told = assert_problem(first, 503, "try-again", retry=True)
    assert told["detail"] == "The outcome is not known yet; try again with the same key."
    assert first.headers["Retry-After"] == "7"
    assert lease_is_over(world)
    assert_problem(world.post(), 503, "try-again", retry=True)
    assert world.post().json == {"attempt": 3}
    assert runs == [1, 2, 3]


@pytest.mark.parametrize("end", [OperationInterrupted, Killed])
def test_nobody_asks_what_happened_before_the_lease_has_ended(world, add, assert_problem, end):
    """What was called may still be at work, and would say that nothing has happened."""
    asked = []

    def view():
        raise end

    runs = add(view, on_interrupted=lambda operation: asked.append(operation.attempt))
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


def test_what_could_not_be_asked_is_asked_by_the_next_request(world, add):
    """The view has not run in that attempt, so nothing is at work."""
    found = [Retryable, {"found": True}]

    def ask(_operation):
        if (answer := found.pop(0)) is Retryable:
            raise Retryable
        return answer

    interrupt(world, add, on_interrupted=ask)
    assert [world.post().status_code for _ in range(2)] == [503, 200]


@pytest.mark.parametrize("leaves", ["add", "flush"])
def test_what_was_found_is_stored_although_it_has_left_changes(world, add, caplog, leaves):
    """As with a view that does: they are undone, and the log says so."""

    def find_out(_operation):
        world.db.session.add(world.Payment(amount=5))
        if leaves == "flush":
            world.db.session.flush()
        return {"found": True}, 201

    interrupt(world, add, on_interrupted=find_out)
    assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert world.sql("select state, (select count(*) from payment) from idempotency_record") == [
        ("completed", 0)
    ]
    assert caplog.text.count("left changes it did not commit") == 1


def test_who_finds_out_may_call_an_idempotent_function_that_fails(world, add):
    """It is part of the operation: its error, once caught, ends neither the operation nor its lease."""
    leases = []

    @idempotent(name="look-up")
    def look_up():
        raise LookupError

    def find_out(_operation):
        with suppress(LookupError):
            look_up()
        leases.append(world.sql("select lease_expires_at > clock_timestamp() from idempotency_record"))
        return {"found": True}, 201

    interrupt(world, add, on_interrupted=find_out)
    assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert leases == [[(True,)]]


def test_who_has_found_out_that_nothing_happened_may_free_the_key(world, add):
    ends = [Killed(), Retryable()]

    def view():
        if ends:
            raise ends.pop(0)
        return {}, 201

    runs = add(view, on_interrupted=lambda _operation: None)
    with pytest.raises(Killed):
        world.post()
    end_lease(world)
    assert [world.post().status_code for _ in range(2)] == [503, 201]
    assert runs == [1, 2, 3]


@pytest.mark.parametrize("end", [Retryable(), ({"error": "slow down"}, 429)])
def test_what_was_interrupted_once_stays_so_until_it_has_ended(world, add, assert_problem, end):
    """That this attempt has done nothing says nothing about the one that was cut off."""
    ends = [Killed(), end]

    def view():
        found = ends.pop(0) if ends else ({}, 201)
        if isinstance(found, BaseException):
            raise found
        return found

    runs = add(view, on_interrupted="retry", ttl=3600)
    with pytest.raises(Killed):
        world.post()
    end_lease(world)
    assert world.post().status_code in (429, 503)
    world.sql("update idempotency_record set expires_at = clock_timestamp() - interval '1 day'")
    begun(world, ago="2 days")
    assert_problem(world.post(), 409, "operation-interrupted")
    begun(world, ago="1 minute")
    assert world.post().status_code == 201
    assert runs == [1, 2, 3]


def test_who_can_find_out_is_asked_however_long_ago_it_was(world, add):
    runs = interrupt(world, add, on_interrupted=lambda _operation: None, ttl=3600)
    end_lease(world, ago="30 days")
    assert world.post().json == {"attempt": 2}
    assert runs == [1, 2]


def test_the_application_may_find_out_what_came_of_it(world, add):
    asked = []

    def find_out(operation):
        asked.append((operation.key, operation.attempt, current_operation.attempt))
        return ({"found": True}, 201) if len(asked) == 2 else None

    runs = interrupt(world, add, on_interrupted=find_out)
    assert world.post().json == {"attempt": 2}  # None: run it again
    assert runs == [1, 2]
    runs.clear()
    world.sql("update idempotency_record set state = 'in_progress', status = null, completed_at = null")
    end_lease(world)
    assert [world.post().json for _ in range(2)] == [{"found": True}] * 2
    assert runs == []
    assert asked == [("key-1", 2, 2), ("key-1", 3, 3)]


def test_who_finds_out_may_use_the_session_that_has_read_before_the_view(app, world, add):
    def find_out(_operation):
        return {"found": world.db.session.scalar(sa.text("select 2"))}, 201

    app.before_request(lambda: world.db.session.scalar(sa.text("select null")))
    interrupt(world, add, on_interrupted=find_out)
    assert world.post().json == {"found": 2}


def test_what_the_application_found_out_may_be_a_step(world, add):
    def find_out(operation):
        operation.step("charge", lambda: "found")

    killed = []

    def view():
        if not killed:
            killed.append(True)
            raise Killed
        return {"charge": current_operation.step("charge", lambda: pytest.fail("it ran"))}, 201

    add(view, on_interrupted=find_out)
    with pytest.raises(Killed):
        world.post()
    end_lease(world)
    assert world.post().json == {"charge": "found"}


def test_who_could_not_find_out_is_asked_again(world, add):
    answers = [LookupError("the provider is away"), ({"found": True}, 201)]

    def find_out(_operation):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    runs = interrupt(world, add, on_interrupted=find_out)
    assert world.post().status_code == 500
    assert world.post().json == {"found": True}
    assert runs == [1]


@pytest.mark.parametrize("end", [Retryable, TransactionConflict, 429])
def test_what_has_finished_a_step_is_never_forgotten(world, add, end):
    """Something was charged, and its client may never come back."""

    def view():
        charge = current_operation.step("charge", lambda: 17)
        if current_operation.attempt == 2:
            return {"charge": charge}, 201
        if end == 429:
            return {"error": "slow down"}, end
        raise end

    runs = add(view)
    assert world.post().status_code in (429, 503)
    past = "clock_timestamp() - interval '2 days'"
    world.sql(f"update idempotency_record set expires_at = {past}, lease_expires_at = {past}")
    assert world.app.test_cli_runner().invoke(cli, ["purge"]).exit_code == 0
    assert world.post().json == {"charge": 17}
    assert runs == [1, 2]


def test_what_has_failed_after_a_step_waits_for_somebody(world, add):
    def view():
        current_operation.step("charge", lambda: 17)
        raise RuntimeError

    add(view)
    assert world.post().status_code == 500
    past = "clock_timestamp() - interval '2 days'"
    world.sql(f"update idempotency_record set expires_at = {past}, created_at = {past}")
    assert world.app.test_cli_runner().invoke(cli, ["purge"]).exit_code == 0
    assert world.post().headers["Idempotent-Replayed"] == "true"
    with world.app.app_context():
        found = world.app.extensions["idempotency"].records.admin().overview()
    assert (found.interrupted, round(found.interrupted_seconds, -4)) == (1, 170000)


def test_a_failure_that_the_route_has_decided_expires(world, add):
    def view():
        current_operation.step("charge", lambda: 17)
        raise Killed

    add(view, on_interrupted=lambda _operation: ({}, 500))
    with pytest.raises(Killed):
        world.post()
    end_lease(world)
    assert world.post().status_code == 500
    assert world.sql("select state, lease_expires_at from idempotency_record") == [("failed", None)]


def test_who_can_find_out_is_asked_about_what_an_operator_released_too(world, add):
    """It may have happened: the operator may have meant that the route is to go on."""
    asked = []

    def find_out(_operation):
        asked.append(True)
        return {"found": True}, 201

    runs = interrupt(world, add, on_interrupted=find_out)
    world.sql("update idempotency_record set completed_at = clock_timestamp(),"  # as `release` does
              " released_attempt = attempt")  # fmt: skip
    assert world.post().json == {"found": True}
    assert (runs, asked) == ([1], [True])
