"""Operations that are not atomic: every end is kept, and an interrupted one is nobody's to guess."""

from __future__ import annotations

import pytest
from flask import abort

from flask_idempotency import (
    LeaseLost,
    Retryable,
    current_operation,
    idempotent,
    operation_interrupted,
)
from flask_idempotency.stores import admin


@pytest.fixture
def world(make_world):
    # Redis is asked, but never believed about a lock: what is tested is the record.
    return make_world(IDEMPOTENCY_PROBE_AFTER=0, PROPAGATE_EXCEPTIONS=False)


@pytest.fixture
def add(world):
    """Adds a view that is not atomic and answers what ``does`` answers; gives the attempts it ran."""

    def add(does=lambda: ({"done": True}, 201), **options):
        runs = []

        def charge():
            runs.append(current_operation.attempt)
            return does()

        view = idempotent(atomic=False, **options)(charge)
        world.app.add_url_rule("/payments", "charge", view, methods=["POST"])
        return runs

    return add


def end_lease(world):
    world.sql("update idempotency_record set lease_expires_at = clock_timestamp()")


class Killed(BaseException):
    """Nothing catches it, as nothing catches a SIGKILL."""


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


def test_a_duplicate_that_may_wait_gets_the_answer(world, add, gate, background):
    runs = add(lambda: gate() or ({}, 201), wait=10)
    first = background(world.post)
    gate.wait_until_reached()
    duplicate = background(world.post)
    gate.open()
    assert first.result().data == duplicate.result().data
    assert runs == [1]


def test_the_retention_cannot_end_before_the_operation(world, add, gate, background):
    runs = add(lambda: gate() or ({}, 201), ttl=1)
    first = background(world.post)
    gate.wait_until_reached()
    world.sql("update idempotency_record set expires_at = clock_timestamp() - interval '1 hour'")
    assert world.post().status_code == 409
    assert list(admin.purge(world.app.extensions["idempotency"].records, 100)) == []
    gate.open()
    assert first.result().status_code == 201
    assert world.post().headers["Idempotent-Replayed"] == "true"
    assert runs == [1]


@pytest.mark.parametrize("status", [500, 503, 402])
def test_an_answer_that_says_it_failed_is_kept(world, add, status):
    runs = add(lambda: ({"sorry": True}, status))
    first, retry = world.post(), world.post()
    assert (first.status_code, first.data) == (retry.status_code, retry.data) == (status, retry.data)
    assert retry.headers["Idempotent-Replayed"] == "true"
    assert runs == [1]
    assert world.records()[0].state == ("failed" if status >= 500 else "completed")


def test_an_answer_about_the_caller_frees_the_key(world, add, assert_problem):
    runs = add(lambda: ({}, 429) if len(runs) == 1 else ({}, 201))
    assert world.post().status_code == 429
    assert_problem(world.post(json={"amount": 6}), 422, "key-reused")
    assert world.post().status_code == 201
    assert runs == [1, 2]


def test_the_route_may_say_what_is_kept(world, add):
    runs = add(lambda: ({}, 500), store=lambda response: response.status_code < 500)
    assert [world.post().status_code for _ in range(2)] == [500, 500]
    assert runs == [1, 2]


def test_an_exception_is_kept_as_the_answer_that_the_application_gives_it(world, add):
    @world.app.errorhandler(500)
    def sorry(error):
        return {"sorry": type(error.original_exception).__name__}, 500

    def view():
        raise LookupError("canary")

    runs = add(view)
    first, retry = world.post(), world.post()
    assert first.json == retry.json == {"sorry": "LookupError"}
    assert retry.headers["Idempotent-Replayed"] == "true"
    assert runs == [1]


def test_an_exception_that_flask_lets_out_is_kept_first(world, add):
    world.app.config["PROPAGATE_EXCEPTIONS"] = True

    def view():
        raise LookupError

    runs = add(view)
    with pytest.raises(LookupError):
        world.post()
    assert world.post().status_code == 500
    assert runs == [1]


def test_a_handled_exception_is_kept_as_its_answer(world, add):
    runs = add(lambda: abort(418))
    assert [world.post().status_code for _ in range(2)] == [418, 418]
    assert runs == [1]


def test_retryable_frees_the_key(world, add, assert_problem):
    def view():
        if len(runs) == 1:
            raise Retryable("The provider is busy.", retry_after=7)
        return {}, 201

    runs = add(view)
    refused = world.post()
    problem = assert_problem(refused, 503, "try-again", retry=True)
    assert problem["detail"] == "The provider is busy."
    assert refused.headers["Retry-After"] == "7"
    assert world.post().status_code == 201
    assert runs == [1, 2]


def test_a_worker_that_is_told_to_exit_leaves_the_operation_interrupted_at_once(world, add):
    def view():
        raise SystemExit

    add(view)
    with pytest.raises(SystemExit):
        world.post()
    assert world.post().status_code == 409
    assert world.sql("select lease_expires_at <= clock_timestamp() from idempotency_record") == [
        (True,)
    ]


def test_an_interrupted_operation_is_held(world, add, assert_problem):
    runs = interrupt(world, add)
    events = []
    with operation_interrupted.connected_to(lambda _app, event: events.append(event), world.app):
        assert_problem(world.post(), 409, "operation-interrupted")
    assert [event.name for event in events] == ["charge"]
    assert_problem(world.post(json={"amount": 6}), 422, "key-reused")
    assert runs == [1]


def test_an_interrupted_operation_is_run_again_where_the_route_says_so(world, add):
    runs = interrupt(world, add, on_interrupted="retry")
    assert world.post().json == {"attempt": 2}
    assert world.post().json == {"attempt": 2}
    assert runs == [1, 2]


def test_an_interrupted_operation_fails_where_the_route_says_so(world, add, assert_problem):
    runs = interrupt(world, add, on_interrupted="fail", store=lambda _response: False)
    first, retry = world.post(), world.post()
    assert_problem(first, 500, "operation-failed")
    assert retry.data == first.data
    assert retry.headers["Cache-Control"] == "no-store"
    assert (runs, world.records()[0].state) == ([1], "failed")


def test_the_application_may_find_out_what_came_of_it(world, add):
    asked = []

    def find_out(operation):
        asked.append((operation.key, operation.attempt, current_operation.attempt))
        return ({"found": True}, 201) if len(asked) == 2 else None

    runs = interrupt(world, add, on_interrupted=find_out)
    assert world.post().json == {"attempt": 2}  # None: run it again
    assert runs == [1, 2]
    runs.clear()
    world.sql("update idempotency_record set state = 'in_progress', status = null")
    end_lease(world)
    world.sql("update idempotency_record set lease_expires_at = clock_timestamp()")
    assert [world.post().json for _ in range(2)] == [{"found": True}] * 2
    assert runs == []
    assert asked == [("key-1", 2, 2), ("key-1", 3, 3)]


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
    assert world.count("idempotency_record_step") == 0


def test_a_lease_may_be_made_longer_and_never_shorter(world, add):
    def view():
        current_operation.extend(3600)
        current_operation.extend(1)
        (left,) = world.sql(
            "select extract(epoch from lease_expires_at - clock_timestamp()) from idempotency_record"
        )[0]
        assert 3500 < left <= 3600
        return {}, 201

    add(view)
    assert world.post().status_code == 201


def test_a_late_end_that_nobody_overtook_counts(world, add, gate, background):
    add(lambda: gate() or ({}, 201))
    first = background(world.post)
    gate.wait_until_reached()
    end_lease(world)
    assert world.post().status_code == 409
    gate.open()
    assert first.result().status_code == 201
    assert world.post().status_code == 201
