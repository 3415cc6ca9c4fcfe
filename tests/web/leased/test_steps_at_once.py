"""Steps that a view calls in several threads at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from flask_idempotency import Retryable, current_operation
from flask_idempotency.core.errors import StepError
from tests.conftest import PATIENCE_SECONDS

THREADS = 3


@pytest.fixture(params=["hybrid", "sql", "redis"])
def store(request):
    return request.param


@pytest.fixture
def config(store, tmp_path, redis_server):
    if store == "sql":
        return {"SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path}/shop.db"}
    if store == "redis":
        prefix = f"{tmp_path.name}:"
        return {"IDEMPOTENCY_REDIS_URL": redis_server.url, "IDEMPOTENCY_REDIS_PREFIX": prefix}
    return {}


def at_once(world, work):
    """What ``work`` came to in each of several threads that began together."""
    barrier = threading.Barrier(THREADS)

    def together(number):
        with world.app.app_context():
            barrier.wait(PATIENCE_SECONDS)
            try:
                return work(number)
            except StepError as error:
                return error

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(together, range(THREADS)))


def test_a_step_that_runs_is_refused_to_a_second_thread(world, add_json, gate):
    calls, refused, operations = [], [], []

    def open_gate_if_all_have_come():
        if len(calls) + len(refused) == THREADS:
            gate.open()

    def charge():
        calls.append(1)
        open_gate_if_all_have_come()
        gate()
        return len(calls)

    def step(_number):
        try:
            return operations[0].step("charge", charge)
        except StepError:
            refused.append(1)
            open_gate_if_all_have_come()
            raise

    def view():
        operations.append(current_operation._get_current_object())
        results = sorted(at_once(world, step), key=str)
        assert results[0] == 1
        for error in results[1:]:
            assert "step 'charge' is running in another thread" in str(error)
        return {}

    add_json(view)
    assert world.post().status_code == 201
    assert calls == [1]


def test_two_steps_at_once_are_both_recorded(world, add_json):
    calls, operations = [], []

    def call(number):
        calls.append(number)
        return number

    def view():
        operations[:] = [current_operation._get_current_object()]
        results = at_once(world, lambda number: operations[0].step(f"step {number}", call, number))
        if current_operation.attempt == 1:
            raise Retryable
        return results

    add_json(view)
    assert world.post().status_code == 503
    assert world.post().json == [0, 1, 2]
    assert sorted(calls) == [0, 1, 2]


def test_after_one_has_failed_the_same_step_may_be_called_again(world, add_json):
    failures = [OSError("reset")]

    def charge():
        if failures:
            raise failures.pop()
        return "charged"

    def view():
        with pytest.raises(OSError, match="reset"):
            current_operation.step("charge", charge)
        return current_operation.step("charge", charge)

    add_json(view)
    assert world.post().json == "charged"
