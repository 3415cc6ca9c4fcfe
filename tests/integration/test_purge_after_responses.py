"""Expired records go without a person: a few after some responses, at nobody's cost."""

from __future__ import annotations

import secrets
import time

import pytest
import sqlalchemy as sa
from flask import Flask, current_app
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency, idempotent
from flask_idempotency.web import purging
from tests.integration.commands.purging import FILL, outside
from tests.integration.test_workers import KINDS
from tests.waiting import wait_until

FILLED = "select count(*) from idempotency_record where name = 'filled'"


@pytest.fixture(autouse=True)
def _after_each_response(monkeypatch):
    monkeypatch.setattr(purging.Purge, "every", 1)


def respond(world):
    """The response to a first request, which its server has not closed yet."""
    response = world.post(key=secrets.token_hex())
    assert response.status_code == 201
    return response


@pytest.fixture
def left(world, add_view):
    """Send a first request to its end; how many expired records there still are."""
    add_view(world)

    def count():
        respond(world).close()
        return world.sql(FILLED)[0][0]

    return count


def test_a_hundred_go_when_the_response_has_been_sent(world, left):
    world.sql(FILL.format(250))
    response = respond(world)
    assert world.sql(FILLED) == [(250,)]
    response.close()
    assert world.sql(FILLED) == [(150,)]
    assert [left() for _ in range(3)] == [50, 0, 0]


def test_a_replay_or_a_problem_is_not_followed_by_one(world, left):
    world.post().close()
    world.sql(FILL.format(10))
    assert world.post().headers["Idempotent-Replayed"] == "true"
    for response in world.post(), world.post(json={"amount": 6}), world.post(key=None):
        response.close()
    assert world.sql(FILLED) == [(10,)]


def test_what_has_not_expired_is_interrupted_or_locked_stays(world, left):
    world.sql(FILL.format(150))
    world.sql("update idempotency_record set lease_expires_at = expires_at where expires_at = "
              "(select min(expires_at) from idempotency_record)")  # fmt: skip
    world.sql("update idempotency_record set expires_at = now() + interval '1 h' where expires_at = "
              "(select max(expires_at) from idempotency_record)")  # fmt: skip
    with outside(world) as other:
        expired = "select from idempotency_record where lease_expires_at is null"
        other.execute(f"{expired} order by expires_at limit 10 for update")
        assert [left() for _ in range(3)] == [50, 12, 12]
    assert left() == 2


def test_a_table_that_is_locked_is_not_waited_for(world, left, caplog):
    world.sql(FILL.format(150))
    response = respond(world)
    with outside(world) as migration:
        migration.execute("lock table idempotency_record")
        response.close()
    assert caplog.messages == []
    assert left() == 50, "a lock says nothing about how many may go at once"


def test_after_a_time_out_half_as_many_go_and_twice_as_many_after_a_success(world, left, caplog):
    world.sql("create table slow (); create function sleep() returns trigger language plpgsql as"
              " $$ begin if exists (select from slow) then perform pg_sleep(10); end if;"
              " return null; end $$; create trigger slow after delete on idempotency_record"
              " for each statement execute function sleep()")  # fmt: skip
    quick, slow = "delete from slow", "insert into slow default values"
    world.sql(FILL.format(1000))
    world.sql(slow)
    began = time.monotonic()
    assert left() == 1000
    assert time.monotonic() - began < 5, "it was cut off after 100 ms"
    assert caplog.messages == ["deleting expired records took too long; next time 50 go at once"]
    world.sql(quick)
    assert [left() for _ in range(3)] == [950, 850, 750]
    world.sql(slow)
    assert [left() for _ in range(8)] == [750] * 8
    world.sql(quick)
    assert [left() for _ in range(9)] == [749, 747, 743, 735, 719, 687, 623, 523, 423]


def test_what_goes_wrong_is_logged_and_nobodys_error(world, left, caplog):
    response = respond(world)
    world.sql("alter table idempotency_record rename to elsewhere")
    response.close()
    world.sql("alter table elsewhere rename to idempotency_record")
    (said,) = caplog.records
    assert (said.name, said.levelname) == ("flask_idempotency", "ERROR")
    assert "expired records could not be deleted" in caplog.text
    world.sql(FILL.format(1))
    assert left() == 0


