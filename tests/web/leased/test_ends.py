"""Operations that are not atomic: every end is kept, or frees the key."""

import pytest
from flask import after_this_request, got_request_exception

from flask_idempotency import NotAtomic, Retryable, current_operation
from tests.log import ours
from tests.web.leased.records import end_lease


@pytest.mark.parametrize("status", [500, 503, 402])
def test_a_response_that_says_it_failed_is_stored(world, add, status):
    runs = add(lambda: ({"sorry": True}, status))
    first, retry = world.post(), world.post()
    assert (first.status_code, first.data) == (retry.status_code, retry.data) == (status, retry.data)
    assert retry.headers["Idempotent-Replayed"] == "true"
    assert runs == [1]
    assert world.records()[0].state == ("failed" if status >= 500 else "completed")


def test_a_failure_is_an_error_of_the_log_that_names_the_finished_steps(world, add, caplog):
    """A charge without an order: nobody runs it again, so somebody has to know."""

    def fail():
        raise LookupError

    def view():
        current_operation.step("charge", dict)
        if current_operation.attempt == 1:
            raise Retryable
        current_operation.step("save", fail, atomic=True)

    add(view)
    assert [world.post().status_code for _ in range(3)] == [503, 500, 500]
    every = [each for each in caplog.records if each.name == "flask_idempotency"]
    [line] = [each for each in every if each.levelname != "INFO"]
    digits = world.records()[0].key.hex()[:8]
    assert line.levelname == "ERROR"
    assert line.message.startswith("operation charge failed: problem operation-failed, attempt 2,")
    assert line.message.endswith(f"steps ['charge'], decided_by records, id {digits}")
    assert (line.operation, line.status, line.steps) == ("charge", 500, ["charge"])


def test_one_that_the_route_found_to_have_failed_is_no_error(world, add, caplog):
    """So the route decided: nobody has to."""

    def leave():
        raise SystemExit

    add(leave, on_interrupted=lambda _operation: ({}, 500))
    with pytest.raises(SystemExit):
        world.post()
    end_lease(world)
    assert world.post().status_code == 500
    assert ours(caplog) == []


def test_a_response_about_the_caller_frees_the_key(world, add, assert_problem):
    runs = add(lambda: ({}, 429) if len(runs) == 1 else ({}, 201))
    assert world.post().status_code == 429
    assert_problem(world.post(json={"amount": 6}), 422, "key-reused")
    assert world.post().status_code == 201
    assert runs == [1, 2]


@pytest.mark.parametrize("status", [201, 409])
def test_what_a_teardown_would_commit_is_undone_before_it(world, add, status, caplog):
    """It comes when the response is stored."""

    @world.app.teardown_request
    def commit(error):
        if error is None:
            world.db.session.commit()

    def pay():
        world.db.session.add(world.Payment(amount=1))
        return {}, status

    add(pay)
    assert world.post().status_code == status
    assert "left changes it did not commit; they are undone" in caplog.text
    assert (world.count(), world.records()[0].state) == (0, "completed")


def test_what_the_caller_of_run_would_commit_is_refused(world, caplog):
    with world.app.app_context():
        with pytest.raises(NotAtomic, match="commit them"):
            world.idempotency.run("key", pay_without_commit, world, scope="s", atomic=False)
        world.db.session.commit()
    assert world.count() == 0


def test_an_error_inside_run_is_raised_in_place_of_that(world):
    def pay_and_fail():
        pay_without_commit(world)
        raise OSError("as asked")

    with world.app.app_context():
        with pytest.raises(OSError, match="as asked"):
            world.idempotency.run("key", pay_and_fail, scope="s", name="pay", atomic=False)
        world.db.session.commit()
    assert world.count() == 0


def pay_without_commit(world):
    world.db.session.add(world.Payment(amount=1))


def test_the_route_may_say_what_is_stored(world, add):
    runs = add(lambda: ({}, 500), store=lambda response: response.status_code < 500)
    assert [world.post().status_code for _ in range(2)] == [500, 500]
    assert runs == [1, 2]


def raises_in_the_handler(app, error=None):
    @app.errorhandler(LookupError)
    def handle(_error):
        raise error or ZeroDivisionError("the handler has a mistake")


def fails_in_an_own_function(_app):
    @after_this_request
    def fail(_response):
        raise ZeroDivisionError


@pytest.mark.parametrize("policy", ["hold", "retry"])
def test_an_error_of_the_error_handler_is_stored_as_the_response_that_flask_gives_it(
    app, world, add, policy
):
    """The view has charged before it failed: it must not run again because a template is wrong."""
    raises_in_the_handler(app)

    @app.errorhandler(500)
    def sorry(error):
        return {"sorry": type(error.original_exception).__name__}, 500

    def view():
        raise LookupError

    runs = add(view, on_interrupted=policy)
    told = []
    got_request_exception.connect(hear := lambda _app, exception: told.append(exception), app)
    replies = [world.post() for _ in range(3)]
    assert [reply.json for reply in replies] == [{"sorry": "ZeroDivisionError"}] * 3
    assert [reply.status_code for reply in replies] == [500] * 3
    assert (runs, world.records()[0].state) == ([1], "failed")
    assert [type(error) for error in told] == [ZeroDivisionError]
    assert isinstance(told[0].__context__, LookupError)
    del hear


def test_an_error_in_the_handler_of_500_is_stored_as_a_plain_500(app, world, add):
    @app.errorhandler(500)
    def sorry(_error):
        raise ZeroDivisionError

    def view():
        raise LookupError

    runs = add(view, on_interrupted="retry")
    with pytest.raises(ZeroDivisionError):
        world.post()
    assert world.post().status_code == 500
    assert (runs, world.records()[0].state) == ([1], "failed")


def test_what_an_error_handler_raises_is_flasks_500_even_retryable(app, world, add):
    raises_in_the_handler(app, Retryable())

    def view():
        if len(runs) == 1:
            raise LookupError
        return {}, 201

    runs = add(view)
    assert [world.post().status_code for _ in range(2)] == [500, 500]
    assert (runs, world.records()[0].state) == ([1], "failed")


@pytest.mark.parametrize("fails_before", [False, True])
def test_an_error_in_what_the_view_registered_is_stored(app, world, add, fails_before):
    @app.errorhandler(LookupError)
    def handle(_error):
        return {}, 409

    def view():
        fails_in_an_own_function(app)
        if fails_before:
            raise LookupError
        return {}, 201

    runs = add(view, on_interrupted="retry")
    assert [world.post().status_code for _ in range(3)] == [500] * 3
    assert (runs, world.records()[0].state) == ([1], "failed")


def test_an_error_handler_that_makes_no_response_is_stored(app, world, add):
    @app.errorhandler(LookupError)
    def handle(_error):
        return None

    def view():
        raise LookupError

    runs = add(view, on_interrupted="retry")
    assert [world.post().status_code for _ in range(3)] == [500] * 3
    assert (runs, world.records()[0].state) == ([1], "failed")


def test_an_exception_that_flask_lets_out_is_stored_first(app, world, add):
    app.config["PROPAGATE_EXCEPTIONS"] = True

    def view():
        raise LookupError

    runs = add(view)
    with pytest.raises(LookupError):
        world.post()
    assert world.post().status_code == 500
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
