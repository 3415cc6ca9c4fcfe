"""The connections that the lock keeps: whose reply is read, and what becomes of them in trouble."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import gevent
import pytest
import redis

import servers
from flask_idempotency.core.ports import Glance
from flask_idempotency.stores.redis.client import client_from_url
from flask_idempotency.stores.redis.lock import RedisLock
from flask_idempotency.stores.redis.wire import wire_of
from tests.contract.test_locks import FIRST, SECOND

ECHO = "return ARGV[1]"
KEY = b"key"


@pytest.fixture
def behind(own_redis):
    with redis.Redis.from_url(own_redis.url) as client:
        yield client


@pytest.fixture
def wire(own_redis):
    return wire_of(client_from_url(own_redis.url)())


@pytest.fixture
def failures():
    return []


@pytest.fixture
def lock(own_redis, failures):
    client = client_from_url(own_redis.url)
    return RedisLock(client, "shop:", probe_after=1.0, on_failure=failures.append)


class OneSentinel(redis.Sentinel):
    """Knows where the primary is. Its connections stay open after an error; plain ones close."""

    def __init__(self, port):
        super().__init__([])
        self._port = port

    def discover_master(self, service_name):
        return "127.0.0.1", self._port


def plain_client(proxy, server):
    return client_from_url(f"{proxy.url}?socket_timeout=20")()


def sentinels_client(proxy, server):
    options = {"password": server.password, "protocol": 2, "socket_timeout": 20}
    return OneSentinel(proxy.port).master_for("main", **options)


def connected(behind):
    return behind.info("stats")["total_connections_received"]


def echo(wire):
    word = secrets.token_bytes(16)
    return wire.send(ECHO, KEY, word)() == word


class Interrupted(BaseException):
    """Raised by a signal's handler, as gunicorn's worker ends a request that takes too long."""


@pytest.mark.parametrize("make_client", [plain_client, sentinels_client])
@pytest.mark.parametrize("interruption", [Interrupted, KeyboardInterrupt, SystemExit, gevent.Timeout])
def test_the_reply_to_an_interrupted_command_is_nobody_elses(own_redis, make_client, interruption):
    def interrupt(*_):
        raise interruption

    def once_sent():
        proxy.wait_until_held()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with servers.FaultProxy(own_redis.url) as proxy:
            wire = wire_of(make_client(proxy, own_redis))
            assert echo(wire)
            proxy.hold(b"stale")
            thread = threading.Thread(target=once_sent)
            thread.start()
            with pytest.raises(interruption):
                wire.send(ECHO, KEY, b"stale")()
            thread.join()
            proxy.let_go()
            assert all(echo(wire) for _ in range(20))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_reply_that_nobody_asks_for_is_nobody_elses(wire):
    for _ in range(3):
        assert echo(wire)
        wire.send(ECHO, KEY, b"stale")
    assert echo(wire)


def test_a_reply_that_comes_too_late_is_nobody_elses(own_redis):
    with servers.FaultProxy(own_redis.url) as proxy:
        wire = wire_of(client_from_url(proxy.url)())
        assert echo(wire)
        proxy.hold(b"stale")
        with pytest.raises(redis.TimeoutError):
            wire.send(ECHO, KEY, b"stale")()
        proxy.let_go()
        assert all(echo(wire) for _ in range(20))


def test_an_error_is_the_reply_to_its_own_command_only(wire, behind):
    before = connected(behind)
    for _ in range(3):
        with pytest.raises(redis.ResponseError, match="oh dear"):
            wire.send("return redis.error_reply('oh dear')", KEY)()
        assert echo(wire)
    assert connected(behind) - before <= 6, "an error may cost two connections, not more"


def test_many_threads_each_get_their_own_replies(own_redis, behind):
    wire = wire_of(client_from_url(f"{own_redis.url}?socket_timeout=20&socket_connect_timeout=20")())
    threads, rounds = 32, 200
    together, before = threading.Barrier(threads), connected(behind)

    def ask(_number):
        together.wait(20)
        return sum(echo(wire) for _ in range(rounds))

    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(ask, range(threads))) == [rounds] * threads
    assert connected(behind) - before <= threads


def test_a_connection_is_used_again(lock, behind):
    assert lock.acquire(FIRST) is Glance.MINE
    before = connected(behind)
    for _ in range(10):
        assert lock.acquire(SECOND) is Glance.BUSY
        lock.finish(FIRST)()
        lock.release(SECOND)
        behind.flushall()
        assert lock.acquire(FIRST) is Glance.MINE
    assert connected(behind) == before


@pytest.mark.parametrize("verb", ["acquire", "release", "finish"])
def test_a_connection_that_the_server_closed_costs_a_reconnect_not_a_pause(
    lock, behind, failures, verb
):
    assert lock.acquire(FIRST) is Glance.MINE
    behind.client_kill_filter(_type="normal", skipme=True)
    match verb:
        case "acquire":
            assert lock.acquire(FIRST) is Glance.MINE
        case "release":
            lock.release(FIRST)
            assert behind.keys() == []
        case "finish":
            lock.finish(FIRST)()
            assert behind.mget(behind.keys()) == [b"1:done"]
    assert failures == []


def test_a_restart_costs_a_reconnect_not_a_pause(lock, own_redis, failures):
    assert lock.acquire(FIRST) is Glance.MINE
    own_redis.restart(crash=True)
    assert lock.acquire(SECOND) is Glance.MINE
    assert failures == []


@pytest.mark.parametrize("make_client", [plain_client, sentinels_client])
def test_a_demoted_primary_costs_a_reconnect_not_a_pause(own_redis, failures, make_client):
    """Its name, or its Sentinel, leads to the new primary by then."""
    with servers.Redis() as new, servers.FaultProxy(own_redis.url) as proxy:
        with redis.Redis.from_url(new.url) as client:
            client.config_set("requirepass", own_redis.password)
        client = make_client(proxy, own_redis)
        lock = RedisLock(lambda: client, "shop:", probe_after=1.0, on_failure=failures.append)
        assert lock.acquire(FIRST) is Glance.MINE
        with redis.Redis.from_url(own_redis.url) as old:
            old.replicaof("127.0.0.1", servers.free_port())
        proxy._target = ("127.0.0.1", new.port)
        assert lock.acquire(replace(FIRST, key=b"o" * 32)) is Glance.MINE
        assert failures == []


def test_a_command_whose_reply_is_lost_is_sent_again_and_meets_no_lock_of_its_own(own_redis, failures):
    with servers.FaultProxy(own_redis.url) as proxy:
        lock = RedisLock(
            client_from_url(proxy.url), "shop:", probe_after=1.0, on_failure=failures.append
        )
        lock.release(FIRST)
        proxy.lose_answer(b"PTTL")
        assert lock.acquire(FIRST) is Glance.MINE
        assert (proxy.lost, failures) == (1, [])


def test_a_server_that_has_gone_is_asked_once_more_and_left_alone(own_redis, failures):
    with servers.FaultProxy(own_redis.url) as proxy:
        lock = RedisLock(
            client_from_url(proxy.url), "shop:", probe_after=1.0, on_failure=failures.append
        )
        lock.release(FIRST)
        proxy.refuse()
        proxy.cut()
        assert [lock.acquire(FIRST) for _ in range(3)] == [Glance.ASK] * 3
        assert [type(failure) for failure in failures] == [redis.ConnectionError]


def test_a_forked_process_leaves_its_parents_connections_alone(wire, behind):
    assert echo(wire)
    ours = connected(behind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pytest has threads of its own
        child = os.fork()
    if not child:
        own_replies = False
        try:
            own_replies = all(echo(wire) for _ in range(300))
        finally:
            os._exit(not own_replies)
    assert all(echo(wire) for _ in range(300))
    assert os.waitpid(child, 0)[1] == 0
    assert echo(wire)
    assert connected(behind) == ours + 1


@pytest.mark.parametrize("pool", [redis.ConnectionPool, redis.BlockingConnectionPool])
def test_a_pool_of_one_connection_is_enough_for_the_application_and_the_lock(own_redis, failures, pool):
    one = pool.from_url(own_redis.url, max_connections=1)
    with redis.Redis(connection_pool=one) as client:
        lock = RedisLock(lambda: client, "shop:", probe_after=1.0, on_failure=failures.append)
        with client.client():  # the application has taken the one
            assert lock.acquire(FIRST) is Glance.MINE
        lock.finish(FIRST)
        assert client.ping()
    assert failures == []


def test_a_client_that_has_its_response_meets_no_lock(make_world, own_redis, postgres, add_view):
    """Though another worker is nearer to Redis than the one that ran the view."""
    url = postgres.database("near_and_far")
    with servers.FaultProxy(own_redis.url) as proxy:
        proxy.delay = 0.01
        far = make_world(
            SQLALCHEMY_DATABASE_URI=url, IDEMPOTENCY_REDIS_URL=f"{proxy.url}?socket_timeout=5"
        )
        near = make_world(SQLALCHEMY_DATABASE_URI=url, IDEMPOTENCY_REDIS_URL=own_redis.url)
        add_view(far)
        add_view(near)
        for number in range(20):
            first, retry = far.post(key=f"key-{number}"), near.post(key=f"key-{number}")
            assert (first.status_code, retry.status_code) == (201, 201), retry.text
            assert retry.headers["Idempotent-Replayed"] == "true"


def test_the_marker_is_on_its_way_while_postgres_commits(
    make_world, own_redis, behind, postgres, add_view, background
):
    with servers.FaultProxy(postgres.database("slow_commit")) as proxy:
        world = make_world(SQLALCHEMY_DATABASE_URI=proxy.url, IDEMPOTENCY_REDIS_URL=own_redis.url)
        add_view(world, during=lambda: proxy.hold(b"COMMIT"))
        first, deadline = background(world.post), time.monotonic() + 20
        proxy.wait_until_held()
        while behind.mget(behind.keys()) != [b"1:done"]:
            assert time.monotonic() < deadline
        assert not first.done()
        proxy.let_go()
        assert first.result().status_code == 201
