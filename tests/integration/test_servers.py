"""The throwaway servers do what the fault tests rely on, and leave nothing behind."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg2
import psycopg2.extras
import pytest
import redis

import servers

pytestmark = pytest.mark.of_tests

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pg() -> Iterator[servers.Postgres]:
    with servers.Postgres(fsync=False, settings={"max_connections": 40}) as server:
        yield server


@pytest.fixture(scope="module")
def rd() -> Iterator[servers.Redis]:
    with servers.Redis() as server:
        yield server


def query(dsn: str, statement: str) -> list[tuple[Any, ...]]:
    connection = psycopg2.connect(dsn, connect_timeout=2)
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []
    finally:
        connection.close()


def client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, socket_timeout=0.5, socket_connect_timeout=0.5, retry=None)


def eventually(true: Callable[[], bool], seconds: float = 15) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_postgres_survives_kill_9_with_its_committed_rows(pg: servers.Postgres) -> None:
    dsn = servers.plain_dsn(pg.database("kept"))
    query(dsn, "CREATE TABLE kept (i int)")
    for count in (1, 2):
        query(dsn, "INSERT INTO kept VALUES (1)")
        before = pg.pid
        pg.kill()
        assert pg.pid is None
        with pytest.raises(psycopg2.OperationalError, match="refused"):
            query(dsn, "SELECT 1")
        pg.start()
        assert pg.pid != before
        assert query(dsn, "SELECT count(*) FROM kept") == [(count,)]


def test_postgres_restarts_cleanly_and_takes_settings(pg: servers.Postgres) -> None:
    pg.restart()
    assert query(pg.dsn, "SHOW max_connections") == [("40",)]
    assert query(pg.dsn, "SHOW fsync") == [("off",)]
    assert query(pg.dsn, "SHOW dynamic_shared_memory_type") == [("mmap",)]


def test_paused_postgres_is_silent_and_resumed_it_goes_on(pg: servers.Postgres) -> None:
    connection = psycopg2.connect(pg.dsn)
    pg.pause()
    with pytest.raises(psycopg2.OperationalError, match="timeout"):
        psycopg2.connect(pg.dsn, connect_timeout=2)
    pg.resume()
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    connection.close()


def test_paused_postgres_can_be_killed(pg: servers.Postgres) -> None:
    pg.pause()
    pg.restart(crash=True)
    assert query(pg.dsn, "SELECT 1") == [(1,)]


def test_a_database_is_fresh_each_time(pg: servers.Postgres) -> None:
    url = pg.database("fresh")
    assert url.startswith("postgresql+psycopg2://")
    assert url.endswith("/fresh")
    in_the_way = psycopg2.connect(servers.plain_dsn(url))
    query(servers.plain_dsn(url), "CREATE TABLE old ()")
    assert pg.database("fresh") == url
    in_the_way.close()
    assert query(servers.plain_dsn(url), "SELECT to_regclass('old')") == [(None,)]


def test_a_password_is_needed_and_not_shown(pg: servers.Postgres, rd: servers.Redis) -> None:
    for server in (pg, rd):
        assert server.password not in " ".join(psutil.Process(server.pid).cmdline())
    with pytest.raises(psycopg2.OperationalError, match="authentication failed"):
        query(pg.dsn.replace(pg.password, "guess"), "SELECT 1")
    with pytest.raises(redis.AuthenticationError):
        client(rd.url.replace(f":{rd.password}@", "")).get("key")


def test_no_server_runs_as_root(pg: servers.Postgres, rd: servers.Redis) -> None:
    for server in (pg, rd):
        process = psutil.Process(server.pid)
        assert 0 not in [*process.uids(), *process.gids()]
        if sys.platform == "linux":  # elsewhere nothing tells a process's other groups
            status = Path(f"/proc/{server.pid}/status").read_text()
            [groups] = [line for line in status.splitlines() if line.startswith("Groups:")]
            assert "0" not in groups.split()


def test_redis_pauses_and_forgets_when_killed(rd: servers.Redis) -> None:
    cache = client(rd.url)
    cache.set("key", "value")
    rd.pause()
    with pytest.raises(redis.TimeoutError):
        cache.get("key")
    rd.resume()
    assert cache.get("key") == b"value"
    rd.kill()
    with pytest.raises(redis.ConnectionError):
        cache.get("key")
    rd.start()
    assert cache.get("key") is None
    cache.close()


def test_persistent_redis_keeps_its_data() -> None:
    with servers.Redis(persistent=True) as server:
        cache = client(server.url)
        cache.set("key", "value")
        server.restart(crash=True)
        assert cache.get("key") == b"value"
        cache.close()


def is_there(segment: str) -> bool:
    """Whether this machine has a System V shared memory segment."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    address = libc.shmat(int(segment), None, 0o10000)  # SHM_RDONLY
    if address == ctypes.c_void_p(-1).value:
        return ctypes.get_errno() == errno.EACCES
    libc.shmdt(ctypes.c_void_p(address))
    return True


