"""Whatever becomes of the database that observing asks, requests and their views notice nothing."""

import sqlite3
import time
from contextlib import closing

import pytest
import sqlalchemy as sa
from flask import current_app, g, request

from flask_idempotency import idempotent
from servers.proxy import FaultProxy
from tests.web.conftest import add

POSTGRES = pytest.mark.parametrize("store", ["postgres"], indirect=True)
SQLITE = pytest.mark.parametrize("store", ["sql"], indirect=True)
PATIENT = pytest.mark.usefixtures("patient_observing")

AT_MOST = 1.5
"""Seconds that a request may take beside a database that is away: most of it is for a busy machine."""


@pytest.fixture
def world(world, store):  # an older pytest does not see that the world behind this needs the store
    assert store
    add(world)
    return world


@pytest.fixture
def make(make_world):
    """Makes an observed application on a database, with its view."""

    def make(**config):
        world = make_world(IDEMPOTENCY_ENFORCE=False, **config)
        add(world)
        return world

    return make


@pytest.fixture
def failures(heard):
    return lambda: [event.error for name, event in heard if name == "store_failed"]


def timed(world, **kwargs):
    began = time.monotonic()
    assert world.post(**kwargs).status_code == 201
    return time.monotonic() - began


@POSTGRES
class TestBehindANetwork:
    @pytest.fixture
    def proxy(self, databases):
        url = databases.take(tables=True)
        with FaultProxy(url) as proxy:
            yield proxy
        databases.give_back(url)

    @pytest.fixture
    def world(self, make, proxy):
        return make(SQLALCHEMY_DATABASE_URI=proxy.url)

    @pytest.mark.parametrize("fault", ["refuse", "vanish"])
    def test_a_server_that_is_away_delays_one_request_for_a_moment(
        self, world, would, observed, failures, proxy, caplog, fault
    ):
        getattr(proxy, fault)()
        assert timed(world, key="key-2") < AT_MOST
        (line,) = [each for each in caplog.records if "observed for 10 s" in each.getMessage()]
        assert (line.operation, line.id) == ("pay", observed()[0].id)
        assert line.id is not None
        connections = proxy.connections
        world.post(key="key-3")
        assert would() == ["unknown", "unknown"]
        assert (proxy.connections, len(failures())) == (connections, 1)

    @PATIENT
    def test_what_was_lost_is_replaced_and_asked_again_after_a_pause(
        self, world, would, failures, proxy, monkeypatch
    ):
        def lose_it():
            proxy.refuse()
            proxy.cut()
            return "", 201

        world.post()
        proxy.cut()
        world.app.view_functions["pay"] = idempotent(lose_it)
        assert world.post(key="key-2").status_code == 201
        assert (would(), len(failures())) == (["executed", "executed"], 1), "told at its end"
        proxy.accept()
        world.app.view_functions["pay"] = idempotent(lambda: ("", 201))
        now = time.monotonic()
        for later in (5, 11):
            monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
            world.post()
        assert would()[2:] == ["unknown", "replayed"]

    def test_who_began_before_it_was_lost_does_not_ask_for_it_at_the_end(
        self, world, would, failures, proxy
    ):
        def meanwhile():
            if request.headers["Idempotency-Key"] == "key-1":
                proxy.refuse()
                proxy.cut()
                world.post(key="key-2")
            return "", 201

        world.app.view_functions["pay"] = idempotent(meanwhile)
        assert world.post(key="key-1").status_code == 201
        assert (would(), len(failures())) == (["unknown", "executed"], 1)


@PATIENT
@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("store", ["postgres", "sql"], indirect=True)
def test_a_table_that_is_missing_is_named_and_does_not_matter(world, would, caplog):
    world.sql("drop table idempotency_record")
    assert world.post().status_code == 201
    assert (would(), "create-table" in caplog.text) == (["unknown"], True)


@POSTGRES
def test_a_slow_statement_delays_a_request_for_a_moment(world, would):
    world.sql(
        "create function sleep() returns trigger language plpgsql"
        " as 'begin perform pg_sleep(30); return new; end';"
        " create trigger slow before insert on idempotency_record"
        " for each row execute function sleep()"
    )
    assert timed(world) < AT_MOST
    assert would() == ["unknown"]


@SQLITE
def test_beside_a_long_writer_of_sqlite_a_request_is_delayed_for_a_moment(world, would, tmp_path):
    with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as other:
        other.execute("begin immediate")
        assert timed(world) < AT_MOST
    assert would() == ["unknown"]


@SQLITE
def test_what_was_written_before_the_view_stays_in_its_transaction(world, would, failures):
    @world.app.before_request
    def write():
        world.db.session.add(world.Payment(amount=1))
        world.db.session.flush()

    world.app.view_functions["pay"] = idempotent(lambda: (world.db.session.commit(), ("", 201))[1])
    assert world.post().status_code == 201
    assert (would(), failures(), world.count()) == (["unknown"], [], 1)


def at_connection(driver, _record):
    assert current_app.config["SECRET_KEY"]  # as a listener that fetches a password
    with driver.cursor() as cursor:
        cursor.execute("set search_path to elsewhere")
    driver.commit()


def at_check_out(driver, _record, _proxy):
    """As for row-level security."""
    with driver.cursor() as cursor:
        cursor.execute("select set_config('app.tenant', %s, false)", [g.account_id])
    driver.commit()


@POSTGRES
@PATIENT
@pytest.mark.parametrize("options", [{"pool_size": 1, "max_overflow": 0}, {"pool_recycle": 0}], ids=str)
def test_connections_are_made_ready_as_the_applications_are(make, would, options):
    """By listeners that need the application and its request; on each check-out a new one, or not."""
    world = make(SECRET_KEY="secret", SQLALCHEMY_ENGINE_OPTIONS=options)
    world.sql("create schema elsewhere; alter table idempotency_record set schema elsewhere")
    with world.app.app_context():
        engine = world.db.engine
        engine.dispose()
    sa.event.listen(engine, "connect", at_connection)
    sa.event.listen(engine, "checkout", at_check_out)
    world.post(), world.post()
    assert would() == ["executed", "replayed"]
    sa.event.remove(engine, "checkout", at_check_out)
    assert world.sql("select count(*) from elsewhere.idempotency_record") == [(1,)]


@POSTGRES
@PATIENT
def test_nothing_is_taken_from_the_pool_of_the_application(make, would):
    world = make(SQLALCHEMY_ENGINE_OPTIONS={"pool_size": 1, "max_overflow": 0, "pool_timeout": 0.1})
    with world.app.app_context(), world.db.engine.connect():
        world.post(), world.post()
    assert would() == ["executed", "replayed"]
