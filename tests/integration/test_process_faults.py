"""A worker under gunicorn dies, stops or loses its client: what is told and what a retry finds."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil
import pytest

import servers
from laboratory import running
from tests import sessions
from tests.faults import app as faulty_app
from tests.faults.nemesis import COMPLETION
from tests.faults.points import POINTS
from tests.integration.shops import HELD, Shop, promises_hold
from tests.waiting import wait_until


def told(answer: Future[running.Reply]) -> int | None:
    """The status that a client got; None if its connection broke."""
    try:
        return answer.result().status
    except (OSError, http.client.HTTPException):
        return None


def pays_at_last(shop: Shop, key: str, path: str = HELD, *, attempt: int) -> running.Reply:
    """The retry runs the view as this attempt, once and for all; nothing is left open."""
    (*_, answer) = shop.pay_for_sure(key, path)
    assert answer.status == 201
    assert json.loads(answer.body)["attempt"] == attempt
    again = shop.pay(key, path)
    assert again.headers["Idempotent-Replayed"] == "true"
    promises_hold(shop, {key: [answer, again]})
    return answer


PROBE_SECONDS = 0.1
"""How long a dead worker's lock in Redis is believed."""


@pytest.fixture(scope="module")
def faulty(postgres: Any, redis_server: Any, tmp_path_factory: Any) -> Iterator[Shop]:
    """The application of the soak, whose workers die where a request asks for it."""
    url = postgres.database("points")
    faulty_app.create_tables(url)
    journal = tmp_path_factory.mktemp("points") / "journal.jsonl"
    environment = {
        "DATABASE_URL": url,
        "REDIS_URL": redis_server.url,
        "FAULTS_JOURNAL": str(journal),
        "FAULTS_PROBE_AFTER": str(PROBE_SECONDS),
        "FAULTS_SESSIONS": sessions.usual,
    }
    application = "tests.faults.app:create_app()"
    kind = ("--worker-class", "sync", "--workers", "2", "--log-level", "critical")
    with running.gunicorn(application, environment, *kind) as (address, process):
        yield Shop(address, url, process.pid, journal, journal)


ROW_AND_RECORD = {
    "lock": (0, None),
    "claim": (0, "in_progress"),
    "view": (0, "in_progress"),
    "write": (0, "in_progress"),
    "answer": (0, "in_progress"),
    "commit": (1, "completed"),
    "release": (1, "completed"),
}
"""What is there right after the death, at each of the soak's points."""


@pytest.mark.parametrize("point", POINTS)
def test_wherever_a_worker_is_killed_the_retry_finds_all_or_nothing(faulty: Shop, point: str) -> None:
    headers = {"Idempotency-Key": point, "X-User": "alice", "Content-Type": "application/json"}

    def pay(fault: str = "") -> running.Reply:
        return running.send(
            faulty.url, "POST", "/payments", {**headers, "X-Fault": fault}, '{"body": 1}'
        )

    def rows() -> int:
        return faulty.sql(f"SELECT count(*) FROM payment WHERE key = '{point}'")[0][0]

    states_before = faulty.sql("SELECT key FROM idempotency_record")
    with pytest.raises((OSError, http.client.HTTPException)):
        pay(point)
    known = [bytes(key) for (key,) in states_before]
    records = faulty.sql("SELECT key, state FROM idempotency_record")
    new = [state for key, state in records if bytes(key) not in known]
    assert (rows(), new[0] if new else None) == ROW_AND_RECORD[point]
    died, told = time.monotonic(), []
    while not told or told[-1].status == 409:
        assert time.monotonic() - died < PROBE_SECONDS + 1.5, "the probe age, and a little"
        told.append(pay())
    replayed = told[-1].headers.get("Idempotent-Replayed") == "true"
    assert (told[-1].status, replayed) == (201, rows() == ROW_AND_RECORD[point][0])
    assert json.loads(told[-1].body)["attempt"] == (1 if replayed or point == "lock" else 2)
    assert pay().body == told[-1].body
    assert rows() == 1
    wait_until(faulty.nothing_is_left_open, "no transaction is open")  # a new worker's first are


@pytest.mark.parametrize("arrives", [True, False], ids=["COMMIT arrives", "COMMIT is lost"])
def test_a_worker_killed_while_its_commit_is_on_its_way(
    open_shop: Callable[..., Shop], clients: ThreadPoolExecutor, arrives: bool
) -> None:
    with contextlib.ExitStack() as stack:
        proxies = []

        def through(url: str) -> str:
            proxies.append(stack.enter_context(servers.FaultProxy(url)))
            return proxies[0].url

        shop = open_shop(through=through)
        (proxy,) = proxies
        first = clients.submit(shop.pay, "key-1", HELD)
        worker = int(shop.arrived.read_text())
        proxy.hold(COMPLETION)  # whose COMMIT is in the same message
        shop.go_on.write_text("go on")
        proxy.wait_until_held()
        os.kill(worker, signal.SIGKILL)
        assert told(first) is None
        assert shop.sql("SELECT count(*) FROM payment") == [(0,)]
        assert shop.pay("key-1", HELD).status == 409
        if arrives:
            proxy.let_go()
            wait_until(lambda: shop.sql("SELECT count(*) FROM payment") == [(1,)], "it is committed")
            answer = pays_at_last(shop, "key-1", attempt=1)
            assert answer.headers["Idempotent-Replayed"] == "true"
            assert json.loads(answer.body)["process"] == worker
        else:
            proxy.cut()
            pays_at_last(shop, "key-1", attempt=2)


def test_a_stopped_worker_keeps_its_operation_until_its_connection_ends_and_then_loses_it(
    open_shop: Callable[..., Shop], clients: ThreadPoolExecutor
) -> None:
    shop = open_shop()
    first = clients.submit(shop.pay, "key-1", HELD)
    worker = psutil.Process(int(shop.arrived.read_text()))
    worker.suspend()
    try:
        deadline = time.monotonic() + 1.2  # longer than the lock in Redis is believed
        while time.monotonic() < deadline:
            assert shop.pay("key-1", HELD).status == 409
        assert shop.sql("SELECT count(*) FROM payment") == [(0,)]
        shop.sql(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND state LIKE 'idle in transaction%'"
        )
        retry = pays_at_last(shop, "key-1", attempt=2)
        assert json.loads(retry.body)["process"] != worker.pid
    finally:
        worker.resume()
    shop.go_on.write_text("go on")
    assert told(first) == 503
    assert shop.pay("key-1", HELD).body == retry.body
    promises_hold(shop, {"key-1": [retry]})
