"""The connections of our own client: whose reply is read, and what becomes of them in trouble."""

import secrets
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

import servers
from flask_idempotency.core.ports import Glance
from flask_idempotency.stores import lock as redis_store
from flask_idempotency.stores.lock import RedisLock, client_from_url
from tests.contract.test_locks import FIRST, SECOND
from tests.waiting import wait_until

ECHO = "return ARGV[1]"
PATIENT = "?socket_timeout=20&socket_connect_timeout=20"


@pytest.fixture
def failures():
    return []


@pytest.fixture
def lock_of(failures):
    """A function that makes the lock of an application."""
    return lambda redis: RedisLock(
        client_from_url(redis.url + PATIENT), "läden:", on_failure=failures.append
    )


def connected(behind):
    return behind.info("stats")["total_connections_received"]


def sender(url):
    """A function that has the server repeat a word, and returns what waits for the reply."""
    client = client_from_url(url)
    return lambda word, script=ECHO: client.send("EVAL", script, 1, "key", word)


def echo(ask):
    word = secrets.token_bytes(16)
    return ask(word)() == word


@pytest.mark.parametrize("fault", [SystemExit, redis.TimeoutError, redis.ResponseError, None])
def test_the_reply_to_another_command_is_nobody_elses(proxy, behind, fault):
    """Of one that was interrupted, came too late, or is an error; or that nobody asks for."""
    interrupted = threading.Event()

    def interrupt(*_):
        if not interrupted.is_set():
            interrupted.set()
            raise SystemExit

    def once_sent():
        proxy.wait_until_held()
        # As gunicorn's worker ends a request that takes too long; again if it came before the wait.
        while fault is SystemExit and not interrupted.wait(0.1):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    handler = signal.signal(signal.SIGUSR1, interrupt)
    ask = sender(proxy.url + ("" if fault is redis.TimeoutError else PATIENT))
    assert echo(ask)
    before = connected(behind)
    if fault is None:
        ask(b"stale")
    elif fault is redis.ResponseError:
        for _ in range(3):
            with pytest.raises(fault, match="oh dear"):
                ask(b"", "return redis.error_reply('oh dear')")()
            assert echo(ask)
    else:
        proxy.hold(b"stale")
        thread = threading.Thread(target=once_sent)
        thread.start()
        with pytest.raises(fault):
            ask(b"stale")()
        thread.join()
        proxy.let_go()
    signal.signal(signal.SIGUSR1, handler)
    assert all(echo(ask) for _ in range(20))
    assert connected(behind) - before <= 6, "a fault may cost two connections, not more"


def test_many_threads_each_get_their_own_replies(own_redis, behind):
    ask, threads, rounds = sender(own_redis.url + PATIENT), 16, 50
    together, before = threading.Barrier(threads), connected(behind)

    def ask_often(_number):
        together.wait(20)
        return sum(echo(ask) for _ in range(rounds))

    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(ask_often, range(threads))) == [rounds] * threads
    assert connected(behind) - before <= threads


def test_a_connection_is_used_again_and_one_that_the_server_closed_costs_no_pause(
    lock_of, own_redis, behind, failures
):
    lock = lock_of(own_redis)
    assert lock.acquire(FIRST) is Glance.MINE
    before = connected(behind)
    for _ in range(3):
        assert lock.acquire(SECOND) is Glance.BUSY
        lock.finish(FIRST)()
        lock.release(SECOND)
        behind.flushall()
        assert lock.acquire(FIRST) is Glance.MINE
    assert connected(behind) == before
    for verb in lock.acquire, lock.release, lambda claim: lock.finish(claim)():
        behind.client_kill_filter(_type="normal", skipme=True)
        verb(FIRST)
    assert behind.mget(behind.keys()) == [b"1:done"]
    assert failures == []


def test_one_request_at_a_time_probes_a_redis_that_was_away(
    proxy, lock_of, failures, background, monkeypatch
):
    lock = lock_of(proxy)
    monkeypatch.setattr(redis_store, "PAUSE_SECONDS", 0)
    proxy.refuse()
    assert lock.acquire(FIRST) is Glance.ASK
    proxy.accept()
    monkeypatch.setattr(redis_store, "PAUSE_SECONDS", 60)
    proxy.hold(b"PTTL")
    probe = background(lock.acquire, FIRST)
    proxy.wait_until_held()
    assert lock.acquire(SECOND) is Glance.ASK
    lock.finish(SECOND)()
    lock.release(SECOND)
    assert not probe.done()
    proxy.let_go()
    assert probe.result(20) is Glance.MINE
    assert len(failures) == 1
    assert lock.acquire(SECOND) is Glance.BUSY, "the pause is over for all"


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
