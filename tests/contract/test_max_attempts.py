"""An operation is begun ``max_attempts`` times at most, on every store; then it is an operator's."""

import json
import os
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flask_idempotency import RequestInProgress, Retryable, current_operation
from flask_idempotency.cli import cli
from flask_idempotency.core.engine import DecisionEngine
from flask_idempotency.core.ports import Lock
from flask_idempotency.core.records import Sealer
from tests.contract import test_requests
from tests.contract.claims import RESPONSE, a_claim, again
from tests.contract.test_requests import STORES, TRANSACTIONAL, Shop
from tests.killed import Killed

store, shop = test_requests.store, test_requests.shop
CLIENTS, MOST = 8, 3


def fail(shop, error=None, **options):
    """Add a view that fails in each run, and may be run again; return the attempts it ran."""
    runs = []

    def view():
        runs.append(current_operation.attempt)
        raise error or (RuntimeError if shop.atomic else Retryable)

    shop.app.config["PROPAGATE_EXCEPTIONS"] = False
    shop.view(view, **options)
    return runs


def is_held(shop):
    """Send the request; return whether it is held. Anything else is a run's own failure."""
    try:
        response = shop.post()
    except Killed:
        return False
    if response.status_code == 409:
        assert response.json["type"].endswith("operation-interrupted")
    return response.status_code == 409


LEASED = {"atomic": False}


@pytest.mark.parametrize(
    ("store", "error", "options"),
    [
        *((store, RuntimeError, {}) for store in TRANSACTIONAL),
        *((store, Retryable, LEASED) for store in STORES),
        *((store, Killed, {**LEASED, "on_interrupted": "retry"}) for store in STORES),
    ],
    indirect=["store"],
)
def test_a_view_that_fails_frees_its_key_or_dies_is_run_so_often_and_then_held(shop, error, options):
    runs = fail(shop, error, max_attempts=MOST, **options)
    assert [is_held(shop) for _ in range(MOST + 2)] == [False] * MOST + [True, True]
    assert runs == list(range(1, MOST + 1))
    assert shop.post(json={"other": 1}).status_code == 422


@pytest.mark.parametrize("most", [1, 3])
def test_however_many_retry_at_once_it_is_not_run_once_more(shop, most):
    runs = fail(shop, max_attempts=most)
    barrier = threading.Barrier(CLIENTS)

    def client(_number):
        barrier.wait(10)
        return any(b"operation-interrupted" in shop.post().data for _ in range(1000))

    with ThreadPoolExecutor(CLIENTS) as pool:
        assert all(pool.map(client, range(CLIENTS)))
    # An attempt may lose its operation to the next one before its view begins; never the last one.
    assert 1 <= len(runs) <= most
    assert runs[-1] == most
    assert is_held(shop)


@pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)
def test_the_last_attempt_that_is_allowed_is_not_given_up_while_it_runs(shop):
    def duplicate():
        assert shop.post().json["type"].endswith("request-in-progress")

    shop.while_it_runs(duplicate, max_attempts=1)
    assert shop.post().status_code == 201, "what succeeds in time is replayed for ever"


@pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)
def test_an_attempt_that_begins_just_now_is_not_given_up(shop):
    """While one request waits, another's attempt locks its row."""
    records = shop.app.extensions["idempotency"].records
    claim = replace(a_claim(), max_attempts=2)
    records.claim(claim).abandon()
    second, seen, holds = again(claim), records.look(claim.key), []
    begin = lambda _seconds: holds.append(records.take_over(second, seen))  # noqa: E731
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=begin)
    engine = DecisionEngine(records, Lock(), Sealer(), clock)
    with pytest.raises(RequestInProgress):
        engine.decide(replace(again(claim), max_attempts=1))
    assert records.look(claim.key).owner == second.owner
    holds[0].complete(RESPONSE)
    assert engine.decide(again(claim)).response == RESPONSE


def test_an_operator_lets_it_run_so_often_again(shop):
    run = shop.app.test_cli_runner().invoke
    runs = fail(shop, max_attempts=2)
    for rounds in 1, 2:
        assert [is_held(shop) for _ in range(4)] == [False, False, True, True]
        assert len(runs) == 2 * rounds
        assert runs == sorted(set(runs)), "no two attempts carry one number"
        (listed,) = json.loads(run(cli, ["list", "--json"]).output)
        assert listed["state"] == "interrupted"
        assert run(cli, ["release", "--why=asked", listed["key"]]).exit_code == 0


@pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)
def test_a_worker_that_is_killed_in_each_attempt_dies_so_often(shop, store, redis_server):
    attempts, said = os.pipe()

    def die():
        os.write(said, bytes([current_operation.attempt]))
        os.kill(os.getpid(), signal.SIGKILL)

    def serve():
        worker = Shop(store, shop.app.config["SQLALCHEMY_DATABASE_URI"], redis_server.url)
        worker.view(die, max_attempts=MOST)
        return is_held(worker)

    ends = []
    for _ in range(MOST + 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # pytest has threads of its own
            worker = os.fork()
        if not worker:
            held = False
            try:
                held = serve()
            finally:
                os._exit(not held)
        ends.append(os.waitpid(worker, 0)[1])
    assert ends == [signal.SIGKILL] * MOST + [0]
    os.close(said)
    with os.fdopen(attempts, "rb") as ran:
        assert [*ran.read()] == list(range(1, MOST + 1))