def segment_of(server: servers.Postgres) -> str:
    return (server.folder / "data/postmaster.pid").read_text().splitlines()[6].split()[1]


def test_nothing_is_left_after_close() -> None:
    server = servers.Postgres(fsync=False).start()
    pid, segment = server.pid, segment_of(server)
    assert pid is not None
    server.kill()
    assert is_there(segment)
    server.close()
    assert is_gone(pid)
    assert not server.folder.exists()
    assert not is_there(segment)


def as_account(server: servers.Postgres | servers.Redis, script: str) -> None:
    """Run a shell's script as a process of the server's account would."""
    server._account.run(["/bin/sh", "-c", script], Path("/"))


def test_links_that_the_account_plants_lead_root_nowhere(tmp_path: Path) -> None:
    """Not where it writes, reads, or gives a file away; and not to processes that it would end."""
    if os.geteuid() != 0:
        return  # the account is one's own, and may write what one may write
    victim = tmp_path / "of-root"
    victim.write_text("secret")
    victim.chmod(0o600)
    names = "server.log", "password", "pids", "redis.conf", "data/server.log", "data/redis.conf", "new"
    with servers.Postgres(fsync=False) as pg, servers.Redis() as rd:
        for server in (pg, rd):
            server.stop()
            for name in names:
                as_account(server, f"ln -sfn {victim} {server.folder}/{name}")
            assert not (server.folder / "new").is_symlink()
            server.start()
            server.restart(crash=True)
            assert "secret" not in server.log
            assert (server.folder / "server.log").stat().st_uid == 0
        assert query(pg.dsn, "SELECT 1") == [(1,)]
        assert client(rd.url).ping()
    assert victim.read_text() == "secret"
    assert victim.stat().st_uid == 0
    assert victim.stat().st_mode & 0o777 == 0o600


def segment_of_root() -> str:
    """A System V segment that the accounts of servers have no right to."""
    return str(ctypes.CDLL(None).shmget(0, 1, 0o1600))  # IPC_PRIVATE, IPC_CREAT


def test_a_segment_of_somebody_else_stays() -> None:
    if os.geteuid() != 0:
        return
    segment = segment_of_root()
    forgotten = [segment]
    forged = "1\\n" * 6 + f"1 {segment}\\n"  # as printf takes it
    try:
        server = servers.Postgres(fsync=False).start()
        forgotten.append(segment_of(server))
        server.kill()
        as_account(server, f"printf '{forged}' >{server.folder}/data/postmaster.pid")
        server.close()
        assert is_there(segment)
        code = OWNER.format(fault=FORGES.format(forged=forged))
        with subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as owner:
            assert owner.stdout is not None
            _, _, folder, _, own = owner.stdout.readline().split()
            owner.kill()
        forgotten.append(own)
        assert eventually(lambda: not Path(folder).exists())
        assert is_there(segment)
    finally:
        for each in forgotten:
            ctypes.CDLL(None).shmctl(int(each), 0, None)  # IPC_RMID


FORGES = """
file = pg.folder / "data/postmaster.pid"
segment = file.read_text().splitlines()[6].split()[1]
pg.kill()
file.write_text("{forged}")
"""

