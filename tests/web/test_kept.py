"""Which answers are kept, and that the view's writes are there if and only if its answer is."""

import functools

import pytest
from flask import abort

from flask_idempotency import after_commit, current_operation, idempotent

KEPT = [200, 204, 303, 400, 402, 404, 407, 409, 424, 426, 428, 430, 499]
NOT_KEPT = [401, 403, 408, 425, 429, 500, 503, 599]


@pytest.fixture
def add_answering(app, world):
    """Adds a view that commits a payment and then does what it is told; gives its attempts."""

    def add(answer, **options):
        attempts = []

        @app.post("/answer/<int:status>")
        @idempotent(**options)
        def view(status):
            attempts.append(current_operation.attempt)
            world.db.session.add(world.Payment(amount=status))
            world.db.session.commit()
            return answer(status)

        return attempts

    return add


@pytest.fixture
def assert_kept(world):
    def check(status, *, as_status=None):
        before, (first, retry) = world.count(), twice(world, status)
        assert first.status_code == retry.status_code == (as_status or status)
        assert retry.headers.get("Idempotent-Replayed") == "true", status
        assert retry.data == first.data
        assert world.count() == before + 1, status

    return check


@pytest.fixture
def assert_not_kept(world):
    def check(status, *, as_status=None):
        before, (first, retry) = world.count(), twice(world, status)
        assert first.status_code == retry.status_code == (as_status or status)
        assert "Idempotent-Replayed" not in retry.headers, status
        assert world.count() == before, status

    return check


def twice(world, status):
    return [world.post(f"/answer/{status}", key=f"key-{status}") for _ in range(2)]


def test_responses_below_500_are_stored_with_the_writes_of_their_view(add_answering, assert_kept):
    attempts = add_answering(lambda status: ("", status))
    for status in KEPT:
        assert_kept(status)
    assert attempts == [1] * len(KEPT)


def test_other_responses_are_not_stored_and_roll_the_writes_back(add_answering, assert_not_kept):
    attempts = add_answering(lambda status: ("", status))
    for status in NOT_KEPT:
        assert_not_kept(status)
    assert attempts == [1, 2] * len(NOT_KEPT)


def test_a_route_may_say_which_responses_are_stored(add_answering, assert_kept, assert_not_kept):
    add_answering(lambda status: ("", status), store=lambda answer: answer.status_code in {201, 503})
    for status in 201, 503:
        assert_kept(status)
    for status in 200, 404:
        assert_not_kept(status)


def test_aborting_responds_as_returning_does(add_answering, assert_kept, assert_not_kept):
    add_answering(abort)
    for status in 400, 404, 409, 422:
        assert_kept(status)
    for status in 401, 403, 429, 500, 503:
        assert_not_kept(status)


class OutOfStock(Exception):
    pass


class Broken(Exception):
    pass


def test_an_error_handler_responds_to_the_exception(app, add_answering, assert_kept, assert_not_kept):
    app.register_error_handler(OutOfStock, lambda error: ({"sold": "out"}, 409))
    app.register_error_handler(Broken, lambda error: ({"sorry": True}, 500))
    errors = {1: OutOfStock, 2: Broken}

    def fail(status):
        raise errors[status]

    attempts = add_answering(fail)
    assert_kept(1, as_status=409)
    assert_not_kept(2, as_status=500)
    assert attempts == [1, 1, 2]


def test_an_unhandled_exception_keeps_nothing_and_the_next_try_runs(app, world):
    failures = [ZeroDivisionError(), KeyError("x")]

    @app.post("/payments")
    @idempotent
    def pay():
        world.db.session.add(world.Payment(amount=current_operation.attempt))
        world.db.session.commit()
        if failures:
            raise failures.pop()
        return {}, 201

    assert world.post().status_code == 500
    assert world.count() == 0
    assert [(record.state, record.body) for record in world.records()] == [("in_progress", None)]
    assert world.post().status_code == 500
    assert world.post().status_code == 201
    assert world.post().headers["Idempotent-Replayed"] == "true"
    assert world.sql("select amount from payment") == [(3,)]


def test_a_worker_that_is_told_to_exit_keeps_nothing(world, add_view):
    exits = [SystemExit(1)]

    def exit_once():
        if exits:
            raise exits.pop()

    runs = add_view(world, during=exit_once)
    with pytest.raises(SystemExit):
        world.post()
    assert world.count() == 0
    assert world.post().status_code == 201
    assert runs == [1, 2]


def test_an_exit_above_the_view_keeps_nothing_and_passes_as_it_is(app, world):
    """The view leaves its work to an ``after_request`` function, where the worker is told to exit."""
    exits, torn_down = [SystemExit(1)], []
    app.teardown_request(torn_down.append)

    @app.post("/payments")
    @idempotent
    def pay():
        world.db.session.add(world.Payment(amount=5))
        return {}, 201

    @app.after_request
    def commit(response):
        if exits:
            raise exits.pop()
        world.db.session.commit()
        return response

    with pytest.raises(SystemExit):
        world.post()
    assert [type(error) for error in torn_down] == [SystemExit], "the application's teardown runs"
    assert world.count() == 0
    assert world.post().status_code == 201
    assert world.count() == 1


def test_a_generator_that_fails_on_its_way_keeps_nothing(app, world):
    failures = [ValueError("half way")]

    @app.post("/payments")
    @idempotent
    def pay():
        def body():
            yield "one"
            world.db.session.add(world.Payment(amount=5))
            world.db.session.commit()
            if failures:
                raise failures.pop()
            yield "two"

        return body()

    assert world.post().status_code == 500
    assert world.count() == 0
    assert world.post().data == world.post().data == b"onetwo"
    assert world.count() == 1


def test_a_result_that_is_no_response_stores_nothing(app, world):
    answers = [None, ({}, 201)]

    @app.post("/payments")
    @idempotent
    def pay():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        return answers.pop(0)

    assert world.post().status_code == 500
    assert world.count() == 0
    assert world.post().status_code == 201


@pytest.mark.parametrize("status", [0, 99, 600, 99999])
def test_a_status_that_no_client_understands_keeps_nothing_and_is_named(app, world, caplog, status):
    @app.post("/payments")
    @idempotent(store=lambda response: True)
    def pay():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        return "", status

    assert world.post().status_code == 500
    assert f"the view returned the status {status}; allowed: 100 to 599" in caplog.text
    assert world.count() == 0


def test_an_error_in_after_request_comes_after_the_commit(app, world, add_view):
    """The first client is told 500; the retry gets what was committed."""
    failures = [RuntimeError("too late")]

    @app.after_request
    def fail_once(response):
        if failures:
            raise failures.pop()
        return response

    runs = add_view(world)
    assert world.post().status_code == 500
    assert world.count() == 1
    assert world.post().status_code == 201
    assert runs == [1]


@pytest.mark.parametrize("atomic", [True, False])
def test_what_follows_the_commit_is_no_part_of_the_operation(app, world, atomic):
    mails = []

    @app.post("/payments")
    @idempotent(atomic=atomic)
    def pay():
        mail = functools.partial(mails.append, 1)
        after_commit(lambda: world.idempotency.run("mail-1", mail, name="mail", scope=None))
        return {}, 201

    assert world.post().status_code == 201
    assert mails == [1]
