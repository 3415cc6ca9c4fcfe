"""The throwaway servers do what the fault tests rely on, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import psycopg2
import psycopg2.extras
import pytest
import redis

import servers
from tests.waiting import wait_until

pytestmark = pytest.mark.of_tests

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pg():
    with servers.Postgres(fsync=False, settings={"max_connections": 40}) as server:
        yield server


@pytest.fixture(scope="module")
def rd():
    with servers.Redis() as server:
        yield server


@pytest.fixture
def sales(pg):
    """The URL of a database with an empty table."""
    url = pg.database("sales")
    query(url, "CREATE TABLE sale (i int)")
    return url


def query(url, statement):
    connection = psycopg2.connect(servers.plain_dsn(url), connect_timeout=2)
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []
    finally:
        connection.close()


def client(url):
    return redis.Redis.from_url(url, socket_timeout=0.5, socket_connect_timeout=0.5, retry=None)


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_postgres_is_killed_paused_and_restarted_with_its_committed_rows(pg, sales):
    query(sales, "INSERT INTO sale VALUES (1)")
    before = pg.pid
    pg.kill()
    with pytest.raises(psycopg2.OperationalError, match="refused"):
        query(sales, "SELECT 1")
    pg.start()
    assert pg.pid != before
    pg.pause()
    with pytest.raises(psycopg2.OperationalError, match="timeout"):
        query(sales, "SELECT 1")
    pg.resume()
    assert query(sales, "SELECT count(*) FROM sale") == [(1,)]
    pg.pause()
    pg.restart(crash=True)
    assert query(sales, "SHOW max_connections") == [("40",)]
    assert query(sales, "SHOW fsync") == [("off",)]


def test_a_database_is_fresh_each_time(pg, sales):
    in_the_way = psycopg2.connect(servers.plain_dsn(sales))
    assert pg.database("sales") == sales
    in_the_way.close()
    assert query(sales, "SELECT to_regclass('sale')") == [(None,)]


def test_a_password_is_needed_and_not_shown_and_no_server_runs_as_root(pg, rd):
    for server in (pg, rd):
        process = psutil.Process(server.pid)
        assert server.password not in " ".join(process.cmdline())
        assert 0 not in [*process.uids(), *process.gids()]
    with pytest.raises(psycopg2.OperationalError, match="authentication failed"):
        query(pg.dsn.replace(pg.password, "guess"), "SELECT 1")
    with pytest.raises(redis.AuthenticationError):
        client(rd.url.replace(f":{rd.password}@", "")).get("key")


@pytest.mark.parametrize("persistent", [False, True])
def test_redis_pauses_and_forgets_when_killed_unless_it_is_persistent(persistent):
    with servers.Redis(persistent=persistent) as server, client(server.url) as cache:
        cache.set("key", "value")
        server.pause()
        with pytest.raises(redis.TimeoutError):
            cache.get("key")
        server.resume()
        assert cache.get("key") == b"value"
        server.kill()
        with pytest.raises(redis.ConnectionError):
            cache.get("key")
        server.start()
        assert cache.get("key") == (b"value" if persistent else None)


OWNER = """
import time, servers
pg, rd = servers.Postgres(fsync=False).start(), servers.Redis().start()
{fault}
print(pg.pid or 0, rd.pid, pg.folder, rd.folder, flush=True)
{end}
"""


@pytest.mark.parametrize(
    ("fault", "end"),
    [
        ("pg.kill()", "pg.close(); rd.close()"),
        ("", "time.sleep(60)"),
        ("pg.pause(); rd.pause()", "time.sleep(60)"),
        ("pg.kill()", "time.sleep(60)"),
    ],
)
def test_nothing_is_left_after_close_or_kill_9_of_the_owner(fault, end):
    code = OWNER.format(fault=fault, end=end)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as owner:
        pg_pid, rd_pid, *folders = owner.stdout.readline().split()
        if "sleep" in end:
            owner.kill()
    wait_until(lambda: not any(Path(each).exists() for each in folders), "the folders are gone")
    assert is_gone(int(rd_pid))
    assert not int(pg_pid) or is_gone(int(pg_pid))


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg2"])
def test_given_servers_are_used_but_not_controlled(pg, rd, monkeypatch, scheme):
    monkeypatch.setenv("DATABASE_URL", pg.dsn.replace("postgresql", scheme, 1))
    monkeypatch.setenv("REDIS_URL", rd.url)
    with servers.postgres() as given, servers.redis() as given_redis:
        assert (given.url, given.dsn, given_redis.url) == (pg.url, pg.dsn, rd.url)
        for forbidden in (given.kill, given.pause, given.resume, given.restart, given_redis.kill):
            with pytest.raises(servers.NotControllable, match="environment"):
                forbidden()
        fresh = given.database("fresh")
        assert query(fresh, "SELECT 1") == [(1,)]
    with pytest.raises(psycopg2.OperationalError, match="does not exist"):
        query(fresh, "SELECT 1")


def test_a_given_url_of_another_database_is_refused(monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "mysql://root:secret@127.0.0.1/shop")
    with pytest.raises(servers.Unavailable, match="PostgreSQL is needed") as caught:
        servers.postgres()
    assert "secret" not in str(caught.value)


def test_the_proxy_loses_a_reply_after_the_commit_is_done(sales, caplog):
    with servers.FaultProxy(sales) as proxy:
        connection = psycopg2.connect(servers.plain_dsn(proxy.url))
        connection.cursor().execute("INSERT INTO sale VALUES (7)")
        proxy.lose_answer(b"COMMIT")
        with pytest.raises(psycopg2.OperationalError):
            connection.commit()
        assert proxy.lost == 1
        assert query(sales, "SELECT i FROM sale") == [(7,)]
        assert query(proxy.url, "SELECT i FROM sale") == [(7,)]
        still_open = psycopg2.connect(servers.plain_dsn(proxy.url))
    with pytest.raises(psycopg2.OperationalError):
        still_open.cursor().execute("SELECT 1")
    assert caplog.records == []


def test_the_proxy_delays_hangs_cuts_and_refuses(rd):
    with servers.FaultProxy(rd.url) as proxy, client(proxy.url) as cache:
        cache.set("key", "value")
        proxy.delay = 0.05
        start = time.monotonic()
        assert cache.get("key") == b"value"
        assert time.monotonic() - start >= 0.1
        proxy.delay = 0.0
        proxy.hang()
        with pytest.raises(redis.TimeoutError):
            cache.get("key")
        proxy.flow()
        assert cache.get("key") == b"value"
        proxy.refuse()
        assert cache.get("key") == b"value"
        proxy.cut()
        with pytest.raises(redis.ConnectionError):
            cache.get("key")
        proxy.accept()
        assert cache.get("key") == b"value"


@pytest.mark.parametrize("arrives", [True, False])
def test_the_proxy_holds_a_commit_whose_sender_dies_meanwhile(sales, arrives):
    with servers.FaultProxy(sales) as proxy:
        connection = psycopg2.connect(servers.plain_dsn(proxy.url), async_=True)
        psycopg2.extras.wait_select(connection)
        cursor = connection.cursor()
        cursor.execute("BEGIN; INSERT INTO sale VALUES (7)")
        psycopg2.extras.wait_select(connection)
        proxy.hold(b"COMMIT")
        cursor.execute("COMMIT")
        proxy.wait_until_held()
        connection.close()
        still_open = (
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = 'sales' AND state = 'idle in transaction'"
        )
        assert query(sales, still_open) == [(1,)]
        proxy.let_go() if arrives else proxy.cut()
        wait_until(lambda: query(sales, still_open) == [(0,)], "the transaction has ended")
        assert query(sales, "SELECT i FROM sale") == ([(7,)] if arrives else [])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_that_outlives_a_server_does_not_hold_its_end_up():
    reading, writing = os.pipe()
    with servers.redis():
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)  # until the parent lets go
            os._exit(0)
    os.close(writing)
    os.close(reading)
    os.waitpid(child, 0)
