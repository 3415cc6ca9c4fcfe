"""``run(atomic=False)`` in a queue's worker, whose exceptions say more than that a job failed."""

import asyncio
import functools
import threading

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery.exceptions import Ignore, Reject, Retry
from rq.timeouts import JobTimeoutException, UnixSignalDeathPenalty

from flask_idempotency import (
    OperationFailed,
    OperationInterrupted,
    current_operation,
)
from tests.conftest import PATIENCE_SECONDS


def of(module, name, base=Exception, **attributes):
    """A class as the package has it, which is not installed for these tests."""
    return type(name, (base,), {"__module__": module, **attributes})


Interrupt = of("dramatiq.threading", "Interrupt", BaseException)

INTERRUPTS = [
    SoftTimeLimitExceeded(),
    JobTimeoutException(),
    of("rq.exceptions", "ShutDownImminentException")(),
    of("dramatiq.middleware.time_limit", "TimeLimitExceeded", Interrupt)(),
    of("dramatiq.middleware.shutdown", "Shutdown", Interrupt)(),
    of("huey.exceptions", "TaskTimeout")(),
    asyncio.CancelledError(),
    SystemExit(),
    KeyboardInterrupt(),
]
"""What stops a function in its middle: nobody knows whether its effect happened."""

RELEASES = [
    Retry(),
    Reject(requeue=True),
    of("dramatiq.errors", "Retry")(),
    of("huey.exceptions", "RetryTask")(),
    of("huey.exceptions", "CancelExecution", retry=True)(),
    of("arq.worker", "Retry", RuntimeError)(),
]
"""What a function raises that asks to be run again."""

FAILS = [
    LookupError("secret"),
    Ignore(),
    Reject(requeue=False),
    of("huey.exceptions", "CancelExecution", retry=None)(),
    of("shop.errors", "Retry")(),
]


def name_of(error):
    return f"{type(error).__module__}.{type(error).__name__}"


@pytest.fixture
def world(make_world, probing_at_once):
    world = make_world(PROPAGATE_EXCEPTIONS=False)
    with world.app.app_context():
        yield world


@pytest.fixture
def run(world):
    return functools.partial(world.idempotency.run, "key", name="job", scope=None, atomic=False)


def job(error, *, fails_at=1):
    """A function with two steps that raises ``error`` between them, in one of its attempts."""

    def function():
        current_operation.step("first", function.calls.append, "first")
        if current_operation.attempt == fails_at:
            raise error
        current_operation.step("second", function.calls.append, "second")
        return current_operation.attempt

    function.calls = []
    return function


@pytest.mark.parametrize("error", INTERRUPTS, ids=name_of)
def test_what_stops_a_function_leaves_it_interrupted(run, error):
    function = job(error)
    with pytest.raises(type(error)):
        run(function)
    with pytest.raises(OperationInterrupted):
        run(function)
    assert run(function, on_interrupted="retry") == 2
    assert function.calls == ["first", "second"]


def test_a_job_that_runs_out_of_time_is_interrupted_where_it_stands(run):
    def slow():
        current_operation.step("charge", calls.append, 1)
        threading.Event().wait(PATIENCE_SECONDS)

    calls = []
    with pytest.raises(JobTimeoutException), UnixSignalDeathPenalty(1, JobTimeoutException):
        run(slow)
    with pytest.raises(OperationInterrupted):
        run(slow)
    assert run(job(None), on_interrupted="retry") == 2
    assert calls == [1]


@pytest.mark.parametrize("error", RELEASES, ids=name_of)
def test_who_asks_to_be_run_again_is_run_again(run, error):
    function = job(error)
    with pytest.raises(type(error)):
        run(function)
    assert run(function) == 2
    assert function.calls == ["first", "second"]


@pytest.mark.parametrize("error", FAILS, ids=name_of)
def test_every_other_error_is_stored(run, error):
    function = job(error)
    with pytest.raises(type(error)):
        run(function)
    with pytest.raises(OperationFailed, match=f"failed with {type(error).__name__}") as told:
        run(function)
    assert "secret" not in str(told.value)
    assert function.calls == ["first"]


@pytest.mark.parametrize("error", [INTERRUPTS[0], INTERRUPTS[-1], RELEASES[0]], ids=name_of)
def test_in_an_atomic_operation_everything_is_rolled_back(world, run, error):
    def function():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        if current_operation.attempt == 1:
            raise error
        return "paid"

    with pytest.raises(type(error)):
        run(function, atomic=True)
    assert world.count() == 0
    assert run(function, atomic=True) == "paid"
