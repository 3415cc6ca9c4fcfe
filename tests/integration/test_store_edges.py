"""What went unnoticed when a safeguard of records or locks was taken out: one test for each of them."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import sqlalchemy as sa
from redis import Redis

from flask_idempotency.core.engine import Mismatch, Replay
from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.ports import Glance
from flask_idempotency.core.records import Claim, StoredResponse

SAME, OTHER = Fingerprint(1, b"s" * 32), Fingerprint(1, b"o" * 32)
FIRST = Claim(b"k" * 32, "pay", SAME, "1" * 22, 60.0)
SECOND, THIRD = replace(FIRST, owner="2" * 22), replace(FIRST, owner="3" * 22)


@pytest.fixture
def records(world):
    """The store itself; the table lives on the usual application's database."""
    return world.app.extensions["idempotency"].records


def expire(world):
    world.sql("update idempotency_record set expires_at = clock_timestamp() - interval '1 second'")


def test_a_take_over_of_what_was_completed_since_the_look_gets_nothing(world, records):
    hold = records.claim(FIRST)
    seen = records.look(FIRST.key)
    hold.complete(StoredResponse(201, (), b"the answer"))
    assert records.take_over(SECOND, seen) is None
    assert records.look(FIRST.key).response == StoredResponse(201, (), b"the answer")


def test_a_take_over_of_what_was_taken_over_since_the_look_gets_nothing(world, records):
    records.claim(FIRST).abandon()
    seen = records.look(FIRST.key)
    records.take_over(SECOND, seen).abandon()
    assert records.take_over(THIRD, seen) is None
    assert records.look(FIRST.key).attempt == 2


@pytest.mark.parametrize("ttl", [60.0, 0.0])
def test_a_held_record_cannot_be_taken_over_also_when_it_expired(world, records, ttl):
    hold = records.claim(replace(FIRST, ttl_seconds=ttl))
    seen = records.look(FIRST.key)
    assert seen.expired is (ttl == 0)
    assert records.take_over(SECOND, seen) is None
    hold.complete(StoredResponse(201, (), b""))
    assert [r.owner for r in world.records()] == [FIRST.owner]


def test_an_expired_record_starts_afresh(world, records):
    records.claim(FIRST).complete(StoredResponse(201, (), b"old"))
    created = world.records()[0].created_at
    expire(world)
    hold = records.take_over(replace(SECOND, fingerprint=OTHER), records.look(FIRST.key))
    assert hold.attempt == 1
    hold.abandon()
    record = records.look(FIRST.key)
    assert (record.expired, record.response, record.fingerprint) == (False, None, OTHER)
    assert world.records()[0].created_at > created


def test_a_hold_that_is_forgotten_frees_its_row_and_leaves_no_transaction_in_the_pool(world, records):
    hold = records.claim(FIRST)
    del hold
    gc.collect()
    with records.engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert not driver.autocommit
        assert driver.info.transaction_status == 0
    again = records.take_over(SECOND, records.look(FIRST.key))
    assert again.attempt == 2
    again.abandon()


def test_a_connection_that_dies_while_it_is_given_back_does_not_come_back(world, records):
    hold = records.claim(FIRST)
    backend = hold.connection.scalar(sa.text("select pg_backend_pid()"))
    world.sql("select pg_terminate_backend(:pid, 5000)", pid=backend)
    hold.abandon()
    with records.engine.connect() as connection:
        assert connection.scalar(sa.text("select 1")) == 1


@pytest.mark.parametrize("store", ["hybrid"])
def test_a_lock_that_was_lost_and_taken_by_another_is_not_given_back(world, redis_server):
    lock = world.app.extensions["idempotency"].lock
    assert lock.acquire(FIRST) is Glance.MINE
    client = Redis.from_url(redis_server.url)
    client.flushall()
    assert lock.acquire(SECOND) is Glance.MINE
    lock.release(FIRST)
    assert lock.acquire(THIRD) is Glance.BUSY
    lock.release(SECOND)
    client.close()


@pytest.mark.parametrize("store", ["hybrid"])
@pytest.mark.parametrize("fingerprint", [SAME, OTHER])
def test_who_finishes_without_the_lock_still_tells_it(world, fingerprint):
    """The lock's owner was overtaken, and is there still: its lock must refuse nobody any more."""
    state = world.app.extensions["idempotency"]
    assert state.lock.acquire(FIRST) is Glance.MINE
    overtakes = state.engine.decide(SECOND, wait=1)  # who would wait asks the records, not the lock
    overtakes.execution.complete(StoredResponse(201, (), b"the answer"))
    retry = state.engine.decide(replace(THIRD, fingerprint=fingerprint))
    expected = Replay if fingerprint is SAME else Mismatch
    assert isinstance(retry, expected)
    assert isinstance(state.engine.decide(FIRST), Replay)


@pytest.mark.parametrize("store", ["hybrid"])
def test_a_retry_that_finds_the_end_tells_a_lock_that_forgot(world, redis_server):
    """Not only the retry that replays: a refused one has found it as well."""
    state = world.app.extensions["idempotency"]
    state.engine.decide(FIRST).execution.complete(StoredResponse(201, (), b"the answer"))
    for decision, fingerprint in ((Mismatch, OTHER), (Replay, SAME)):
        client = Redis.from_url(redis_server.url)
        client.flushall()
        client.close()
        retry = replace(SECOND, fingerprint=fingerprint)
        assert isinstance(state.engine.decide(retry), decision)
        assert state.lock.acquire(replace(retry, owner=THIRD.owner)) is Glance.ASK
