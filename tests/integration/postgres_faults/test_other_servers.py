"""A database that takes no writes, a standby, the wrong server after a failover, a backup."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg2
import sqlalchemy as sa

import servers
from tests.drivers import connect
from tests.integration.postgres_faults.faults import new_name
from tests.stores import BOTH
from tests.waiting import wait_until


@BOTH
def test_a_database_that_takes_no_writes_runs_nothing_until_it_does(
    world, add_view, assert_problem, assert_replayed, expect
):
    name = world.sql("select current_database()")[0][0]
    runs = add_view(world)
    add_view(world, "/leased", endpoint="leased", atomic=False)
    before = world.post(key="before")
    leased = world.post("/leased", key="leased")

    def new_sessions() -> None:
        with world.app.app_context():
            world.db.engine.dispose()

    world.sql(f"alter database {name} set default_transaction_read_only = on")
    new_sessions()
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    assert world.post(key="before").status_code in (201, 503)  # with Redis it is only looked up
    assert runs == [1]
    world.sql(f"begin read write; alter database {name} reset all; commit")
    new_sessions()
    world.assert_clean()
    assert world.post().status_code == 201
    assert (runs, world.count()) == ([1, 1], 3)
    assert_replayed(before, world.post(key="before"))
    assert_replayed(leased, world.post("/leased", key="leased"))
    world.assert_clean()


@contextmanager
def in_recovery(server) -> Iterator[None]:
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


def test_a_standby_runs_nothing_and_after_its_promotion_the_retry_runs(
    make_world, own_postgres, own_database, add_view, assert_problem, expect
):
    world = make_world(SQLALCHEMY_DATABASE_URI=own_database)
    runs = add_view(world)
    with in_recovery(own_postgres):
        for _ in range(2):
            assert_problem(world.post(), 503, "store-unavailable", retry=True)
        assert runs == []
        world.assert_clean()
    expect.nothing_yet(world, records=0)
    expect.retry_runs(world, runs, total=1)


def test_a_pool_that_reached_the_wrong_server_recovers_when_the_right_one_is_there(
    make_world, postgres, own_postgres, own_database, add_view, assert_problem, expect, driver
):
    """After a failover a name may lead to a standby for a while; its connections live on."""
    primary = postgres.database(new_name())
    addresses = [primary]
    creator = lambda: connect(addresses[-1], driver)  # noqa: E731

    make_world(SQLALCHEMY_DATABASE_URI=own_database)  # its tables are there
    world = make_world(SQLALCHEMY_DATABASE_URI=primary, SQLALCHEMY_ENGINE_OPTIONS={"creator": creator})
    runs = add_view(world)
    with in_recovery(own_postgres):
        with world.app.app_context():
            world.db.engine.dispose()
        addresses.append(own_database)
        assert_problem(world.post(), 503, "store-unavailable", retry=True)
        addresses.pop()
        expect.retry_runs(world, runs, total=1)


def test_a_database_restored_from_a_backup_knows_nothing_that_came_after(
    make_world, postgres, add_view, expect
):
    """Record and writes are lost together; a marker in Redis does not stand for them."""
    world = make_world(SQLALCHEMY_DATABASE_URI=postgres.database("backed_up"))
    runs = add_view(world)
    name = world.sql("select current_database()")[0][0]
    backup = f"{name}_backup"
    server = sa.create_engine(postgres.url, isolation_level="AUTOCOMMIT")

    def replace(database: str, by: str) -> None:
        with world.app.app_context():
            world.db.engine.dispose()
        with server.connect() as connection:
            connection.exec_driver_sql(f"drop database if exists {database}")
            connection.exec_driver_sql(f"create database {database} template {by}")

    replace(backup, by=name)
    assert world.post().status_code == 201
    replace(name, by=backup)
    with server.connect() as connection:
        connection.exec_driver_sql(f"drop database {backup}")
    server.dispose()
    expect.nothing_yet(world, records=0)
    expect.retry_runs(world, runs)


def test_a_synchronous_standby_that_is_gone_holds_the_key_of_a_dead_worker(
    make_world, probing_at_once, own_database, background, add_view, assert_problem, expect
):
    """The server waits for the standby while it commits, and looks at nothing else."""
    server = sa.create_engine(own_database, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)

    def wait_for(standby: str) -> None:
        with server.connect() as connection:
            connection.exec_driver_sql(f"alter system set synchronous_standby_names = '{standby}'")
            connection.exec_driver_sql("select pg_reload_conf()")
        wait_until(lambda: shown() == standby, "the setting has arrived")

    def shown() -> str:
        with server.connect() as connection:
            return connection.exec_driver_sql("show synchronous_standby_names").scalar_one()

    with servers.FaultProxy(own_database) as proxy:
        world = make_world(SQLALCHEMY_DATABASE_URI=proxy.url)
        runs = add_view(world)
        wait_for("gone")
        try:
            first = background(world.post)
            waiting = "select count(*) from pg_stat_activity where wait_event = 'SyncRep'"
            wait_until(lambda: world.sql(waiting) == [(1,)], "the COMMIT waits for the standby")
            assert_problem(world.post(), 409, "request-in-progress", retry=True)
            proxy.cut()
            assert_problem(first.result(), 503, "store-unavailable", retry=True)
            time.sleep(1.2)  # twice client_connection_check_interval, which would have noticed
            assert_problem(world.post(), 409, "request-in-progress", retry=True)
            assert world.sql(waiting) == [(1,)]
        finally:
            wait_for("")
        expect.retry_replays(world, runs)
