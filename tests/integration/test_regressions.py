"""What once went wrong, each with the least code that showed it."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import psycopg2.extras
import pytest
import redis
import sqlalchemy as sa
from flask import copy_current_request_context
from flask_sqlalchemy import SQLAlchemy
from flask_sqlalchemy.session import Session
from sqlalchemy.pool.base import _AdhocProxiedConnection

from flask_idempotency import current_operation, idempotent
from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.records import Claim
from tests.integration.views import protect


@pytest.fixture(params=["postgres"])
def store(request):
    return request.param


def pay_once(world):
    world.db.session.add(world.Payment(amount=1))
    world.db.session.commit()


def test_a_thread_with_a_copy_of_the_request_context_does_not_end_the_operation(world):
    def pay():
        thread = threading.Thread(target=copy_current_request_context(lambda: None))
        thread.start()
        thread.join()
        pay_once(world)
        return {}, 201

    protect(world, pay)
    assert [world.post().status_code for _ in range(3)] == [201, 201, 201]
    assert world.count() == 1


def test_a_thread_that_outlives_its_cancelled_view_cannot_commit(world):
    started, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def work():
        started.set()
        go_on.wait(10)
        try:
            pay_once(world)
        finally:
            done.set()

    @idempotent
    async def pay():
        if current_operation.attempt == 1:
            await asyncio.to_thread(work)
        else:
            pay_once(world)
        return {}, 201

    async def pay_in_time():
        task = asyncio.create_task(pay())
        if not started.is_set():
            await asyncio.sleep(0)
            await asyncio.to_thread(started.wait, 10)
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            go_on.set()
            await asyncio.to_thread(done.wait, 10)
            return {}, 504

    world.app.add_url_rule("/payments", "pay", pay_in_time, methods=["POST"])
    assert [world.post().status_code for _ in range(2)] == [504, 201]
    assert world.count() == 1


@pytest.mark.parametrize("rollback", [False, True])
def test_what_a_second_session_commits_is_kept_with_the_answer(world, rollback):
    def pay():
        world.db.session.scalar(sa.select(sa.func.count(world.Payment.id)))
        with world.app.app_context():
            pay_once(world)
        if rollback:
            world.db.session.rollback()
        return {}, 201

    protect(world, pay)
    assert world.post().status_code == 201
    assert world.count() == 1


@pytest.mark.parametrize("undo", [False, True])
def test_a_cursor_with_a_factory_of_its_own_keeps_its_place_among_savepoints(world, undo):
    def pay():
        session = world.db.session
        if not undo:
            session.add(world.Payment(amount=1))
            session.flush()
            session.rollback()
        driver = session.connection().connection
        with driver.cursor(cursor_factory=psycopg2.extras.RealDictCursor) as cursor:
            cursor.execute("insert into payment (amount) values (7)")
        if undo:
            session.rollback()
        else:
            session.commit()
        return {}, 402 if undo else 201

    protect(world, pay)
    assert world.post().status_code == (402 if undo else 201)
    assert world.sql("select amount from payment") == ([] if undo else [(7,)])


def test_committing_the_operations_connection_after_a_named_cursor_commits_nothing(world):
    def pay():
        session = world.db.session
        list(session.execute(sa.select(world.Payment.id).execution_options(yield_per=5)))
        pay_once(world)
        session.execute(sa.text("select 1"))
        current_operation.connection.commit()
        return {}, 201

    protect(world, pay)
    assert world.post().status_code == 500
    assert world.count() == 0


@pytest.mark.parametrize("words", ["; COMMIT", "select 1; COMMIT", "executemany"])
def test_a_commit_in_disguise_commits_nothing(world, words):
    def pay():
        session = world.db.session
        session.add(world.Payment(amount=1))
        session.flush()
        if words == "executemany":
            session.connection().connection.cursor().executemany("COMMIT", [()])
        else:
            session.execute(sa.text(words))
        return {}, 201

    protect(world, pay)
    assert [world.post().status_code for _ in range(2)] == [500, 500]
    assert world.count() == 0


@pytest.mark.parametrize("note", ["*/ commit", "*//*" * 22])
def test_what_a_client_sends_is_not_taken_for_a_statement(world, note):
    def pay():
        started = time.monotonic()
        world.db.session.execute(
            sa.text("/* tag */ insert into payment (amount, note) values (1, :note)"), {"note": note}
        )
        world.db.session.commit()
        return {"quick": time.monotonic() - started < 0.3}, 201

    protect(world, pay)
    assert world.post().json == {"quick": True}


def test_an_engine_with_a_schema_translate_map_keeps_it(make_world):
    class TenantSession(Session):
        def get_bind(self, *args, **kwargs):
            bind = super().get_bind(*args, **kwargs)
            return bind.execution_options(schema_translate_map={None: "tenant"})

    world = make_world(db=SQLAlchemy(session_options={"class_": TenantSession}))
    world.sql("create schema tenant")
    world.sql("create table tenant.payment (like payment including all)")
    protect(world, lambda: pay_once(world) or ({}, 201))
    status = world.post().status_code
    assert world.count() == 0, "the default schema is another tenant's"
    assert world.count("tenant.payment") == (1 if status == 201 else 0)


def test_a_write_to_another_bind_is_noticed_also_behind_a_comment(make_world, postgres):
    world = make_world(SQLALCHEMY_BINDS={"logs": postgres.database("commented_bind")})
    with world.app.app_context():
        logs = world.db.engines["logs"]
        with logs.begin() as connection:
            connection.execute(sa.text("create table line (id serial)"))

    def pay():
        insert = sa.text("/* tag */ insert into line default values")
        world.db.session.execute(insert, bind_arguments={"bind": logs})
        world.db.session.commit()
        return {}, 201

    protect(world, pay)
    assert world.post().status_code == 500


@pytest.mark.parametrize("store", ["hybrid"])
@pytest.mark.parametrize("reply", [[5], {}, 7, ["x", "y"], [1, None], RuntimeError("client")])
def test_a_strange_redis_costs_speed_only(make_world, reply):
    class Strange(redis.Redis):
        def eval(self, *_arguments):
            if isinstance(reply, Exception):
                raise reply
            return reply

    world = make_world(init={"redis": Strange()})
    protect(world, lambda: pay_once(world) or ({}, 201))
    assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert world.count() == 1


def test_a_duplicate_that_waits_gets_the_replay_at_any_default_isolation(world):
    database = world.sql("select current_database()")[0][0]
    world.sql(f"alter database {database} set default_transaction_isolation = 'repeatable read'")
    with world.app.app_context():
        world.db.engine.dispose()
    inside, go_on, answers = threading.Event(), threading.Event(), []

    def pay():
        pay_once(world)
        inside.set()
        go_on.wait(10)
        return {}, 201

    protect(world, pay, wait=10)
    threads = [threading.Thread(target=lambda: answers.append(world.post())) for _ in range(2)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    world.wait_until_blocked()
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert [answer.status_code for answer in answers] == [201, 201]


def test_a_take_over_never_changes_the_fingerprint_of_a_live_record(world):
    records = world.app.extensions["idempotency"].records
    mine = Claim(b"k" * 32, "pay", Fingerprint(1, b"m" * 32), "1" * 22, 0.0)
    other = replace(mine, fingerprint=Fingerprint(1, b"o" * 32), owner="2" * 22, ttl_seconds=60.0)
    records.claim(mine).abandon()
    expired = records.look(mine.key)
    records.take_over(other, expired).abandon()
    hold = records.take_over(replace(mine, owner="3" * 22), expired)
    if hold is not None:
        hold.abandon()
    assert records.look(mine.key).fingerprint == other.fingerprint


def test_a_connection_class_keeps_its_cursors(make_world):
    class Logging(psycopg2.extras.LoggingConnection):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.lines = []
            self.initialize(self)

        def write(self, line):
            self.lines.append(line)

    world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"connect_args": {"connection_factory": Logging}})

    def pay():
        driver = current_operation.connection.connection.driver_connection
        before = len(driver.lines)
        world.db.session.execute(sa.text("select 1"))
        return {"lines": len(driver.lines) - before}

    protect(world, pay)
    assert world.post().json == {"lines": 1}, "what the view sent"


def test_a_connection_that_is_not_yet_pooled_may_be_rolled_back(world):
    """SQLAlchemy does so while it gets to know a server, again and again if the server goes away."""
    protect(world, lambda: pay_once(world) or ({}, 201))
    assert world.post().status_code == 201
    with world.app.app_context():
        raw = world.db.engine.raw_connection()
        stand_in = _AdhocProxiedConnection(raw.driver_connection, raw._connection_record)
        world.db.engine.dialect.do_rollback(stand_in)
        world.db.engine.dialect.do_commit(stand_in)
        raw.close()
