"""The view's connection: every way to write and to read, and how it comes back to the pool."""

from __future__ import annotations

import io

import psycopg
import psycopg2.extras
import pytest
import sqlalchemy as sa
from psycopg.rows import dict_row
from sqlalchemy.pool.base import _AdhocProxiedConnection

from flask_idempotency import current_operation
from tests.drivers import PSYCOPG, PSYCOPG2, has_own_cursors
from tests.integration.views import pay_once, protect


class DictCursor(psycopg.Cursor):
    """psycopg's way to what psycopg2 has as a class."""

    def __init__(self, connection, **_how):
        super().__init__(connection, row_factory=dict_row)


DICT_CURSORS = {"psycopg2": psycopg2.extras.RealDictCursor, "psycopg": DictCursor}

OWN_CURSORS = {"psycopg2": psycopg2.extensions.cursor, "psycopg": psycopg.Cursor}

ONE_CONNECTION = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 2}


def copied(cursor):
    """The amounts of all payments, as COPY writes them."""
    if isinstance(cursor, psycopg.Cursor):
        with cursor.copy("copy payment (amount) to stdout") as copy:
            return b"".join(copy).decode()
    out = io.StringIO()
    cursor.copy_to(out, "payment", columns=("amount",))
    return out.getvalue()


def test_the_drivers_other_ways_to_read_see_what_was_rolled_back_no_more(world):
    seen = []

    def pay():
        session = world.db.session
        for how in ("copy", "named"):
            session.add(world.Payment(amount=1))
            session.flush()
            session.rollback()
            if how == "copy":
                with session.connection().connection.cursor() as cursor:
                    seen.append(copied(cursor))
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
        driver = session.execute(sa.text("select 1")).cursor.connection
        assert not driver.autocommit
        assert has_own_cursors(driver)
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


def test_a_server_that_commits_asynchronously_does_not_do_so_with_a_response(world):
    database = world.sql("select current_database()")[0][0]
    world.sql(f"alter database {database} set synchronous_commit = off")
    with world.app.app_context():
        world.db.engine.dispose()
    world.sql("create table commits (how text)")
    world.sql(
        """create function note() returns trigger language plpgsql as $$
        begin insert into commits select current_setting('synchronous_commit'); return null; end $$"""
    )
    world.sql(
        "create constraint trigger note after update on idempotency_record"
        " deferrable initially deferred for each row execute function note()"
    )
    protect(world, list)
    assert world.post().status_code == 200
    assert world.sql("select how from commits") == [("on",)]
    assert world.sql("show synchronous_commit") == [("off",)]


@pytest.mark.parametrize(
    ("options", "reads", "waits"),
    [({}, False, "off"), ({}, True, "off"), ({"atomic": False}, False, "on")],
    ids=["on a connection of its own", "in the session's transaction", "with a lease"],
)
def test_only_a_claim_that_is_all_there_is_waits_for_the_disk(world, options, reads, waits):
    """That of an atomic operation is lost only together with what the view commits after it."""
    world.sql("create table claims (how text)")
    world.sql(
        """create function note() returns trigger language plpgsql as $$
        begin insert into claims select current_setting('synchronous_commit'); return null; end $$"""
    )
    world.sql(
        "create trigger note after insert on idempotency_record for each row execute function note()"
    )

    @world.app.before_request
    def authenticate():
        if reads:
            world.db.session.execute(sa.text("select 1"))

    protect(world, list, **options)
    assert world.post().status_code == 200
    assert world.sql("select how from claims") == [(waits,)]


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


def add(world, amount=1, note=None):
    world.db.session.add(world.Payment(amount=amount, note=note))
    world.db.session.commit()


def test_a_cursor_factory_that_the_view_chooses_is_used(world, view, driver):
    def pay():
        raw = world.db.session.connection().connection.driver_connection
        raw.cursor_factory = DICT_CURSORS[driver]
        with raw.cursor() as cursor:
            cursor.execute("select 5 as amount")
            return {"amount": cursor.fetchone()["amount"]}

    view(pay)
    assert world.post().json == {"amount": 5}


def through_a_listener(world, kind):
    """A listener of the pool is given the driver's connection itself."""
    with world.app.app_context():
        engine = world.db.engine
    sa.event.listen(engine, "checkout", lambda raw, *_: setattr(raw, "cursor_factory", kind))


def through_a_cursor(world, kind):
    """So are psycopg's cursors, unlike psycopg2's."""
    world.db.session.execute(sa.text("select 1")).cursor.connection.cursor_factory = kind


@pytest.mark.parametrize("choose", [through_a_listener, through_a_cursor])
def test_a_cursor_factory_chosen_past_the_session_loses_no_rollback(world, view, driver, choose):
    kind = type("Cursor", (OWN_CURSORS[driver],), {})
    if choose is through_a_listener:
        choose(world, kind)

    def pay():
        add(world)
        if choose is through_a_cursor:
            choose(world, kind)
        world.db.session.rollback()
        world.db.session.add(world.Payment(amount=2))
        world.db.session.flush()
        world.db.session.rollback()
        add(world, 3)
        return {"chosen": isinstance(world.db.session.connection().connection.cursor(), kind)}, 201

    view(pay)
    assert world.post().json == {"chosen": True}
    assert world.sql("select amount from payment") == [(1,), (3,)]


@PSYCOPG
def test_a_cursor_made_past_the_session_is_in_its_unit(world):
    def pay():
        add(world)
        raw = world.db.session.execute(sa.text("select 1")).cursor.connection
        raw.cursor().execute("insert into payment (amount) values (2)")
        raw.execute("insert into payment (amount) values (3)")
        world.db.session.rollback()
        return {}, 201

    protect(world, pay)
    assert world.post().status_code == 201
    assert world.sql("select amount from payment") == [(1,)]


@PSYCOPG2
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
