"""gunicorn's kinds of workers, over real HTTP: each keeps the promises, whatever ends a request."""

import itertools
import json
import os
import signal
import socket
import time
from collections import Counter
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from laboratory import running
from tests.integration.shops import HELD, new_keys, promises_hold
from tests.waiting import PATIENCE_SECONDS

DUPLICATES = 3
GEVENT = ("--worker-class", "gevent")
GTHREAD = ("--worker-class", "gthread", "--threads", "4")
KINDS = {
    "sync": ((), {}),
    "gthread": (GTHREAD, {}),
    "gevent": (GEVENT, {"COOPERATIVE": "yes"}),
}


def storm(shop, clients, count, *, may_break=False):
    """Concurrent duplicates of new keys; what the clients of each key were told."""
    keys = [key for key in new_keys(count) for _ in range(DUPLICATES)]
    told = {}
    each = clients.map(lambda key: shop.pay_for_sure(key, may_break=may_break), keys)
    for key, answers in zip(keys, each, strict=True):
        told.setdefault(key, []).extend(answers)
    return told


def processes(told):
    """The processes that ran the views."""
    answers = itertools.chain.from_iterable(told.values())
    return {json.loads(answer.body)["process"] for answer in answers if answer.status == 201}


def scrape(shop, name, label):
    """The values of one of Prometheus' series by a label; the others are added up."""
    found = Counter()
    text = running.send(shop.url, "GET", "/metrics", {}).body
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"idempotency_{name}":
                found[sample.labels[label]] += sample.value
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_keeps_the_promises_and_counts_for_all_processes_the_dead_included(
    open_shop, clients, tmp_path, kind
):
    """A whole request was answered before the fork: its sockets are shared with nobody."""
    arguments, environment = KINDS[kind]
    environment = {**environment, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    shop = open_shop(*arguments, "--graceful-timeout", "1", USED_BEFORE_FORK="first-key", **environment)
    told = {"first-key": [shop.pay("first-key")]}
    assert processes(told) == {shop.pid}
    told |= storm(shop, clients, 20)
    statuses = Counter(answer.status for answers in told.values() for answer in answers)
    outcomes = scrape(shop, "requests_total", "outcome")
    assert outcomes["executed"] == len(told)
    assert outcomes["replayed"] == statuses[201] + 1 - len(told)  # one was executed before the fork
    assert outcomes["rejected"] == statuses[409]
    assert scrape(shop, "records", "state") == {"completed": len(told)}
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
    killed = clients.submit(shop.pay, "killed", HELD)
    os.kill(int(shop.arrived.read_text()), signal.SIGKILL)
    assert killed.exception() is not None
    told["killed"] = shop.pay_for_sure("killed", HELD)
    assert scrape(shop, "requests_total", "outcome")["executed"] == len(told)
    assert scrape(shop, "takeovers_total", "operation")["pay_when_told"] == 1
    promises_hold(shop, told)


def test_duplicates_that_wait_leave_their_worker_to_others(open_shop, clients):
    """One worker: the first request and the duplicates that wait for it are all in it."""
    arguments, environment = KINDS["gevent"]
    shop = open_shop("--workers", "1", *arguments, WAIT="10", MAX_WAITERS="6", **environment)
    told = {}
    for _ in range(7):
        told |= storm(shop, clients, 3)  # six duplicates: as many as may wait
    promises_hold(shop, told)
    assert all(len(answers) == DUPLICATES for answers in told.values()), "nobody was told 409"


def test_a_reload_lets_running_requests_end_and_runs_nothing_twice(open_shop, clients):
    shop, told = open_shop(*GTHREAD, PRELOAD="no"), {}

    def storm_until_two_served_who_are_not(known):
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
