"""The connections of our own client: whose reply is read, and what becomes of them in trouble."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import gevent
import pytest
import redis

import servers
from flask_idempotency.core.ports import Glance
from flask_idempotency.stores.lock import RedisLock, client_from_url
from tests.contract.test_locks import FIRST, SECOND
from tests.waiting import wait_until

ECHO = "return ARGV[1]"
PATIENT = "?socket_timeout=20&socket_connect_timeout=20"


@pytest.fixture
def behind(own_redis):
    with redis.Redis.from_url(own_redis.url) as client:
        yield client


@pytest.fixture
def proxy(own_redis):
    with servers.FaultProxy(own_redis.url) as proxy:
        yield proxy


@pytest.fixture
def failures():
    return []


@pytest.fixture
def lock(own_redis, failures):
    return RedisLock(client_from_url(own_redis.url + PATIENT), "shop:", on_failure=failures.append)


def connected(behind):
    return behind.info("stats")["total_connections_received"]


def sender(url):
    """A function that has the server repeat a word, and returns what waits for the reply."""
    client = client_from_url(url)

    def ask(word, script=ECHO):
        return client.send("EVAL", script, 1, "key", word)

    return ask


def echo(ask):
    word = secrets.token_bytes(16)
    return ask(word)() == word


class Interrupted(BaseException):
    """Raised by a signal's handler, as gunicorn's worker ends a request that takes too long."""


@pytest.mark.parametrize(
    "interruption", [Interrupted, SystemExit, gevent.Timeout, redis.TimeoutError, None]
)
def test_the_reply_to_an_interrupted_command_is_nobody_elses(proxy, interruption):
    """Also one that comes too late, or that nobody asks for."""

    def interrupt(*_):
        raise interruption

    def once_sent():
        proxy.wait_until_held()
        if interruption is not redis.TimeoutError:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        ask = sender(proxy.url + ("" if interruption is redis.TimeoutError else PATIENT))
        assert echo(ask)
        if interruption is None:
            ask(b"stale")
        else:
            proxy.hold(b"stale")
            thread = threading.Thread(target=once_sent)
            thread.start()
            with pytest.raises(interruption):
                ask(b"stale")()
            thread.join()
            proxy.let_go()
        assert all(echo(ask) for _ in range(20))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_error_is_the_reply_to_its_own_command_only(own_redis, behind):
    ask, before = sender(own_redis.url), connected(behind)
    for _ in range(3):
        with pytest.raises(redis.ResponseError, match="oh dear"):
            ask(b"", "return redis.error_reply('oh dear')")()
        assert echo(ask)
    assert connected(behind) - before <= 6, "an error may cost two connections, not more"


def test_many_threads_each_get_their_own_replies(own_redis, behind):
    ask = sender(own_redis.url + PATIENT)
    threads, rounds = 32, 200
    together, before = threading.Barrier(threads), connected(behind)

    def ask_often(_number):
        together.wait(20)
        return sum(echo(ask) for _ in range(rounds))

    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(ask_often, range(threads))) == [rounds] * threads
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


def test_a_server_that_has_gone_is_asked_once_and_left_alone(proxy, failures):
    lock = RedisLock(client_from_url(proxy.url), "shop:", on_failure=failures.append)
    lock.release(FIRST)
    proxy.refuse()
    proxy.cut()
    assert [lock.acquire(FIRST) for _ in range(3)] == [Glance.ASK] * 3
    assert [type(failure) for failure in failures] == [redis.ConnectionError]


def test_a_forked_process_leaves_its_parents_connections_alone(own_redis, behind):
    ask = sender(own_redis.url)
    assert echo(ask)
    ours = connected(behind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pytest has threads of its own
        child = os.fork()
    if not child:
        own_replies = False
        try:
            own_replies = all(echo(ask) for _ in range(300))
        finally:
            os._exit(not own_replies)
    assert all(echo(ask) for _ in range(300))
    assert os.waitpid(child, 0)[1] == 0
    assert echo(ask)
    assert connected(behind) == ours + 1


def test_a_client_that_has_its_response_meets_no_lock(make_world, own_redis, proxy, postgres, add_view):
    """Though another worker is nearer to Redis than the one that ran the view."""
    url = postgres.database("near_and_far")
    proxy.delay = 0.01
    far = make_world(SQLALCHEMY_DATABASE_URI=url, IDEMPOTENCY_REDIS_URL=proxy.url + PATIENT)
    near = make_world(SQLALCHEMY_DATABASE_URI=url, IDEMPOTENCY_REDIS_URL=own_redis.url)
    add_view(far)
    add_view(near)
    for number in range(20):
        first, retry = far.post(key=f"key-{number}"), near.post(key=f"key-{number}")
        assert (first.status_code, retry.status_code) == (201, 201), retry.text
        assert retry.headers["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize("fails", [False, True])
def test_the_marker_is_on_its_way_while_postgres_commits_and_its_reply_is_no_other_commands(
    make_world, own_redis, behind, postgres, add_view, background, caplog, fails
):
    with servers.FaultProxy(postgres.database(f"slow_commit_{fails}")) as proxy:
        redis_url = own_redis.url + PATIENT
        world = make_world(SQLALCHEMY_DATABASE_URI=proxy.url, IDEMPOTENCY_REDIS_URL=redis_url)
        add_view(world, during=lambda: proxy.hold(b"COMMIT"))
        first = background(world.post)
        proxy.wait_until_held()
        wait_until(lambda: behind.mget(behind.keys()) == [b"1:done"], "the marker is there")
        assert not first.done()
        proxy.cut() if fails else proxy.let_go()
        assert first.result().status_code == (503 if fails else 201)
        lock = world.app.extensions["idempotency"].lock
        assert [lock.acquire(FIRST), lock.acquire(SECOND)] == [Glance.MINE, Glance.BUSY]
        assert "Redis failed" not in caplog.text
