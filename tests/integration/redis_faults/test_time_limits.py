"""What a slow Redis may cost: one time limit for a whole exchange, and one request at a time."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import redis

import servers
from flask_idempotency.core.ports import Glance
from flask_idempotency.stores.redis import lock as redis_store
from flask_idempotency.stores.redis.client import TIMEOUT_SECONDS, client_from_url
from flask_idempotency.stores.redis.lock import RedisLock
from flask_idempotency.stores.redis.wire import wire_of
from tests.contract.test_locks import FIRST, SECOND
from tests.log import ours
from tests.waiting import wait_until

NAME = "redis.test"

SLOW_MACHINE = 0.3
"""Seconds that a limit may be missed by. What it keeps from happening took more than one second."""


@pytest.fixture
def proxy(own_redis):
    with servers.FaultProxy(own_redis.url) as proxy:
        yield proxy


@pytest.fixture
def failures():
    return []


@pytest.fixture
def lock_at(failures):
    def make(url):
        return RedisLock(client_from_url(url), "shop:", probe_after=1.0, on_failure=failures.append)

    return make


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr(redis_store, "PAUSE_SECONDS", 0)


@pytest.fixture
def resolver(monkeypatch):
    """A name server that says nothing before ``go_on`` is set: the name is then 127.0.0.1's."""

    class Resolver:
        asked, go_on = 0, threading.Event()

    def resolve(host, *arguments, **options):
        if host == NAME:
            Resolver.asked += 1
            assert Resolver.go_on.wait(20)
            host = "127.0.0.1"
        return inherited(host, *arguments, **options)

    inherited = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    yield Resolver
    Resolver.go_on.set()


def seconds(call):
    started = time.monotonic()
    call()
    return time.monotonic() - started


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_reply_that_trickles_costs_one_time_limit_and_begins_the_pause(
    proxy, lock_at, failures, is_connected
):
    lock = lock_at(proxy.url)
    if is_connected:
        assert lock.acquire(FIRST) is Glance.MINE
    proxy.trickle = 0.8 * TIMEOUT_SECONDS
    limit = TIMEOUT_SECONDS if is_connected else 2 * TIMEOUT_SECONDS  # connecting has its own
    assert seconds(partial(lock.acquire, SECOND)) < limit + SLOW_MACHINE
    assert [type(failure) for failure in failures] == [redis.TimeoutError]
    assert lock.acquire(SECOND) is Glance.ASK
    assert len(failures) == 1, "nobody asks in the pause"


def test_connecting_and_the_reply_have_one_time_limit(proxy, lock_at, failures):
    lock = lock_at(f"{proxy.url}?socket_timeout=0.5&socket_connect_timeout=0.5")
    proxy.delay = 0.2  # a round trip of 0.4: connecting takes several
    assert seconds(partial(lock.acquire, FIRST)) < 1.0 + SLOW_MACHINE
    assert [type(failure) for failure in failures] == [redis.TimeoutError]


def test_a_reply_in_pieces_arrives_within_the_limit(proxy, lock_at, failures):
    lock = lock_at(f"{proxy.url}?socket_timeout=5")
    proxy.trickle = 0.002
    assert lock.acquire(FIRST) is Glance.MINE
    assert lock.acquire(SECOND) is Glance.BUSY
    proxy.trickle = 0.0
    connections = proxy.connections
    assert lock.acquire(SECOND) is Glance.BUSY
    assert (proxy.connections, failures) == (connections, [])


def test_a_long_reply_may_take_the_time_of_its_bytes(proxy):
    """The store ``redis`` keeps responses there; the network takes longer for 8 MB than the limit."""
    wire = wire_of(client_from_url(f"{proxy.url}?socket_timeout=0.5")())
    assert wire.send("return ARGV[1]", b"key", b"warm")() == b"warm"
    proxy.delay = 0.01  # for each 64 KB: 1.3 s in all
    reply = wire.send("return string.rep(ARGV[1], 8000)", b"key", b"x" * 1000)()
    assert len(reply) == 8_000_000


def test_a_name_server_that_is_silent_costs_one_time_limit(own_redis, lock_at, failures, resolver):
    lock = lock_at(own_redis.url.replace("127.0.0.1", NAME))
    assert seconds(partial(lock.acquire, FIRST)) < 2 * TIMEOUT_SECONDS + SLOW_MACHINE
    assert [type(failure) for failure in failures] == [redis.TimeoutError]


def test_a_connection_that_comes_too_late_is_used_by_the_next(
    own_redis, lock_at, failures, resolver, no_pause
):
    # Longer than usual: were a slow machine late with the reply, it would connect a second time.
    lock = lock_at(own_redis.url.replace("127.0.0.1", NAME) + "?socket_timeout=2")
    assert [lock.acquire(FIRST) for _ in range(3)] == [Glance.ASK] * 3
    assert (resolver.asked, len(failures)) == (1, 3), "no second thread waits for the name"
    resolver.go_on.set()
    wait_until(lambda: lock.acquire(FIRST) is Glance.MINE, "connected")
    assert resolver.asked == 1


def test_one_request_at_a_time_probes_a_redis_that_was_away(proxy, lock_at, failures, no_pause):
    lock = lock_at(f"{proxy.url}?socket_timeout=20")
    assert lock.acquire(FIRST) is Glance.MINE
    proxy.hold(b"EVAL")
    with ThreadPoolExecutor(1) as pool:
        lock._skip_until = 0.0  # the pause is over
        probe = pool.submit(lock.acquire, FIRST)
        proxy.wait_until_held()
        assert lock.acquire(SECOND) is Glance.ASK
        lock.finish(SECOND)()
        lock.release(SECOND)
        assert not probe.done()
        proxy.let_go()
        assert probe.result(20) is Glance.MINE
    assert failures == []
    assert lock.acquire(SECOND) is Glance.BUSY, "the pause is over for all"


def test_of_requests_that_meet_a_failure_together_one_says_so(proxy, lock_at, failures, caplog):
    lock, together = lock_at(proxy.url), threading.Barrier(5)
    assert lock.acquire(FIRST) is Glance.MINE

    def ask():
        together.wait(20)
        return lock.acquire(SECOND)

    proxy.hang()
    with ThreadPoolExecutor(5) as pool:
        asked = [pool.submit(ask) for _ in range(5)]
        assert [each.result(20) for each in asked] == [Glance.ASK] * 5
    assert len(failures) > 1
    assert [record.levelname for record in ours(caplog)] == ["WARNING"]
    lock._skip_until = 0.0  # the pause is over
    assert lock.acquire(SECOND) is Glance.ASK
    assert [record.levelname for record in ours(caplog)] == ["WARNING"] * 2


def test_a_probe_that_is_interrupted_leaves_its_turn_to_the_next(lock_at, own_redis, monkeypatch):
    lock = lock_at(own_redis.url)
    lock._skip_until = 0.0
    with monkeypatch.context() as patch:
        patch.setattr(RedisLock, "_glance", interrupted)
        with pytest.raises(SystemExit):
            lock.acquire(FIRST)
    assert lock.acquire(FIRST) is Glance.MINE


def interrupted(*_):
    raise SystemExit
