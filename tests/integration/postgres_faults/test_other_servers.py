"""A database that takes no writes, a standby that is gone, and the wrong server after a failover."""

from contextlib import closing, contextmanager

import psycopg2
import pytest

from flask_idempotency import idempotent
from tests.drivers import connect
from tests.stores import BOTH
from tests.waiting import wait_until


@BOTH
def test_a_database_that_takes_no_writes_runs_nothing_until_it_does(
    world, add_view, assert_problem, assert_replayed
):
    name = world.sql("select current_database()")[0][0]
    runs = add_view(world)
    add_view(world, "/leased", endpoint="leased", atomic=False)
    before = world.post(key="before")
    leased = world.post("/leased", key="leased")

    def new_sessions():
        with world.app.app_context():
            world.db.engine.dispose()

    world.sql(f"alter database {name} set default_transaction_read_only = on")
    new_sessions()
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    assert world.post(key="before").status_code in (201, 503)  # with Redis it is only looked up
    assert runs == [1]
    world.sql(f"begin read write; alter database {name} reset all; commit")
    new_sessions()
    assert world.post().status_code == 201
    assert (runs, world.count()) == ([1, 1], 3)
    assert_replayed(before, world.post(key="before"))
    assert_replayed(leased, world.post("/leased", key="leased"))
    world.assert_clean()


@BOTH
@pytest.mark.usefixtures("probing_at_once")
def test_a_commit_that_waits_for_a_missing_standby_holds_its_key(
    make_world, own_postgres, own_database, add_view, background, assert_problem, assert_replayed
):
    world = make_world(SQLALCHEMY_DATABASE_URI=own_database)
    runs = add_view(world)
    world.post(key="opens-a-connection")

    def wait_for(standby):
        with closing(psycopg2.connect(own_postgres.dsn)) as connection:
            connection.autocommit = True
            cursor = connection.cursor()
            cursor.execute(f"alter system set synchronous_standby_names = '{standby}'")
            cursor.execute("select pg_reload_conf()")

    wait_for("gone")
    try:
        first = background(world.post)
        waiting = "select count(*) from pg_stat_activity where wait_event = 'SyncRep'"
        wait_until(lambda: world.sql(waiting) == [(1,)], "COMMIT waits")
        assert_problem(world.post(), 409, "request-in-progress", retry=True)
    finally:
        wait_for("")
    assert first.result().status_code == 201
    assert_replayed(first.result(), world.post())
    assert runs == [1, 1]


@contextmanager
def in_recovery(server):
    """Without a primary, but it takes no writes, like any standby; in the end it is promoted."""
    server.stop()
    (server.data / "standby.signal").touch()
    server.start()
    try:
        yield
    finally:
        connection = psycopg2.connect(server.dsn)
        with connection.cursor() as cursor:
            cursor.execute("select pg_promote()")
        connection.close()


def test_what_a_standby_has_is_not_replayed(make_world, own_postgres, own_database, assert_problem):
    world = make_world(SQLALCHEMY_DATABASE_URI=own_database)
    world.app.post("/payments")(idempotent(dict))
    assert world.post().status_code == 200
    with in_recovery(own_postgres):
        assert_problem(world.post(), 503, "store-unavailable", retry=True)


def test_a_pool_that_reached_a_standby_recovers_when_the_primary_is_there(
    make_world, postgres, own_postgres, own_database, add_view, retries, driver
):
    """After a failover a name may lead to a standby for a while; its connections live on."""
    primary = postgres.database("primary")
    addresses = [primary]
    creator = lambda: connect(addresses[-1], driver)  # noqa: E731
    make_world(SQLALCHEMY_DATABASE_URI=own_database)  # its tables are there
    world = make_world(SQLALCHEMY_DATABASE_URI=primary, SQLALCHEMY_ENGINE_OPTIONS={"creator": creator})
    runs = add_view(world)
    with in_recovery(own_postgres):
        with world.app.app_context():
            world.db.engine.dispose()
        addresses.append(own_database)
        refused = world.post()
        addresses.pop()
        retries(world, runs, refused, total=1)
