"""Postgres ends statements, connections or itself: what is told, what is there, what a retry sees."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import psycopg2
import pytest
import sqlalchemy as sa

import servers

PATIENCE_SECONDS = 10

ONE_STORE = pytest.mark.parametrize("store", ["hybrid"], indirect=True)
"""For what takes longer: with or without Redis, the same code meets the fault."""

_numbers = itertools.count(1)


def new_name() -> str:
    """Of a database. Never one a second time: Redis remembers what was done in the first."""
    return f"faulty_{next(_numbers)}"


@pytest.fixture(scope="module")
def own_postgres():
    """A server that a test may stop; it runs again at the beginning of the next."""
    with servers.Postgres(fsync=False) as server:
        yield server


@pytest.fixture
def own_database(own_postgres):
    own_postgres.start()
    return own_postgres.database(new_name())


@pytest.fixture
def proxied(make_world, postgres):
    """An application that reaches its database by way of a proxy."""
    with servers.FaultProxy(postgres.database(new_name())) as proxy:
        yield make_world(SQLALCHEMY_DATABASE_URI=proxy.url), proxy


@pytest.fixture
def expect(assert_replayed):
    """What is there after a fault, and what the retries see."""

    def wait_for_the_end_of_the_first(world):
        """A 409 is right as long as the server has not noticed that the first attempt is over."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (answer := world.post()).status_code == 409:
            assert time.monotonic() < deadline, "only 409"
        return answer

    def nothing_yet(world, *, records=1):
        assert world.count() == 0
        assert [record.state for record in world.records()] == ["in_progress"] * records
        world.assert_clean()

    def kept(world, first):
        again = world.post()
        assert_replayed(first, again)
        assert world.count() == 1
        assert [record.state for record in world.records()] == ["completed"]
        world.assert_clean()

    def retry_runs(world, runs, *, total=2):
        retry = wait_for_the_end_of_the_first(world)
        assert retry.status_code == 201, retry.text
        assert len(runs) == total
        kept(world, retry)

    def retry_replays(world, runs):
        retry = wait_for_the_end_of_the_first(world)
        assert retry.status_code == 201
        assert retry.headers["Idempotent-Replayed"] == "true"
        assert runs == [1]
        assert world.count() == 1
        world.assert_clean()

    return SimpleNamespace(
        nothing_yet=nothing_yet, kept=kept, retry_runs=retry_runs, retry_replays=retry_replays
    )


def first_time(fault: Callable[[], object]) -> Callable[[], None]:
    """The fault happens in the first attempt only."""
    left = [fault]

    def during() -> None:
        if left:
            left.pop()()

    return during


def settings(**values):
    """Engine options that set Postgres's settings for each connection."""
    options = " ".join(f"-c {name}={value}" for name, value in values.items())
    return {"SQLALCHEMY_ENGINE_OPTIONS": {"connect_args": {"options": options}}}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def busy(world, statement: str) -> bool:
    """Whether a backend works on a statement with this text in it."""
    return world.sql(
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and state = 'active' and position(:text in query) > 0 and pid <> pg_backend_pid()",
        text=statement,
    ) != [(0,)]


def test_a_statement_that_takes_too_long_is_the_views_error(make_world, add_view, expect):
    world = make_world(**settings(statement_timeout=100))
    sleep = sa.text("select pg_sleep(5)")
    runs = add_view(world, during=first_time(lambda: world.db.session.execute(sleep)))
    assert world.post().status_code == 500
    expect.nothing_yet(world)
    expect.retry_runs(world, runs)


def test_a_last_message_that_takes_too_long_is_rolled_back(
    make_world, add_view, assert_problem, expect
):
    """A COMMIT itself has no timeout in Postgres; what is sent together with it has."""
    world = make_world(**settings(statement_timeout=100))
    runs = add_view(world)
    world.sql(
        "create function dawdle() returns trigger language plpgsql as"
        " 'begin perform pg_sleep(5); return new; end'"
    )
    world.sql(
        "create trigger dawdle before update on idempotency_record"
        " for each row execute function dawdle()"
    )
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    expect.nothing_yet(world)
    world.sql("drop trigger dawdle on idempotency_record")
    expect.retry_runs(world, runs)


