"""The lock in Redis: who gets it, and whom it refuses. On a real server, and on fakeredis."""

import logging
from dataclasses import replace

import fakeredis
import pytest
from redis import Redis

from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.ports import Glance
from flask_idempotency.core.records import Claim
from flask_idempotency.stores.lock import LOCK_SECONDS, MARKER_SECONDS, PROBE_AFTER_SECONDS, RedisLock
from tests.log import ours

SAME, OTHER = Fingerprint(1, b"s" * 16), Fingerprint(1, b"o" * 16)
FIRST = Claim(b"k" * 32, "pay", SAME, "1" * 22, 60.0)
SECOND, THIRD = replace(FIRST, owner="2" * 22), replace(FIRST, owner="3" * 22)
CHANGED = replace(SECOND, fingerprint=OTHER)
NAME, DONE = b"shop:" + FIRST.key.hex().encode(), b"1:done"
OLD = int((LOCK_SECONDS - PROBE_AFTER_SECONDS) * 1000)


@pytest.fixture(params=["server", "fakeredis"])
def client(request):
    if request.param == "fakeredis":
        client = fakeredis.FakeRedis()
        client.ping()  # threads that are the first to ask make a database each
        yield client
    else:
        with Redis.from_url(request.getfixturevalue("redis_server").url) as client:
            client.flushdb()
            yield client


@pytest.fixture
def lock(client):
    failures = []
    yield RedisLock(client, "shop:", on_failure=failures.append)
    assert failures == []


def test_one_gets_it_and_its_duplicates_are_refused(lock):
    assert [lock.acquire(FIRST) for _ in range(2)] == [Glance.MINE] * 2, "a reply may have been lost"
    assert [lock.acquire(SECOND) for _ in range(2)] == [Glance.BUSY] * 2
    assert lock.acquire(CHANGED) is Glance.ASK
    assert lock.acquire(replace(SECOND, key=b"o" * 32)) is Glance.MINE


@pytest.mark.parametrize(
    ("milliseconds", "glance"),
    [
        (OLD + 500, Glance.BUSY),
        pytest.param(OLD, Glance.ASK, id="older than the probe age"),
        pytest.param(None, Glance.ASK, id="for ever, which ours never is"),
        pytest.param(int(LOCK_SECONDS * 1000) + 60_000, Glance.ASK, id="longer than ours"),
    ],
)
def test_a_lock_of_another_age_is_not_trusted(lock, client, milliseconds, glance):
    lock.acquire(FIRST)
    client.persist(NAME)
    if milliseconds:
        client.pexpire(NAME, milliseconds)
    assert lock.acquire(SECOND) is glance


def test_it_holds_nothing_worth_having_and_is_free_when_it_is_given_back(lock, client):
    lock.acquire(replace(FIRST, name="canary"))
    assert client.keys() == [NAME]
    assert client.get(NAME) == b"1:" + FIRST.owner.encode() + b":1." + SAME.digest.hex().encode()
    assert LOCK_SECONDS * 1000 - 5000 < client.pttl(NAME) <= LOCK_SECONDS * 1000
    lock.release(FIRST)
    assert client.keys() == []
    assert lock.acquire(SECOND) is Glance.MINE
    lock.release(FIRST)
    assert lock.acquire(THIRD) is Glance.BUSY, "another's is not given back"


@pytest.mark.parametrize("holder", [FIRST, SECOND])
def test_after_the_end_everybody_asks_the_records(lock, client, holder):
    """Also in place of a lock that another has got meanwhile."""
    lock.acquire(holder)
    lock.finish(FIRST)()
    assert client.get(NAME) == DONE
    assert [lock.acquire(claim) for claim in (FIRST, SECOND, CHANGED)] == [Glance.ASK] * 3


@pytest.mark.parametrize("ttl", [60.0, 2 * MARKER_SECONDS])
def test_the_marker_stays_no_longer_than_the_record(lock, client, ttl):
    lock.finish(replace(FIRST, ttl_seconds=ttl))()
    most = min(ttl, MARKER_SECONDS) * 1000
    assert most - 5000 < client.pttl(NAME) <= most


def test_each_failure_is_told_and_a_line_says_when_they_began_and_ended(monkeypatch, caplog):
    monkeypatch.setattr("flask_idempotency.stores.lock.PAUSE_SECONDS", 0)  # each request probes
    caplog.set_level(logging.INFO, "flask_idempotency")
    server, told = fakeredis.FakeServer(), []
    lock = RedisLock(fakeredis.FakeRedis(server=server), "shop:", on_failure=told.append)
    for server.connected in (True, False, False, True, True):
        lock.acquire(FIRST)
    assert len(told) == 2
    lines = [each.message.partition(",")[0] for each in ours(caplog, logging.INFO)]
    assert lines == ["Redis failed", "Redis works again"]
