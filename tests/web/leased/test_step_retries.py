"""``step(..., retry=...)``: a call is repeated after the errors that it names, while it is ours."""

import json
from contextlib import suppress
from types import SimpleNamespace

import pytest
from celery.exceptions import Retry as CeleryRetry
from celery.exceptions import SoftTimeLimitExceeded
from rq.timeouts import JobTimeoutException

from flask_idempotency import ConfigurationError, Retryable, StepError, StepRetry, current_operation
from flask_idempotency.web.attempt import steps as steps_module
from tests.web.leased.records import steps

LEASE = 60
OFTEN = StepRetry(ConnectionError, attempts=4)


@pytest.fixture
def pauses(monkeypatch):
    """The pauses: each as long as it may be, in no time. ``during`` happens in them."""
    pauses = []
    found = SimpleNamespace(seconds=pauses, during=lambda: None)

    def sleep(seconds):
        pauses.append(seconds)
        found.during()

    monkeypatch.setattr(steps_module, "time", SimpleNamespace(sleep=sleep))
    chance = SimpleNamespace(uniform=lambda low, high: high + low)
    monkeypatch.setattr(steps_module, "SystemRandom", lambda: chance)
    return found


@pytest.fixture
def call(world, add_json):
    """Adds a view with one step that fails with these errors, one after the other."""

    def add(*errors, retry=OFTEN, fails=lambda: None, **options):
        calls, left = [], list(errors)

        def charge():
            calls.append(current_operation.derive_key("charge"))
            fails()
            if left:
                raise left.pop(0)
            return {"call": len(calls)}

        add_json(lambda: current_operation.step("charge", charge, retry=retry), lease=LEASE, **options)
        return calls

    return add


@pytest.mark.usefixtures("failing_log", "pauses")
def test_logging_that_fails_stops_no_retry(world, call):
    calls = call(ConnectionError())
    assert world.post().json == {"call": 2}
    assert len(calls) == 2


def lease_left(world):
    return world.sql(
        "select extract(epoch from lease_expires_at - clock_timestamp()) from idempotency_record"
    )[0][0]


def test_it_is_called_again_with_the_same_key_until_it_succeeds(world, call, pauses, caplog):
    caplog.set_level("INFO", "flask_idempotency")
    calls = call(ConnectionError("canary"), ConnectionRefusedError())
    response = world.post()
    assert (response.status_code, response.json) == (201, {"call": 3})
    assert len(calls) == 3
    assert len(set(calls)) == 1
    assert pauses.seconds == [0.2, 0.4]
    assert steps(world) == [("charge", 1)]
    assert world.post().data == response.data
    assert caplog.text.count("operation charge: a step failed, and is tried again in") == 2
    assert "canary" not in caplog.text


def test_the_last_error_is_the_views(world, call, pauses):
    calls = call(*[ConnectionError()] * 9)
    assert world.post().status_code == 500
    assert (len(calls), pauses.seconds) == (4, [0.2, 0.4, 0.8])
    assert world.records()[0].state == "failed"


def test_pauses_grow_up_to_the_longest(world, call, pauses):
    retry = StepRetry(OSError, attempts=6, first=1, factor=3, longest=20)
    call(*[OSError()] * 5, retry=retry)
    assert world.post().status_code == 201
    assert pauses.seconds == [1, 3, 9, 20, 20]


def test_a_pause_is_anything_up_to_that(world, call, monkeypatch):
    slept = []
    monkeypatch.setattr(steps_module, "time", SimpleNamespace(sleep=slept.append))
    call(*[OSError()] * 50, retry=StepRetry(OSError, attempts=51, first=8, factor=1))
    assert world.post().status_code == 201
    assert len(set(slept)) > 40
    assert 0 <= min(slept) < 2
    assert 6 < max(slept) <= 8


EVERYTHING = StepRetry(Exception)
STOPPED = [JobTimeoutException("late"), SoftTimeLimitExceeded(), CeleryRetry(), Retryable()]


@pytest.mark.parametrize("error", [*STOPPED, StepError("no"), SystemExit()], ids=repr)
def test_what_stops_a_job_and_what_is_ours_is_never_repeated(world, call, pauses, error):
    calls = call(error, retry=EVERYTHING)
    with suppress(SystemExit):
        world.post()
    assert (len(calls), pauses.seconds) == (1, [])


