"""What a slow Redis may cost: a time limit, and one request at a time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import servers
from flask_idempotency.core.ports import Glance
from flask_idempotency.stores.lock import RedisLock, client_from_url
from tests.contract.test_locks import FIRST, SECOND
from tests.log import ours


@pytest.fixture
def proxy(own_redis):
    with servers.FaultProxy(own_redis.url) as proxy:
        yield proxy


@pytest.fixture
def lock_at():
    def make(url):
        failures = []
        return RedisLock(client_from_url(url), "shop:", on_failure=failures.append), failures

    return make


def test_a_long_reply_may_take_the_time_of_its_bytes_and_come_in_pieces(proxy):
    """The store ``redis`` keeps responses there; the network takes longer for 8 MB than the limit."""
    client = client_from_url(f"{proxy.url}?socket_timeout=0.5")
    repeat = "EVAL", "return string.rep(ARGV[1], ARGV[2])", 1, "key"
    assert client.send(*repeat, b"warm", 1)() == b"warm"
    connections = proxy.connections
    proxy.trickle = 0.002
    assert client.send(*repeat, b"piece", 10)() == b"piece" * 10
    proxy.trickle = 0.0
    proxy.delay = 0.01  # for each 64 KB: 1.3 s in all
    assert len(client.send(*repeat, b"x" * 1000, 8000)()) == 8_000_000
    assert proxy.connections == connections


def test_one_request_at_a_time_probes_a_redis_that_was_away(proxy, lock_at):
    lock, failures = lock_at(f"{proxy.url}?socket_timeout=20")
    assert lock.acquire(FIRST) is Glance.MINE
    proxy.hold(b"PTTL")
    with ThreadPoolExecutor(1) as pool:
        lock._skip_until = time.monotonic()  # the pause is over
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


def test_of_requests_that_meet_a_failure_together_one_says_so(proxy, lock_at, caplog):
    (lock, failures), together = lock_at(proxy.url), threading.Barrier(5)
    assert lock.acquire(FIRST) is Glance.MINE

    def ask(_number):
        together.wait(20)
        return lock.acquire(SECOND)

    proxy.hang()
    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(ask, range(5))) == [Glance.ASK] * 5
    assert len(failures) > 1
    lock._skip_until = 0.0  # the pause is over
    assert lock.acquire(SECOND) is Glance.ASK
    assert [record.levelname for record in ours(caplog)] == ["WARNING"] * 2