@pytest.mark.parametrize("swallows", [True, False], ids=["swallowed", "raised"])
def test_a_view_idle_for_too_long_cannot_commit_on_a_fresh_connection(
    make_world, add_view, assert_problem, expect, swallows
):
    world = make_world(**settings(idle_in_transaction_session_timeout=50))

    def idle():
        session = world.db.session
        pid = session.scalar(sa.text("select pg_backend_pid()"))
        gone = "select count(*) = 0 from pg_stat_activity where pid = :pid"
        wait_until(lambda: world.sql(gone, pid=pid)[0][0])
        if not swallows:
            session.execute(sa.text("select 1"))
        with pytest.raises(sa.exc.DBAPIError):
            session.execute(sa.text("select 1"))
        session.rollback()
        session.add(world.Payment(amount=666))
        with pytest.raises(sa.exc.PendingRollbackError):
            session.commit()
        session.rollback()

    runs = add_view(world, during=first_time(idle))
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    expect.nothing_yet(world)
    expect.retry_runs(world, runs)


def test_without_a_free_slot_on_the_server_nothing_runs(
    make_world, own_postgres, own_database, add_view, assert_problem, expect, store
):
    """max_connections does not bind the superuser that the tests are, so a user with a limit of one."""
    admin = sa.create_engine(own_database, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(
            f"create role clerk_{store} login connection limit 1 password 'secret';"
            f" grant create on schema public to clerk_{store}"
        )
    admin.dispose()
    url = sa.make_url(own_database).set(username=f"clerk_{store}", password="secret")
    address = url.render_as_string(hide_password=False)
    world = make_world(SQLALCHEMY_DATABASE_URI=address)
    runs = add_view(world)
    with world.app.app_context():
        world.db.engine.dispose()
    wait_until(lambda: f"clerk_{store}" not in clerks(own_postgres))  # the server hears of it later
    other = psycopg2.connect(servers.plain_dsn(address))
    for _ in range(2):
        assert_problem(world.post(), 503, "store-unavailable", retry=True)
    other.close()
    wait_until(lambda: f"clerk_{store}" not in clerks(own_postgres))
    assert runs == []
    expect.nothing_yet(world, records=0)
    expect.retry_runs(world, runs, total=1)


def clerks(server) -> set[str]:
    connection = psycopg2.connect(server.dsn)
    try:
        with connection.cursor() as cursor:
            cursor.execute("select usename from pg_stat_activity")
            return {name for (name,) in cursor.fetchall()}
    finally:
        connection.close()


def test_without_a_free_connection_in_the_pool_nothing_runs(
    make_world, add_view, assert_problem, expect
):
    pool = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 0.1}
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=pool)
    runs = add_view(world)
    with world.app.app_context(), world.db.engine.connect():
        assert_problem(world.post(), 503, "store-unavailable", retry=True)
    assert runs == []
    expect.nothing_yet(world, records=0)
    expect.retry_runs(world, runs, total=1)


def test_a_database_that_takes_no_writes_runs_nothing_and_still_replays(
    world, add_view, assert_problem, assert_replayed, expect
):
    name = world.sql("select current_database()")[0][0]
    runs = add_view(world)
    before = world.post(key="before")

    def new_sessions() -> None:
        with world.app.app_context():
            world.db.engine.dispose()

    world.sql(f"alter database {name} set default_transaction_read_only = on")
    new_sessions()
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    assert_replayed(before, world.post(key="before"))
    assert runs == [1]
    world.sql(f"begin read write; alter database {name} reset all; commit")
    new_sessions()
    world.assert_clean()
    assert world.post().status_code == 201
    assert (runs, world.count()) == ([1, 1], 2)
    world.assert_clean()


