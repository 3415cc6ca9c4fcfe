"""What went unnoticed when a safeguard of a connection was taken out: one test for each of them."""

from __future__ import annotations

import io
import threading
import time

import pytest
import sqlalchemy as sa

from flask_idempotency import current_operation
from tests.integration.views import protect

ONE_CONNECTION = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 2}


@pytest.mark.parametrize(
    "write",
    [
        lambda cursor: cursor.copy_expert("copy payment (amount) from stdin", io.StringIO("7\n")),
        lambda cursor: cursor.copy_from(io.StringIO("7\n"), "payment", columns=("amount",)),
        lambda cursor: cursor.callproc("pay", (7,)),
        lambda cursor: cursor.executemany("insert into payment (amount) values (%s)", [(7,)]),
    ],
    ids=["copy_expert", "copy_from", "callproc", "executemany"],
)
def test_the_drivers_other_ways_to_write_keep_their_place_among_savepoints(world, write):
    world.sql(
        "create function pay(amount integer) returns void language sql"
        " as 'insert into payment (amount) values (amount)'"
    )

    def pay():
        session = world.db.session
        session.add(world.Payment(amount=1))
        session.flush()
        session.rollback()
        with session.connection().connection.cursor() as cursor:
            write(cursor)
        session.commit()
        with session.connection().connection.cursor() as cursor:
            write(cursor)
        session.rollback()
        return {}, 201

    protect(world, pay)
    assert world.post().status_code == 201
    assert world.sql("select amount from payment") == [(7,)]


def test_the_drivers_other_ways_to_read_see_what_was_rolled_back_no_more(world):
    seen = []

    def pay():
        session, amounts = world.db.session, io.StringIO()
        for how in ("copy_to", "named"):
            session.add(world.Payment(amount=1))
            session.flush()
            session.rollback()
            if how == "copy_to":
                with session.connection().connection.cursor() as cursor:
                    cursor.copy_to(amounts, "payment", columns=("amount",))
                seen.append(amounts.getvalue())
            else:
                rows = sa.select(world.Payment.amount).execution_options(yield_per=5)
                seen.append(list(session.execute(rows)))
        return {}, 201

    protect(world, pay)
    assert world.post().status_code == 201
    assert seen == ["", []]


@pytest.mark.parametrize("status", [201, 500])
def test_a_connection_comes_back_as_it_went_and_its_savepoints_work(make_world, status):
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=ONE_CONNECTION)

    def pay():
        session = world.db.session
        session.add(world.Payment(amount=1))
        session.commit()
        list(session.execute(sa.select(world.Payment.id).execution_options(yield_per=5)))
        session.begin_nested()
        return {}, status

    protect(world, pay)
    assert world.post().status_code == status
    with world.app.app_context():
        session = world.db.session
        driver = session.connection().connection.driver_connection
        assert not driver.autocommit
        assert driver.cursor_factory is None
        session.add(world.Payment(amount=2))
        with session.begin_nested() as savepoint:
            session.add(world.Payment(amount=3))
            session.flush()
            savepoint.rollback()
        session.commit()
        session.add(world.Payment(amount=4))
        session.flush()
        session.rollback()
    assert world.sql("select amount from payment where amount > 1") == [(2,)]


def test_a_request_that_used_the_session_before_needs_no_second_connection(make_world):
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=ONE_CONNECTION)
    world.app.before_request(lambda: world.db.session.execute(sa.text("select 1")) and None)

    def pay():
        world.db.session.add(world.Payment(amount=1))
        world.db.session.commit()
        return {}, 201

    protect(world, pay)
    assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert world.count() == 1


def test_a_server_that_commits_asynchronously_does_not_do_so_with_an_answer(world):
    database = world.sql("select current_database()")[0][0]
    world.sql(f"alter database {database} set synchronous_commit = off")
    with world.app.app_context():
        world.db.engine.dispose()
    show = sa.text("show synchronous_commit")
    protect(world, lambda: [world.db.session.scalar(show)])
    assert world.post().json == ["on"]
    assert world.sql("show synchronous_commit") == [("off",)]


def test_a_setting_made_by_a_connect_listener_stays(world):
    with world.app.app_context():
        engine = world.db.engine
    engine.dispose()

    @sa.event.listens_for(engine, "connect")
    def set_name(driver, _record):
        driver.cursor().execute("set application_name = 'kept'")

    show = sa.text("show application_name")
    protect(world, lambda: [world.db.session.scalar(show)])
    assert world.post().json == ["kept"]


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


def test_savepoints_that_nothing_was_sent_in_may_be_rolled_back(world):
    def pay():
        connection = current_operation.connection
        outer, inner = connection.begin_nested(), connection.begin_nested()
        inner.rollback()
        connection.execute(sa.insert(world.Payment).values(amount=1))
        outer.commit()
        connection.begin_nested().rollback()
        return {}, 201

    protect(world, pay)
    assert world.post().status_code == 201
    assert world.count() == 1
