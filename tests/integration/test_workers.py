"""gunicorn's kinds of workers, over real HTTP: each keeps the promises, whatever ends a request."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from laboratory import running
from tests.integration.shops import HELD, Shop, new_keys, promises_hold
from tests.waiting import PATIENCE_SECONDS

DUPLICATES = 3
GEVENT = ("--worker-class", "gevent")
GTHREAD = ("--worker-class", "gthread", "--threads", "4")
KINDS = {
    "sync": ((), {}),
    "gthread": (GTHREAD, {}),
    "gevent": (GEVENT, {}),
    "gevent-cooperative": (GEVENT, {"COOPERATIVE": "yes"}),
}


def storm(
    shop: Shop, clients: ThreadPoolExecutor, count: int, *, may_break: bool = False
) -> dict[str, list[running.Reply]]:
    """Concurrent duplicates of new keys; what the clients of each key were told."""
    keys = [key for key in new_keys(count) for _ in range(DUPLICATES)]
    told: dict[str, list[running.Reply]] = {}
    each = clients.map(lambda key: shop.pay_for_sure(key, may_break=may_break), keys)
    for key, answers in zip(keys, each, strict=True):
        told.setdefault(key, []).extend(answers)
    return told


def processes(told: dict[str, list[running.Reply]]) -> set[int]:
    """The processes that ran the views."""
    answers = itertools.chain.from_iterable(told.values())
    return {json.loads(answer.body)["process"] for answer in answers if answer.status == 201}


@pytest.mark.parametrize("kind", KINDS)
def test_duplicates_run_once_and_sockets_used_before_the_fork_are_shared_with_nobody(
    open_shop: Callable[..., Shop], clients: ThreadPoolExecutor, kind: str
) -> None:
    """Not only db.create_all(): a whole request was answered before the fork, with a lock in Redis."""
    arguments, environment = KINDS[kind]
    shop = open_shop(*arguments, USED_BEFORE_FORK="first-key", **environment)
    told = {"first-key": [shop.pay("first-key")]}
    assert processes(told) == {shop.pid}
    told |= storm(shop, clients, 20)
    where = urlsplit(shop.url)
    request = (
        f"POST {HELD} HTTP/1.1\r\nHost: {where.netloc}\r\nX-User: alice\r\n"
        "Idempotency-Key: left\r\nContent-Length: 0\r\n\r\n"
    )
    with socket.create_connection((where.hostname, where.port)) as client:
        client.sendall(request.encode())
        worker = int(shop.arrived.read_text())
    shop.go_on.write_text("go on")
    told["left"] = shop.pay_for_sure("left", HELD)
    assert told["left"][-1].headers["Idempotent-Replayed"] == "true", "who left finds it later"
    assert processes({"left": told["left"]}) == {worker}
    promises_hold(shop, told)


def test_duplicates_that_wait_leave_their_worker_to_others(
    open_shop: Callable[..., Shop], clients: ThreadPoolExecutor
) -> None:
    """One worker: the first request and the duplicates that wait for it are all in it."""
    arguments, environment = KINDS["gevent-cooperative"]
    shop = open_shop("--workers", "1", *arguments, WAIT="10", MAX_WAITERS="6", **environment)
    told = {}
    for _ in range(7):
        told |= storm(shop, clients, 3)  # six duplicates: as many as may wait
    promises_hold(shop, told)
    assert all(len(answers) == DUPLICATES for answers in told.values()), "nobody was told 409"


def test_a_reload_lets_running_requests_end_and_runs_nothing_twice(
    open_shop: Callable[..., Shop], clients: ThreadPoolExecutor
) -> None:
    shop = open_shop(*GTHREAD, PRELOAD="no")
    told: dict[str, list[running.Reply]] = {}

    def storm_until_two_served_who_are_not(known: set[int]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(processes(told) - known) < 2:
            assert time.monotonic() < deadline, "one or no worker of this generation serves"
            told.update(storm(shop, clients, 10, may_break=True))

    storm_until_two_served_who_are_not(set())
    old = processes(told)
    held = clients.submit(shop.pay, "held", HELD)
    assert int(shop.arrived.read_text()) in old
    os.kill(shop.pid, signal.SIGHUP)
    storm_until_two_served_who_are_not(old)
    shop.go_on.write_text("go on")
    told["held"] = [held.result(), *shop.pay_for_sure("held", HELD)]
    assert told["held"][0].status == 201, "an old worker ends what it runs"
    assert processes({"held": told["held"]}) <= old
    promises_hold(shop, told)