@contextmanager
def in_recovery(server) -> Iterator[None]:
    """Without a primary, but it takes no writes, like any standby; in the end it is promoted."""
    server.stop()
    (server._data / "standby.signal").touch()
    server.start()
    try:
        yield
    finally:
        connection = psycopg2.connect(server.dsn)
        with connection.cursor() as cursor:
            cursor.execute("select pg_promote()")
        connection.close()


@ONE_STORE
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


@ONE_STORE
def test_a_pool_that_reached_the_wrong_server_recovers_when_the_right_one_is_there(
    make_world, postgres, own_postgres, own_database, add_view, assert_problem, expect
):
    """After a failover a name may lead to a standby for a while; its connections live on."""
    primary = postgres.database(new_name())
    addresses = [primary]

    def connect() -> psycopg2.extensions.connection:
        return psycopg2.connect(servers.plain_dsn(addresses[-1]))

    make_world(SQLALCHEMY_DATABASE_URI=own_database)  # its tables are there
    world = make_world(SQLALCHEMY_DATABASE_URI=primary, SQLALCHEMY_ENGINE_OPTIONS={"creator": connect})
    runs = add_view(world)
    with in_recovery(own_postgres):
        with world.app.app_context():
            world.db.engine.dispose()
        addresses.append(own_database)
        assert_problem(world.post(), 503, "store-unavailable", retry=True)
        addresses.pop()
        expect.retry_runs(world, runs, total=1)


@ONE_STORE
def test_a_connection_reset_in_the_middle_of_a_statement(
    proxied, background, add_view, assert_problem, expect
):
    world, proxy = proxied
    sleep = sa.text("select pg_sleep(30) /* the view's */")
    runs = add_view(world, during=first_time(lambda: world.db.session.execute(sleep)))
    first = background(world.post)
    wait_until(lambda: busy(world, "/* the view's */"))
    proxy.cut()
    assert_problem(first.result(), 503, "store-unavailable", retry=True)
    assert world.count() == 0
    expect.retry_runs(world, runs)


@pytest.mark.parametrize("arrives", [True, False], ids=["COMMIT arrived", "COMMIT lost"])
def test_a_connection_reset_during_the_commit_is_an_unknown_outcome(
    proxied, background, add_view, assert_problem, expect, arrives
):
    world, proxy = proxied
    lose = proxy.lose_answer if arrives else proxy.hold
    runs = add_view(world, during=first_time(lambda: lose(b"COMMIT\x00")))
    first = background(world.post)
    if not arrives:
        proxy.wait_until_held()
        proxy.cut()
    problem = assert_problem(first.result(), 503, "store-unavailable", retry=True)
    assert "not known whether" in problem["detail"]
    if arrives:
        assert proxy.lost == 1
        expect.retry_replays(world, runs)
    else:
        expect.retry_runs(world, runs)


@ONE_STORE
def test_a_server_that_crashes_in_the_view(
    make_world, own_postgres, own_database, add_view, assert_problem, expect
):
    world = make_world(SQLALCHEMY_DATABASE_URI=own_database)
    runs = add_view(world, during=first_time(lambda: own_postgres.restart(crash=True)))
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    assert world.count() == 0
    world.assert_clean()
    expect.retry_runs(world, runs)  # the crash may lose the claim: then it is a first attempt again


@ONE_STORE
def test_a_server_that_crashes_while_the_commit_is_on_its_way(
    make_world, own_postgres, own_database, background, add_view, assert_problem, expect
):
    with servers.FaultProxy(own_database) as proxy:
        world = make_world(SQLALCHEMY_DATABASE_URI=proxy.url)
        runs = add_view(world, during=first_time(lambda: proxy.hold(b"COMMIT\x00")))
        first = background(world.post)
        proxy.wait_until_held()
        own_postgres.kill()
        proxy.let_go()
        assert_problem(first.result(), 503, "store-unavailable", retry=True)
        assert_problem(world.post(), 503, "store-unavailable", retry=True)
        own_postgres.start()
        assert world.count() == 0
        expect.retry_runs(world, runs)


