"""Records on PostgreSQL: who takes them over, what a hold leaves, how long a lock is waited for."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace

import pytest
import sqlalchemy as sa

from flask_idempotency import current_operation
from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.records import Claim, Record, StoredResponse
from flask_idempotency.drivers.raw_connection import class_of
from tests.integration.views import protect

SAME, OTHER = Fingerprint(1, b"s" * 16), Fingerprint(1, b"o" * 16)
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
    assert isinstance(records.take_over(SECOND, seen), Record | None)
    assert records.look(FIRST.key).response == StoredResponse(201, (), b"the answer")


def test_a_take_over_of_what_was_taken_over_since_the_look_gets_nothing(world, records):
    records.claim(FIRST).abandon()
    seen = records.look(FIRST.key)
    records.take_over(SECOND, seen).abandon()
    assert isinstance(records.take_over(THIRD, seen), Record | None)
    assert records.look(FIRST.key).attempt == 2


@pytest.mark.parametrize("ttl", [60.0, 0.0])
def test_a_held_record_cannot_be_taken_over_also_when_it_expired(world, records, ttl):
    hold = records.claim(replace(FIRST, ttl_seconds=ttl))
    seen = records.look(FIRST.key)
    assert seen.expired is (ttl == 0)
    assert isinstance(records.take_over(SECOND, seen), Record | None)
    hold.complete(StoredResponse(201, (), b""))
    assert [r.owner for r in world.records()] == [FIRST.owner]


@pytest.mark.parametrize("name", ["NULL", "", '"{a,\\\\b}"', "Zürich \u2028"])
def test_any_text_of_a_record_is_read_as_it_was_written(records, name):
    claim = replace(FIRST, name=name)
    response = StoredResponse(201, (("X-Odd", name),), name.encode())
    records.claim(claim).complete(response)
    found = records.look(FIRST.key)
    assert (found.name, found.response) == (name, response)


def test_a_claim_that_finds_a_record_reads_it_on_one_connection(world, records):
    taken = []
    assert records.look(FIRST.key) is None  # what is asked once for each engine is asked here
    with world.app.app_context():
        sa.event.listen(world.db.engine, "checkout", lambda *what: taken.append(what))
    hold = records.claim(FIRST)
    assert (hold.attempt, len(taken)) == (1, 1)
    assert records.claim(SECOND).owner == FIRST.owner
    hold.complete(StoredResponse(201, (), b""))
    assert records.claim(SECOND).response == StoredResponse(201, (), b"")


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_claim_whose_connection_breaks_is_ours(records, monkeypatch, is_sent):
    wires, sent = (
        class_of(records.messages.engine.dialect.name, records.messages.engine.dialect.driver),
        [],
    )
    send = wires.send

    def lose(wire, sql, values=None, first=()):
        if "insert into" in str(sql).lower():
            sent.append(sql)
            if len(sent) == 1:
                if is_sent:
                    send(wire, sql, values)
                wire.driver.close()
        return send(wire, sql, values, first)

    monkeypatch.setattr(wires, "send", lose)
    hold = records.claim(FIRST)
    assert (hold.attempt, len(sent)) == (1, 2)
    hold.complete(StoredResponse(201, (), b""))


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
    with records.messages.engine.connect() as connection:
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
    with records.messages.engine.connect() as connection:
        assert connection.scalar(sa.text("select 1")) == 1


def test_a_take_over_never_changes_the_fingerprint_of_a_live_record(world):
    records = world.app.extensions["idempotency"].records
    mine = Claim(b"k" * 32, "pay", Fingerprint(1, b"m" * 16), "1" * 22, 0.0)
    other = replace(mine, fingerprint=Fingerprint(1, b"o" * 16), owner="2" * 22, ttl_seconds=60.0)
    records.claim(mine).abandon()
    expired = records.look(mine.key)
    records.take_over(other, expired).abandon()
    hold = records.take_over(replace(mine, owner="3" * 22), expired)
    if not isinstance(hold, Record | None):
        hold.abandon()
    assert records.look(mine.key).fingerprint == other.fingerprint


@pytest.mark.parametrize("known", [False, True])
def test_a_locked_table_is_waited_for_briefly(make_world, known):
    impatient = {"connect_args": {"options": "-c statement_timeout=3000"}}
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=impatient)
    protect(world, lambda: ({}, 201))
    world.post(key="key-1" if known else "key-0")
    with world.app.app_context(), world.db.engine.begin() as connection:
        connection.execute(sa.text("lock table idempotency_record in access exclusive mode"))
        started = time.monotonic()
        assert world.post().status_code == 503
        assert time.monotonic() - started < 2


def test_a_table_locked_between_the_claim_and_its_lock_is_waited_for_briefly(make_world):
    """The claim waits for one lock, and another is asked for behind it: that one comes in between."""
    impatient = {"connect_args": {"options": "-c statement_timeout=3000"}}
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=impatient)
    protect(world, lambda: ({}, 201))
    world.post(key="key-0")
    for _ in range(30):
        world.sql("delete from idempotency_record")
        status, seconds = answer_while_locked(world)
        assert status in (201, 503)
        assert seconds < 2
        # A claim that timed out itself, on a busy machine, has left no record.
        if status == 503 and world.records():
            return
    pytest.fail("never: the table was locked between the claim and its lock")


def answer_while_locked(world):
    """The answer's status, and how long it took."""
    waiting = sa.text(
        "select count(*) from pg_locks where not granted and database ="
        " (select oid from pg_database where datname = current_database())"
    )
    answers, altered = [], threading.Event()

    def send():
        started = time.monotonic()
        answers.append((world.post().status_code, time.monotonic() - started))

    def alter():
        with engine.begin() as third:
            third.execute(sa.text("lock table idempotency_record in access exclusive mode"))
            altered.wait(10)

    with world.app.app_context():
        engine = world.db.engine
    with engine.connect() as watch, engine.connect() as first:
        first.execute(sa.text("lock table idempotency_record in share mode"))
        sender, alterer = threading.Thread(target=send), threading.Thread(target=alter)
        for number, thread in enumerate((sender, alterer), 1):
            thread.start()
            patience = time.monotonic() + 0.2
            while watch.scalar(waiting) < number and time.monotonic() < patience:
                watch.rollback()
        first.rollback()
        sender.join(10)
        altered.set()
        alterer.join(10)
    return answers[0]


def test_the_number_of_an_attempt_is_durable_before_the_view_runs(world):
    outside = []

    def pay():
        outside.append([(r.state, r.attempt) for r in world.records()])
        return {"attempt": current_operation.attempt}, 500 if len(outside) < 3 else 201

    protect(world, pay)
    assert [world.post().status_code for _ in range(3)] == [500, 500, 201]
    assert outside == [[("in_progress", n)] for n in (1, 2, 3)]