def test_a_database_that_is_away_is_a_warning(world, left, postgres, caplog):
    response, name = respond(world), world.sql("select current_database()")[0][0]
    with world.app.app_context():
        world.db.engine.dispose()
    with sa.create_engine(postgres.url, isolation_level="AUTOCOMMIT").connect() as admin:
        admin.exec_driver_sql(f"alter database {name} allow_connections false")
        response.close()
        admin.exec_driver_sql(f"alter database {name} allow_connections true")
    (said,) = caplog.records
    assert said.levelname == "WARNING"
    assert "expired records are deleted later" in said.getMessage()


def test_a_listener_that_needs_a_context_reaches_no_response(world, left, caplog):
    """There is none any more: the purge ends, and says why."""
    world.sql(FILL.format(10))
    with world.app.app_context():
        sa.event.listen(world.db.engine, "checkout", lambda *_what: current_app.config["SECRET_KEY"])
    respond(world).close()
    with world.app.app_context():
        assert world.sql(FILLED)[0][0] == 10
    assert "Working outside of application context" in caplog.text


@pytest.mark.parametrize("options", [{"poolclass": sa.NullPool}, {"pool_size": 1, "max_overflow": 0}])
def test_a_purge_needs_one_connection(make_world, add_view, options):
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=options)
    add_view(world)
    world.sql(FILL.format(10))
    respond(world).close()
    assert world.sql(FILLED) == [(0,)]


def test_the_setting_turns_it_off(make_world, add_view):
    world = make_world(IDEMPOTENCY_PURGE=False)
    add_view(world)
    world.sql(FILL.format(10))
    respond(world).close()
    assert world.sql(FILLED) == [(10,)]


@pytest.mark.parametrize("kind", KINDS)
def test_under_each_kind_of_worker_the_response_comes_first(open_shop, clients, kind):
    """A purge tells the test that it has begun, and waits until the test has had the response."""
    arguments, environment = KINDS[kind]
    shop = open_shop("--workers", "1", *arguments, HOLDS_PURGE="yes", **environment)
    shop.sql(FILL.format(10) + " returning 1")
    assert shop.pay("key-1").status == 201
    assert shop.arrived.read_text() == "purge"
    assert shop.sql(FILLED) == [(10,)]
    shop.go_on.write_text("go on")
    wait_until(lambda: shop.sql(FILLED) == [(0,)], "they are deleted")
    wait_until(shop.nothing_is_left_open, "no transaction is open")


def test_sqlite_too_unless_somebody_writes_or_reads(tmp_path, caplog):
    app = Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = f"sqlite:///{tmp_path}/shop.db"
    app.config["IDEMPOTENCY_STORE"] = "sql"
    db = SQLAlchemy(app)
    Idempotency(app, db, scope=None)
    app.add_url_rule("/", "pay", idempotent(dict), methods=["POST"])
    with app.app_context():
        db.create_all()
        engine = db.engine

    def pay(key):
        return app.test_client().post("/", headers={"Idempotency-Key": key})

    count = "select count(*) from idempotency_record where expires_at <= created_at"
    pay("old")
    with engine.connect() as beside:
        beside.exec_driver_sql("update idempotency_record set expires_at = created_at")
        beside.commit()
        for begins in "begin immediate", "begin; select 1 from idempotency_record":
            response = pay(begins.replace(" ", "-").replace(";", ""))
            assert response.status_code == 200
            for statement in begins.split(";"):
                beside.exec_driver_sql(statement).close()
            began = time.monotonic()
            response.close()
            assert time.monotonic() - began < 2, "SQLite's driver would wait for five seconds"
            assert beside.exec_driver_sql(count).scalar() == 1
            beside.rollback()
        assert caplog.messages == []
        pay("new").close()
        assert beside.exec_driver_sql(count).scalar() == 0
    engine.dispose()