def test_a_server_that_pauses_delays_the_answer_and_nothing_else(
    make_world, own_postgres, own_database, background, add_view, gate, expect, store
):
    world = make_world(SQLALCHEMY_DATABASE_URI=own_database)
    runs = add_view(world, during=gate)
    first = background(world.post)
    gate.wait_until_reached()
    own_postgres.pause()
    try:
        gate.open()
        if store == "hybrid":  # refused by Redis, which does not wait for Postgres
            assert world.post().status_code == 409
        later = background(world.post, key="later")
        assert not first.done()
    finally:
        own_postgres.resume()
    assert first.result().status_code == 201
    assert later.result().status_code == 201
    assert runs == [1, 1]
    assert world.count() == 2
    assert world.post().headers["Idempotent-Replayed"] == "true"
    world.assert_clean()


@ONE_STORE
def test_a_partition_that_tells_neither_side_ends_with_the_servers_timeout(
    make_world, postgres, background, add_view, gate, assert_problem, expect
):
    """The server hears nothing more of the first worker; another worker can reach it."""
    url = postgres.database(new_name())
    with servers.FaultProxy(url) as proxy:
        cut_off = make_world(
            SQLALCHEMY_DATABASE_URI=proxy.url, **settings(idle_in_transaction_session_timeout=500)
        )
        world = make_world(SQLALCHEMY_DATABASE_URI=url)
        runs, others = add_view(cut_off, during=gate), add_view(world)
        first = background(cut_off.post)
        gate.wait_until_reached()
        proxy.hang()
        assert world.post().status_code == 409
        expect.retry_runs(world, others, total=1)
        assert others == [2]
        gate.open()
        proxy.flow()
        assert_problem(first.result(), 503, "store-unavailable", retry=True)
        assert runs == [1]
        assert world.count() == 1
        cut_off.assert_clean()


@pytest.mark.parametrize("event", ["insert", "update"])
def test_a_full_disk_keeps_neither_record_nor_writes(world, add_view, assert_problem, expect, event):
    """A trigger stands for the disk: it fails with the code that Postgres gives (53100)."""
    runs = add_view(world)
    world.sql(
        "create function fail() returns trigger language plpgsql as $$"
        " begin raise sqlstate '53100' using message = 'no space left on device'; end $$"
    )
    world.sql(
        f"create trigger full_disk before {event} on idempotency_record"
        " for each row execute function fail()"
    )
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    entered = 0 if event == "insert" else 1
    assert len(runs) == entered
    expect.nothing_yet(world, records=entered)
    world.sql("drop trigger full_disk on idempotency_record")
    expect.retry_runs(world, runs, total=entered + 1)


@ONE_STORE
def test_a_database_restored_from_a_backup_knows_nothing_that_came_after(
    world, postgres, add_view, expect
):
    """Record and writes are lost together; a marker in Redis does not stand for them."""
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


@ONE_STORE
def test_sessions_that_wait_for_one_connection_all_get_their_answer(make_world, add_view, background):
    """One connection for three threads: nobody holds one while waiting for a second."""
    pool = {"pool_size": 1, "max_overflow": 0, "pool_timeout": PATIENCE_SECONDS}
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=pool)
    barrier = threading.Barrier(3)
    add_view(world)

    def ask(number: int) -> int:
        barrier.wait(PATIENCE_SECONDS)
        return world.post(key=f"key-{number}").status_code

    answers = [background(ask, number) for number in range(3)]
    assert [answer.result() for answer in answers] == [201] * 3
    world.assert_clean()
