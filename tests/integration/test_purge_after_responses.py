"""Expired records go without a person: a few after some responses, at nobody's cost."""

import secrets
import time

import pytest
import sqlalchemy as sa

from flask_idempotency.web import purging
from tests.integration.commands.purging import FILL, outside

RECORDS = "idempotency_record"
FILLED = f"select count(*) from {RECORDS} where name = 'filled'"


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
    return lambda: respond(world).close() or world.sql(FILLED)[0][0]


def test_a_hundred_go_when_the_response_to_a_first_request_has_been_sent(world, left):
    world.post().close()
    world.sql(FILL.format(250))
    for response in world.post(), world.post(json={"amount": 6}), world.post(key=None):
        response.close()
    assert world.sql(FILLED) == [(250,)], "neither a replay nor a problem is followed by a purge"
    response = respond(world)
    assert world.sql(FILLED) == [(250,)]
    response.close()
    assert world.sql(FILLED) == [(150,)]
    assert [left() for _ in range(3)] == [50, 0, 0]


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


DATABASE = "alter database {} allow_connections "
TABLE = "alter table {} rename to {}"


@pytest.mark.parametrize(
    ("away", "back", "level"),
    [
        (DATABASE + "false", DATABASE + "true", "WARNING"),
        (TABLE.format(RECORDS, "gone"), TABLE.format("gone", RECORDS), "ERROR"),
    ],
    ids=["the database is away", "the table is not there"],
)
def test_what_goes_wrong_is_logged_and_nobodys_error(world, left, postgres, caplog, away, back, level):
    world.sql(FILL.format(1))
    response, name = respond(world), world.sql("select current_database()")[0][0]
    url = postgres.url if "database" in away else world.app.config["SQLALCHEMY_DATABASE_URI"]
    with sa.create_engine(url, isolation_level="AUTOCOMMIT").connect() as other:
        with world.app.app_context():
            world.db.engine.dispose()
        other.exec_driver_sql(away.format(name))
        response.close()
        other.exec_driver_sql(back.format(name))
    (said,) = caplog.records
    assert (said.name, said.levelname) == ("flask_idempotency", level)
    assert "expired records" in said.getMessage()
    assert left() == 0


@pytest.mark.parametrize(
    ("config", "left"),
    [
        ({"IDEMPOTENCY_PURGE": False}, 10),
        ({"SQLALCHEMY_ENGINE_OPTIONS": {"pool_size": 1, "max_overflow": 0}}, 0),
    ],
    ids=["the setting turns it off", "it needs one connection"],
)
def test_settings_and_pools(make_world, add_view, config, left):
    world = make_world(**config)
    add_view(world)
    world.sql(FILL.format(10))
    respond(world).close()
    assert world.sql(FILLED) == [(left,)]


def test_sqlite_too_unless_somebody_reads(make_world, add_view, tmp_path, caplog):
    url = f"sqlite:///{tmp_path}/shop.db"
    world = make_world(SQLALCHEMY_DATABASE_URI=url, IDEMPOTENCY_STORE="sql")
    add_view(world)
    count = "select count(*) from idempotency_record where expires_at <= created_at"
    respond(world)
    world.sql("update idempotency_record set expires_at = created_at")
    response = respond(world)
    with world.app.app_context(), world.db.engine.connect() as beside:
        beside.exec_driver_sql("begin")
        assert beside.exec_driver_sql(count).scalar() == 1
        began = time.monotonic()
        response.close()
        assert time.monotonic() - began < 2, "SQLite's driver would wait for five seconds"
    assert caplog.messages == []
    assert world.sql(count) == [(1,)]
    respond(world).close()
    assert world.sql(count) == [(0,)]