@pytest.mark.parametrize("retry", [OFTEN, None])
def test_other_errors_come_out_at_once(world, call, pauses, retry):
    calls = call(TimeoutError(), retry=retry)
    assert world.post().status_code == 500
    assert (len(calls), pauses.seconds) == (1, [])


def test_a_result_that_is_no_json_is_not_called_for_again(world, add_json, pauses):
    calls = []
    step = lambda: current_operation.step("a", lambda: calls.append(1) or {1}, retry=EVERYTHING)  # noqa: E731
    add_json(step)
    assert world.post().status_code == 500
    assert (calls, pauses.seconds) == ([1], [])


def test_the_lease_lasts_over_each_pause_and_is_whole_before_each_call(world, call, pauses):
    lefts, before = [], []
    pauses.during = lambda: lefts.append(lease_left(world))
    retry = StepRetry(OSError, first=1000, longest=1000)
    call(OSError(), OSError(), retry=retry, fails=lambda: before.append(lease_left(world)))
    assert world.post().status_code == 201
    assert all(1000 + LEASE - 5 < left <= 1000 + LEASE for left in lefts)
    assert all(left > LEASE - 5 for left in before)


def test_nothing_is_called_once_another_has_taken_over(world, call, pauses):
    def take_over():
        world.sql("update idempotency_record set owner = 'another', attempt = 2")

    pauses.during = take_over
    calls = call(ConnectionError())
    response = world.post()
    assert (response.status_code, len(calls)) == (409, 1)


def test_a_worker_that_exits_in_a_pause_leaves_it_interrupted(world, call, pauses, assert_problem):
    def leave():
        raise SystemExit

    pauses.during = leave
    calls = call(ConnectionError())
    with pytest.raises(SystemExit):
        world.post()
    assert_problem(world.post(), 409, "operation-interrupted")
    assert len(calls) == 1


def test_an_attempt_after_that_has_all_its_tries_again(world, call, pauses):
    calls = call(*[ConnectionError()] * 5, store=lambda response: response.status_code < 500)
    assert world.post().status_code == 500
    assert len(calls) == 4
    assert world.post().json == {"call": 6}


def test_what_a_failed_call_wanted_after_the_commit_is_dropped(world, call, pauses):
    done, numbers = [], iter(range(9))
    call(
        ConnectionError(),
        fails=lambda: world.idempotency.after_commit(done.append, next(numbers)),
    )
    assert world.post().status_code == 201
    assert done == [1]


def test_a_step_that_is_atomic_cannot_have_it(world, add_json, pauses):
    said = []

    def view():
        with pytest.raises(StepError, match="is atomic, and has retry") as raised:
            current_operation.step("a", pytest.fail, atomic=True, retry=OFTEN)
        said.append(str(raised.value))
        with pytest.raises(StepError, match="has retry=3; allowed: a StepRetry"):
            current_operation.step("a", pytest.fail, retry=3)
        return {}

    add_json(view)
    assert world.post().status_code == 201
    assert len(said) == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"on": ()}, "on=.*a class of exceptions"),
        ({"on": BaseException}, "on=.*a class of exceptions"),
        ({"on": Retryable}, "on=.*none of this package"),
        ({"on": [ConnectionError]}, "on=.*a tuple"),
        ({"on": (ConnectionError, "TimeoutError")}, "on="),
        ({"attempts": 1}, "attempts=1; allowed: an integer from 2 to 100"),
        ({"attempts": 3.0}, "attempts="),
        ({"attempts": True}, "attempts="),
        ({"first": -1}, "first=-1; allowed: a number from 0 to 3600"),
        ({"first": float("nan")}, "first="),
        ({"longest": "1"}, "longest="),
        ({"factor": 0.5}, "factor=0.5; allowed: a number from 1 to 100"),
    ],
)
def test_a_wrong_retry_is_named(wrong, said):
    with pytest.raises(ConfigurationError, match=said):
        StepRetry(**{"on": ConnectionError, **wrong})


def test_the_pause_after_any_failure_can_be_computed():
    most = StepRetry(OSError, attempts=100, first=3600, factor=100, longest=3600)
    assert most.longest_pause(99) == 3600
    assert json.dumps(most.longest_pause(1)) == "3600"
