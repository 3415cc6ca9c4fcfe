"""Records on PostgreSQL, beyond the contract: connections, forgotten holds, waiting for locks."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace

import pytest
import sqlalchemy as sa

import servers
from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.records import Record, StoredResponse
from tests.contract.claims import a_claim, again, stored_record

RESPONSE = StoredResponse(201, (), b"")


@pytest.fixture
def records(world):
    """The store itself; the table lives on the usual application's database."""
    return world.app.extensions["idempotency"].records


@pytest.mark.parametrize("name", ["NULL", "", '"{a,\\\\b}"', "Zürich \u2028"])
def test_any_text_of_a_record_is_read_as_it_was_written(records, name):
    claim = replace(a_claim(), name=name)
    response = StoredResponse(201, (("X-Odd", name),), name.encode())
    records.claim(claim).complete(response)
    found = records.look(claim.key)
    assert (found.name, found.response) == (name, response)


def test_a_claim_that_finds_a_record_reads_it_on_one_connection(world, records):
    taken, claim = [], a_claim()
    assert records.look(claim.key) is None  # what is asked once for each engine is asked here
    with world.app.app_context():
        sa.event.listen(world.db.engine, "checkout", lambda *what: taken.append(what))
    hold = records.claim(claim)
    assert (hold.attempt, len(taken)) == (1, 1)
    assert records.claim(again(claim)).owner == claim.owner
    hold.complete(RESPONSE)
    assert records.claim(again(claim)).response == RESPONSE


CLAIM = b"DO NOTHING"
"""In each claim's message, and in no other."""


@pytest.mark.parametrize("arrives", [True, False])
def test_a_claim_whose_connection_breaks_is_ours(make_world, postgres, add_view, background, arrives):
    with servers.FaultProxy(postgres.database(f"claims_{arrives}")) as proxy:
        world = make_world(SQLALCHEMY_DATABASE_URI=proxy.url)
        runs = add_view(world)
        world.post(key="opens-a-connection")
        if arrives:
            proxy.lose_answer(CLAIM)
        else:
            proxy.hold(CLAIM)
        first = background(world.post)
        if not arrives:
            proxy.wait_until_held()
            proxy.cut()
        assert first.result().status_code == 201
        assert proxy.lost == arrives
        assert runs == [1, 1], "the attempt is the first one"


def test_a_hold_that_is_forgotten_frees_its_row_and_leaves_no_transaction_in_the_pool(records):
    claim = a_claim()
    hold = records.claim(claim)
    del hold
    gc.collect()
    with records.messages.engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert not driver.autocommit
        assert driver.info.transaction_status == 0
    hold = records.take_over(again(claim), stored_record(records, claim))
    assert hold.attempt == 2
    hold.abandon()


def test_a_connection_that_dies_while_it_is_given_back_does_not_come_back(world, records):
    hold = records.claim(a_claim())
    backend = hold.connection.scalar(sa.text("select pg_backend_pid()"))
    world.sql("select pg_terminate_backend(:pid, 5000)", pid=backend)
    hold.abandon()
    with records.messages.engine.connect() as connection:
        assert connection.scalar(sa.text("select 1")) == 1


def test_a_take_over_never_changes_the_fingerprint_of_a_live_record(records):
    mine = a_claim(ttl=0.0)
    other = replace(again(mine), fingerprint=Fingerprint(1, b"o" * 16), ttl_seconds=60.0)
    records.claim(mine).abandon()
    expired = stored_record(records, mine)
    records.take_over(other, expired).abandon()
    hold = records.take_over(again(mine), expired)
    if not isinstance(hold, Record | None):
        hold.abandon()
    assert records.look(mine.key).fingerprint == other.fingerprint


LOCK = sa.text("lock table idempotency_record in access exclusive mode")
IMPATIENT = {"connect_args": {"options": "-c statement_timeout=3000"}}


@pytest.mark.parametrize("known", [False, True])
def test_a_locked_table_is_waited_for_briefly(make_world, add_view, known):
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=IMPATIENT)
    add_view(world)
    world.post(key="key-1" if known else "key-0")
    with world.app.app_context(), world.db.engine.begin() as connection:
        connection.execute(LOCK)
        started = time.monotonic()
        assert world.post().status_code == 503
        assert time.monotonic() - started < 2


def test_a_table_locked_between_the_claim_and_its_lock_is_waited_for_briefly(make_world, add_view):
    """The claim waits for one lock, and another is asked for behind it: that one comes in between."""
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=IMPATIENT)
    add_view(world)
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
            third.execute(LOCK)
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


def test_the_number_of_an_attempt_is_durable_before_the_view_runs(world, add_view):
    outside = []

    def look():
        outside.append([(record.state, record.attempt) for record in world.records()])
        assert len(outside) == 3

    runs = add_view(world, during=look)
    assert [world.post().status_code for _ in range(3)] == [500, 500, 201]
    assert outside == [[("in_progress", number)] for number in runs]
    assert runs == [1, 2, 3]
