"""Whatever becomes of the database that observing asks, requests and their views notice nothing."""

import os
import sqlite3
import time
from contextlib import closing, suppress

import psycopg2
import pytest
import sqlalchemy as sa

from flask_idempotency import idempotent
from flask_idempotency.web.observe import PAUSE_SECONDS
from flask_idempotency.web.routes import app_state
from servers.proxy import FaultProxy
from tests.web.observed.heard import of, only

POSTGRES = pytest.mark.parametrize("store", ["postgres"], indirect=True)
SQLITE = pytest.mark.parametrize("store", ["sql"], indirect=True)

AT_MOST = 1.5
"""Seconds that a request may take beside a database that is away: most of it is for a busy machine."""


def add(world, view=lambda: ("", 201), **options):
    world.app.add_url_rule("/payments", "pay", idempotent(**options)(view), methods=["POST"])


def would(heard):
    return [event.would for event in of(heard)]


def failures(heard):
    return [event.error for name, event in heard if name == "store_failed"]


def timed(world, **kwargs):
    began = time.monotonic()
    assert world.post(**kwargs).status_code == 201
    return time.monotonic() - began


def end_pause(world):
    app_state(world.app).unobserved_until = 0.0


@POSTGRES
class TestBehindANetwork:
    @pytest.fixture
    def proxy(self, databases):
        url = databases.take(tables=True)
        with FaultProxy(url) as proxy:
            yield proxy
        databases.give_back(url)

    @pytest.fixture
    def world(self, make_world, proxy):
        proxy.accept()
        world = make_world(IDEMPOTENCY_ENFORCE=False, SQLALCHEMY_DATABASE_URI=proxy.url)
        add(world)
        return world

    @pytest.mark.parametrize("fault", ["refuse", "vanish"])
    def test_a_server_that_is_away_delays_one_request_for_a_moment(
        self, world, heard, proxy, caplog, fault
    ):
        getattr(proxy, fault)()
        assert timed(world, key="key-2") < AT_MOST
        assert would(heard) == ["unknown"]
        assert len(failures(heard)) == 1
        (line,) = [each for each in caplog.records if "observed for 10 s" in each.getMessage()]
        assert line.operation == "pay"
        assert line.id == only(heard).id is not None
        connections = proxy.connections
        world.post(key="key-3")
        assert would(heard) == ["unknown", "unknown"]
        assert (proxy.connections, len(failures(heard))) == (connections, 1)

    @pytest.mark.usefixtures("patient_observing")
    def test_a_connection_that_was_lost_is_replaced(self, world, heard, proxy):
        world.post()
        proxy.cut()
        world.post()
        assert would(heard) == ["executed", "replayed"]

    @pytest.mark.usefixtures("patient_observing")
    def test_it_is_asked_again_after_a_pause(self, world, heard, proxy):
        proxy.refuse()
        world.post()
        left = app_state(world.app).unobserved_until - time.monotonic()
        assert 0 < left <= PAUSE_SECONDS
        proxy.accept()
        world.post()
        end_pause(world)
        world.post()
        assert would(heard) == ["unknown", "unknown", "executed"]

    @pytest.mark.usefixtures("patient_observing")
    def test_a_server_that_goes_away_during_the_view_is_told_of_at_its_end(self, world, heard, proxy):
        def lose_it():
            proxy.refuse()
            proxy.cut()
            return "", 201

        world.app.view_functions["pay"] = idempotent(lose_it)
        assert world.post(key="key-2").status_code == 201
        assert only(heard).would == "executed"
        assert len(failures(heard)) == 1


@pytest.fixture
def world(make_world, store, tmp_path):
    file = {"SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path}/shop.db"} if store == "sql" else {}
    world = make_world(IDEMPOTENCY_ENFORCE=False, **file)
    add(world)
    return world


@pytest.mark.parametrize("store", ["postgres", "sql"], indirect=True)
@pytest.mark.usefixtures("patient_observing")
def test_a_table_that_is_missing_is_named_and_does_not_matter(
    make_world, heard, caplog, store, tmp_path
):
    file = {"SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path}/shop.db"} if store == "sql" else {}
    world = make_world(IDEMPOTENCY_ENFORCE=False, **file)
    add(world)
    with world.app.app_context(), world.db.engine.begin() as connection:
        connection.execute(sa.text("drop table idempotency_record"))
    assert world.post().status_code == 201
    assert only(heard).would == "unknown"
    assert "create-table" in caplog.text


