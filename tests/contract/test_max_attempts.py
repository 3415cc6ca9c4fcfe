"""An operation is begun ``max_attempts`` times at most, on every store; then it is an operator's."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from flask_idempotency import (
    ConfigurationError,
    OperationInterrupted,
    RequestInProgress,
    Retryable,
    current_operation,
)
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
PROGRAM = Path(__file__).with_name("dying_shop.py")
INTERRUPTED = "urn:flask-idempotency:problem:operation-interrupted"


@pytest.fixture
def add(shop):
    """Adds a view that fails in each run, and may be run again; gives the attempts it ran."""

    def add(fails=RuntimeError, **options):
        runs = []

        def view():
            runs.append(current_operation.attempt)
            if fails is not None:
                raise fails
            return {"runs": len(runs)}, 201

        shop.app.config["PROPAGATE_EXCEPTIONS"] = False
        shop.view(view, **options)
        return runs

    return add


@pytest.fixture
def post(shop):
    """Sends the request; returns whether it is held. Anything else is a run's own failure."""

    def post():
        try:
            response = shop.post()
        except Killed:
            return False
        if response.status_code == 409:
            assert response.json["type"] == INTERRUPTED
            assert "an operator must decide" in response.json["detail"]
            assert "Retry-After" not in response.headers
        return response.status_code == 409

    return post


LEASED = {"atomic": False}


@pytest.mark.parametrize(
    ("store", "fails", "options"),
    [
        *((store, RuntimeError, {}) for store in TRANSACTIONAL),
        *((store, Retryable, LEASED) for store in STORES),
        *((store, Killed, {**LEASED, "on_interrupted": "retry"}) for store in STORES),
    ],
    indirect=["store"],
)
def test_a_view_that_fails_frees_its_key_or_dies_is_run_so_often_and_then_held(
    shop, add, post, fails, options
):
    runs = add(fails, max_attempts=MOST, **options)
    assert [post() for _ in range(MOST + 2)] == [False] * MOST + [True, True]
    assert runs == list(range(1, MOST + 1))
    assert shop.post(json={"other": 1}).status_code == 422


@pytest.mark.parametrize("most", [1, 3])
def test_however_many_retry_at_once_it_is_not_run_once_more(shop, add, post, most):
    runs = add(RuntimeError if shop.atomic else Retryable, max_attempts=most)
    barrier = threading.Barrier(CLIENTS)

    def client(_number):
        barrier.wait(10)
        for _ in range(1000):
            response = shop.post()
            if response.status_code == 409 and response.json["type"] == INTERRUPTED:
                return True
        return False

    with ThreadPoolExecutor(CLIENTS) as pool:
        assert all(pool.map(client, range(CLIENTS)))
    # An attempt may lose its operation to the next one before its view begins; never the last one.
    assert 1 <= len(runs) <= most
    assert runs[-1] == most
    assert post()


@pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)
def test_the_last_attempt_that_is_allowed_is_not_given_up_while_it_runs(shop):
    def duplicate():
        assert shop.post().json["type"].endswith("request-in-progress")

    shop.while_it_runs(duplicate, max_attempts=1)
    assert shop.post().status_code == 201, "what succeeds in time is replayed for ever"


class LateStart:
    """A clock; while one request waits, another's attempt locks its row."""

    def __init__(self, begin):
        self.holds, self._begin = [], begin

    def monotonic(self):
        return 0.0

    def sleep(self, _seconds):
        self.holds.append(self._begin())


@pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)
def test_an_attempt_that_begins_just_now_is_not_given_up(shop):
    records = shop.app.extensions["idempotency"].records
    claim = replace(a_claim(), max_attempts=2)
    records.claim(claim).abandon()
    second, seen = again(claim), records.look(claim.key)
    clock = LateStart(lambda: records.take_over(second, seen))
    engine = DecisionEngine(records, Lock(), Sealer(), clock)
    with pytest.raises(RequestInProgress):
        engine.decide(replace(again(claim), max_attempts=1))
    assert records.look(claim.key).owner == second.owner
    clock.holds[0].complete(RESPONSE)
    assert engine.decide(again(claim)).response == RESPONSE


def test_an_operator_lets_it_run_so_often_again(shop, add, post):
    run = shop.app.test_cli_runner().invoke
    runs = add(RuntimeError if shop.atomic else Retryable, max_attempts=2)
    for rounds in 1, 2:
        assert [post() for _ in range(4)] == [False, False, True, True]
        assert len(runs) == 2 * rounds
        assert runs == sorted(set(runs)), "no two attempts carry one number"
        (listed,) = json.loads(run(cli, ["list", "--json"]).output)
        assert listed["state"] == "interrupted"
        assert run(cli, ["release", "--why=asked", listed["key"]]).exit_code == 0


def test_outside_of_a_request_too(shop):
    runs = []

    def work():
        runs.append(current_operation.attempt)
        raise Retryable

    with shop.app.app_context():
        for expected in (Retryable, Retryable, OperationInterrupted, OperationInterrupted):
            with pytest.raises(expected):
                shop.idempotency.run("key", work, name="work", atomic=shop.atomic, max_attempts=2)
    assert runs == [1, 2]


@pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)
def test_a_worker_that_is_killed_in_each_attempt_dies_so_often(shop, store, redis_server):
    arguments = store, str(shop.app.config["SQLALCHEMY_DATABASE_URI"]), redis_server.url, str(MOST)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    output = subprocess.check_output([sys.executable, PROGRAM, *arguments], env=environment, text=True)
    deaths = [f"{attempt + 1} SIGKILL" for attempt in range(MOST)]
    assert output.splitlines() == [*deaths, "409", "409"]


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "3", 10_001])
def test_a_wrong_number_is_named(tmp_path, wrong):
    shop = Shop("sql", f"sqlite:///{tmp_path}/shop.db", "")
    with pytest.raises(ConfigurationError, match="max_attempts is .*an integer from 1 to 10000"):
        shop.view(dict, max_attempts=wrong)