OWNER = """
import time, servers
pg, rd = servers.Postgres(fsync=False).start(), servers.Redis().start()
{fault}
print(pg.pid or 0, rd.pid, pg.folder, rd.folder, segment, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("fault", ["", "pg.pause(); rd.pause()", "pg.kill()"])
def test_nothing_is_left_after_kill_9_of_the_owner(fault: str) -> None:
    segment = 'segment = (pg.folder / "data/postmaster.pid").read_text().splitlines()[6].split()[1]'
    code = OWNER.format(fault=f"{segment}\n{fault}")
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as owner:
        assert owner.stdout is not None
        pg_pid, rd_pid, *folders, segment = owner.stdout.readline().split()
        owner.kill()
    for folder in folders:
        assert eventually(lambda folder=folder: not Path(folder).exists())
    assert is_gone(int(rd_pid))
    assert not int(pg_pid) or is_gone(int(pg_pid))
    assert not is_there(segment)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg2"])
def test_a_given_postgres_is_used_but_not_controlled(
    pg: servers.Postgres, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setenv("DATABASE_URL", pg.dsn.replace("postgresql", scheme, 1))
    with servers.postgres() as given:
        assert (given.url, given.dsn) == (pg.url, pg.dsn)
        for forbidden in (given.kill, given.pause, given.resume, given.restart):
            with pytest.raises(servers.NotControllable, match="environment"):
                forbidden()
        fresh = servers.plain_dsn(given.database("fresh"))
        assert query(fresh, "SELECT 1") == [(1,)]
    with pytest.raises(psycopg2.OperationalError, match="does not exist"):
        query(fresh, "SELECT 1")


def test_a_given_redis_is_used_but_not_controlled(
    rd: servers.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", rd.url)
    with servers.redis() as given:
        assert given.url == rd.url
        with pytest.raises(servers.NotControllable):
            given.kill()


def test_a_given_url_of_another_database_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "mysql://root:secret@127.0.0.1/shop")
    with pytest.raises(servers.Unavailable, match="PostgreSQL is needed") as caught:
        servers.postgres()
    assert "secret" not in str(caught.value)


def test_the_proxy_loses_a_reply_after_the_commit_is_done(pg: servers.Postgres) -> None:
    url = pg.database("ambiguous")
    query(servers.plain_dsn(url), "CREATE TABLE sale (i int)")
    with servers.FaultProxy(url) as proxy:
        connection = psycopg2.connect(servers.plain_dsn(proxy.url))
        connection.cursor().execute("INSERT INTO sale VALUES (7)")
        proxy.lose_answer(b"COMMIT")
        with pytest.raises(psycopg2.OperationalError):
            connection.commit()
        assert proxy.lost == 1
        connection.close()
        assert query(servers.plain_dsn(url), "SELECT i FROM sale") == [(7,)]
        assert query(servers.plain_dsn(proxy.url), "SELECT i FROM sale") == [(7,)]


def test_the_proxy_delays_hangs_cuts_and_refuses(rd: servers.Redis) -> None:
    with servers.FaultProxy(rd.url) as proxy:
        cache = client(proxy.url)
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
        cache.close()


@pytest.mark.parametrize("arrives", [True, False])
def test_the_proxy_holds_a_commit_whose_sender_dies_meanwhile(
    pg: servers.Postgres, arrives: bool
) -> None:
    url = pg.database("held")
    query(servers.plain_dsn(url), "CREATE TABLE sale (i int)")
    with servers.FaultProxy(url) as proxy:
        connection = psycopg2.connect(servers.plain_dsn(proxy.url), async_=True)
        psycopg2.extras.wait_select(connection)
        cursor = connection.cursor()
        cursor.execute("BEGIN; INSERT INTO sale VALUES (7)")
        psycopg2.extras.wait_select(connection)
        proxy.hold(b"COMMIT")
        cursor.execute("COMMIT")
        proxy.wait_until_held()
        connection.close()
        assert query(servers.plain_dsn(proxy.url), "SELECT i FROM sale") == []
        open_ones = (  # not an autovacuum worker, nor who has asked this a moment ago and is leaving
            "SELECT count(*) FROM pg_stat_activity WHERE datname = 'held'"
            " AND backend_type = 'client backend' AND query NOT LIKE '%pg_stat_activity%'"
        )
        assert query(servers.plain_dsn(url), open_ones) == [(1,)]
        proxy.let_go() if arrives else proxy.cut()
        assert eventually(lambda: query(servers.plain_dsn(url), open_ones) == [(0,)])
        assert query(servers.plain_dsn(url), "SELECT i FROM sale") == ([(7,)] if arrives else [])


def test_the_proxy_ends_in_silence_while_connections_are_open(
    pg: servers.Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    with servers.FaultProxy(pg.url) as proxy:
        connections = [psycopg2.connect(servers.plain_dsn(proxy.url)) for _ in range(3)]
    for connection in connections:
        with pytest.raises(psycopg2.OperationalError), connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        connection.close()
    assert caplog.records == []


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
