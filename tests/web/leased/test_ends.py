"""Operations that are not atomic: every end is stored, or frees the key."""

from contextlib import suppress

import pytest
import sqlalchemy as sa
from flask import after_this_request

from flask_idempotency import NotAtomic, Retryable, current_operation
from tests.killed import Killed
from tests.log import ours
from tests.web.leased.records import kill


def fail(error=LookupError):
    raise error


def answer_after_a_failed_statement(world):
    with pytest.raises(sa.exc.ProgrammingError):
        world.db.session.execute(sa.text("select * from nowhere"))
    return {}, 201


@pytest.mark.parametrize(
    ("does", "status", "state"),
    [
        (lambda _: ({"sorry": True}, 500), 500, "failed"),
        (lambda _: ({"sorry": True}, 503), 503, "failed"),
        (lambda _: ({"sorry": True}, 402), 402, "completed"),
        (lambda world: world.db.session.execute(sa.text("select * from nowhere")), 500, "failed"),
        (answer_after_a_failed_statement, 201, "completed"),
    ],
)
def test_a_response_is_stored_whatever_it_says(world, add, does, status, state):
    runs = add(lambda: does(world))
    first, retry = world.post(), world.post()
    assert (first.status_code, retry.status_code) == (status, status)
    assert retry.headers["Idempotent-Replayed"] == "true"
    assert (runs, world.records()[0].state) == ([1], state)


def test_a_failure_is_an_error_of_the_log_that_names_the_finished_steps(world, add, caplog):
    """A charge without an order: nobody runs it again, so somebody has to know."""

    def view():
        current_operation.step("charge", dict)
        if current_operation.attempt == 1:
            raise Retryable
        current_operation.step("save", fail, atomic=True)

    add(view)
    assert [world.post().status_code for _ in range(3)] == [503, 500, 500]
    [line] = ours(caplog)
    assert line.levelname == "ERROR"
    assert line.message.startswith("operation charge failed: problem operation-failed, attempt 2,")
    assert (line.operation, line.status, line.steps) == ("charge", 500, ["charge"])
    assert line.id == world.records()[0].key.hex()[:8]


def test_one_that_the_route_found_to_have_failed_is_no_error_and_expires(world, add, caplog):
    def view():
        current_operation.step("charge", lambda: 17)
        raise Killed

    def decide(_operation):
        world.db.session.add(world.Payment(amount=1))  # nobody commits it
        return {}, 500

    add(view, on_interrupted=decide)
    kill(world)
    assert world.post().status_code == 500
    assert not [line for line in ours(caplog) if line.levelname == "ERROR"]
    assert world.sql("select state, lease_expires_at from idempotency_record") == [("failed", None)]


def test_what_says_nothing_of_the_operation_frees_the_key(world, add, assert_problem):
    ends = [({}, 201), ({}, 500), ({}, 429)]
    busy = Retryable("The provider is busy.", retry_after=7)
    runs = add(
        lambda: fail(busy) if len(runs) == 1 else ends.pop(),
        store=lambda response: response.status_code not in (429, 500),
    )
    refused = world.post()
    problem = assert_problem(refused, 503, "try-again", retry=True)
    assert (problem["detail"], refused.headers["Retry-After"]) == ("The provider is busy.", "7")
    assert_problem(world.post(json={"amount": 6}), 422, "key-reused")
    assert [world.post().status_code for _ in range(4)] == [429, 500, 201, 201]
    assert runs == [1, 2, 3, 4]


@pytest.mark.parametrize("status", [201, 409])
def test_what_a_teardown_would_commit_is_undone_before_it(world, add, status, caplog):
    world.app.teardown_request(lambda _error: world.db.session.commit())
    add(lambda: world.db.session.add(world.Payment(amount=1)) or ({}, status))
    assert world.post().status_code == status
    assert "left changes it did not commit; they are undone" in caplog.text
    assert (world.count(), world.records()[0].state) == (0, "completed")


@pytest.mark.parametrize("error", [None, OSError("as asked")])
def test_what_the_caller_of_run_would_commit_is_refused(world, error):
    """An error of the function is raised in place of that."""

    def pay():
        world.db.session.add(world.Payment(amount=1))
        if error:
            raise error

    with world.app.app_context():
        with pytest.raises(OSError if error else NotAtomic, match="as asked|commit them"):
            world.idempotency.run("key", pay, scope="s", name="pay", atomic=False)
        world.db.session.commit()
    assert world.count() == 0


def fail_afterwards():
    after_this_request(lambda _response: 1 / 0)
    return {}, 201


MISTAKES = {
    "a handler that raises Retryable": (fail, lambda _error: fail(Retryable)),
    "a handler without a response": (fail, lambda _error: None),
    "what the view registered": (fail_afterwards, lambda _error: ({}, 409)),
    "what the view registered before it failed": (
        lambda: (fail_afterwards(), fail()),
        lambda _error: ({}, 409),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("sorry", [lambda _error: ({"sorry": True}, 500), lambda _error: 1 / 0])
def test_a_mistake_after_the_view_is_stored_as_the_response_that_flask_gives_it(
    app, world, add, mistake, sorry
):
    """The view has charged before it failed: it must not run again because a template is wrong."""
    does, handler = MISTAKES[mistake]
    app.register_error_handler(LookupError, handler)
    app.register_error_handler(500, sorry)
    runs, replies = add(does, on_interrupted="retry"), []
    for _ in range(3):
        with suppress(ZeroDivisionError):  # of the handler for 500
            replies.append(world.post().status_code)
    assert replies in ([500] * 3, [500] * 2)
    assert (runs, world.records()[0].state) == ([1], "failed")