SLOW = """
create or replace function sleep() returns trigger language plpgsql
  as 'begin perform pg_sleep(30); return new; end';
create trigger slow before insert on idempotency_record for each row execute function sleep();
"""


@POSTGRES
def test_a_slow_statement_delays_a_request_for_a_moment(world, heard):
    with world.app.app_context(), world.db.engine.begin() as connection:
        connection.execute(sa.text(SLOW))
    assert timed(world) < AT_MOST
    assert only(heard).would == "unknown"


@POSTGRES
@pytest.mark.usefixtures("patient_observing")
def test_a_new_connection_is_made_ready_as_the_applications_are(make_world, heard):
    world = make_world(IDEMPOTENCY_ENFORCE=False)
    add(world)

    def connected(driver, _record):
        with driver.cursor() as cursor:
            cursor.execute("set search_path to elsewhere")
        driver.commit()

    world.sql("create schema elsewhere")
    world.sql("alter table idempotency_record set schema elsewhere")
    with world.app.app_context():
        sa.event.listen(world.db.engine, "connect", connected)
    world.post()
    assert only(heard).would == "executed"
    with world.app.app_context():
        world.db.engine.dispose()
    assert world.sql("select count(*) from elsewhere.idempotency_record") == [(1,)]


@POSTGRES
@pytest.mark.usefixtures("patient_observing")
def test_a_listener_on_every_pool_is_told_of_a_new_connection_once(make_world, heard):
    world, told = make_world(IDEMPOTENCY_ENFORCE=False), []
    add(world)

    def connected(driver, _record):
        told.append(driver)

    sa.event.listen(sa.Pool, "connect", connected)
    try:
        world.post()
    finally:
        sa.event.remove(sa.Pool, "connect", connected)
    assert only(heard).would == "executed"
    assert len(told) == len(set(told)) == 1


@POSTGRES
@pytest.mark.usefixtures("patient_observing")
def test_a_forked_process_leaves_the_connections_to_its_parent(make_world, heard):
    world, made = make_world(IDEMPOTENCY_ENFORCE=False), []
    add(world)
    world.post()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            world.post()
            assert would(heard) == ["executed", "replayed"]
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    with world.app.app_context():
        sa.event.listen(world.db.engine, "connect", lambda *_: made.append(1))
    world.post()
    assert would(heard) == ["executed", "replayed"]
    assert made == [], "its connection still works"


@POSTGRES
@pytest.mark.usefixtures("patient_observing")
def test_nothing_is_taken_from_the_pool_of_the_application(make_world, heard):
    options = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 0.1}
    world = make_world(IDEMPOTENCY_ENFORCE=False, SQLALCHEMY_ENGINE_OPTIONS=options)
    add(world)
    with world.app.app_context(), world.db.engine.connect():
        world.post()
        world.post()
    assert would(heard) == ["executed", "replayed"]


@POSTGRES
@pytest.mark.usefixtures("patient_observing")
def test_a_database_can_be_dropped_once_its_engine_is_disposed(make_world, postgres, heard):
    """As a suite's teardown does. PostgreSQL refuses while anybody is connected."""
    url = postgres.database("dropped")
    world = make_world(IDEMPOTENCY_ENFORCE=False, SQLALCHEMY_DATABASE_URI=url)
    add(world)
    for _ in range(2):
        world.post()
        with world.app.app_context():
            world.db.engine.dispose()
    assert would(heard) == ["executed", "replayed"]
    with closing(psycopg2.connect(postgres.dsn)) as connection:
        connection.autocommit = True
        connection.cursor().execute(f"drop database {sa.make_url(url).database}")


@SQLITE
class TestSqlite:
    """One connection writes at a time: observing waits for nobody, and nobody for it."""

    def test_beside_a_long_writer_a_request_is_delayed_for_a_moment(self, world, heard, tmp_path):
        with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as other:
            other.execute("begin immediate")
            assert timed(world) < AT_MOST
        assert would(heard) == ["unknown"]

    def test_what_was_written_before_the_view_stays_in_its_transaction(self, world, heard):
        @world.app.before_request
        def write():
            world.db.session.add(world.Payment(amount=1))
            world.db.session.flush()

        def commit():
            world.db.session.commit()
            return "", 201

        world.app.view_functions["pay"] = idempotent(commit)
        assert world.post().status_code == 201
        assert (would(heard), failures(heard), world.count()) == (["unknown"], [], 1)
