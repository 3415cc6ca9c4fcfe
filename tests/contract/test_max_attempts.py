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
from tests.contract.test_requests import TRANSACTIONAL, Shop
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
def command(shop):
    def command(*arguments):
        result = shop.app.test_cli_runner().invoke(cli, arguments)
        assert result.exit_code == 0, result.output
        return result.output

    return command


def release(command):
    (record,) = json.loads(command("list", "--json"))
    assert record["state"] == "interrupted"
    command("release", "--why=asked", record["key"])


def is_given_up(response):
    """Whether it is held; anything else is a run's own failure."""
    if response.status_code == 409:
        assert response.json["type"] == INTERRUPTED
        assert "an operator must decide" in response.json["detail"]
        assert "Retry-After" not in response.headers
    return response.status_code == 409


@pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)
def test_an_atomic_view_that_fails_each_time_is_run_so_often_and_then_held(shop, add):
    runs = add(max_attempts=MOST)
    told = [is_given_up(shop.post()) for _ in range(MOST + 2)]
    assert told == [False] * MOST + [True, True]
    assert runs == list(range(1, MOST + 1))
    assert shop.post(json={"other": 1}).status_code == 422


def test_a_view_that_frees_its_key_each_time_is_run_so_often_and_then_held(shop, add):
    runs = add(Retryable, max_attempts=MOST, atomic=False)
    told = [is_given_up(shop.post()) for _ in range(MOST + 2)]
    assert told == [False] * MOST + [True, True]
    assert runs == list(range(1, MOST + 1))


def test_a_view_that_dies_each_time_is_not_retried_for_ever(shop, add):
    runs = add(Killed, max_attempts=MOST, atomic=False, on_interrupted="retry")
    for _ in range(MOST):
        with pytest.raises(Killed):
            shop.post()
    assert is_given_up(shop.post())
    assert is_given_up(shop.post())
    assert runs == list(range(1, MOST + 1))


@pytest.mark.parametrize("most", [1, 3])
def test_however_many_retry_at_once_it_is_not_run_once_more(shop, add, most):
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
    assert is_given_up(shop.post())


@pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)
def test_the_last_attempt_that_is_allowed_is_not_given_up_while_it_runs(shop):
    inside, go_on = threading.Event(), threading.Event()

    def view():
        inside.set()
        assert go_on.wait(10)
        return {}, 201

    shop.view(view, max_attempts=1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(shop.post)
        assert inside.wait(10)
        assert shop.post().json["type"].endswith("request-in-progress")
        go_on.set()
        assert first.result().status_code == 201
    assert shop.post().headers["Idempotent-Replayed"] == "true"


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


def test_an_operator_lets_it_run_so_often_again(shop, add, command):
    runs = add(RuntimeError if shop.atomic else Retryable, max_attempts=2)
    for rounds in 1, 2:
        assert [is_given_up(shop.post()) for _ in range(4)] == [False, False, True, True]
        assert len(runs) == 2 * rounds
        assert runs == sorted(set(runs)), "no two attempts carry one number"
        (listed,) = json.loads(command("list", "--json"))
        assert listed["state"] == "interrupted"
        release(command)


def test_what_succeeds_in_time_is_replayed_for_ever(shop, add):
    runs = add(None, max_attempts=1)
    assert [shop.post().json for _ in range(3)] == [{"runs": 1}] * 3
    assert runs == [1]


def test_outside_of_a_request_too(shop):
    runs = []

    def work():
        runs.append(current_operation.attempt)
        raise Retryable

    def run():
        shop.idempotency.run("key", work, name="work", atomic=shop.atomic, max_attempts=2)

    with shop.app.app_context():
        for expected in (Retryable, Retryable, OperationInterrupted, OperationInterrupted):
            with pytest.raises(expected):
                run()
    assert runs == [1, 2]


@pytest.mark.parametrize("store", ["hybrid", "postgres", "sql"], indirect=True)
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
