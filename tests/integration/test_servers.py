"""The throwaway servers leave nothing behind, and given ones are not controlled.

That they die, pause and lose replies is shown by the tests that need it.
"""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg2
import pytest

import servers
from tests.waiting import wait_until

pytestmark = pytest.mark.of_tests

ROOT = Path(__file__).parents[2]


OWNER = """
import time, servers
pg, rd = servers.Postgres(fsync=False).start(), servers.Redis().start()
{fault}
print(pg.pid or 0, rd.pid, pg.folder, rd.folder, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("fault", ["", "pg.pause(); rd.pause()", "pg.kill()"])
def test_nothing_is_left_after_kill_9_of_the_owner(fault):
    command = [sys.executable, "-c", OWNER.format(fault=fault)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        *pids, pg_folder, rd_folder = owner.stdout.readline().split()
        owner.kill()
    folders = Path(pg_folder), Path(rd_folder)
    wait_until(lambda: not any(each.exists() for each in folders), "the folders are gone")
    for pid in map(int, pids):
        with suppress(psutil.NoSuchProcess):
            assert not pid or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_given_servers_are_used_but_not_controlled(monkeypatch):
    with servers.Postgres(fsync=False) as pg:
        monkeypatch.setenv("DATABASE_URL", pg.dsn)
        with servers.postgres() as given:
            assert (given.url, given.dsn) == (pg.url, pg.dsn)
            with pytest.raises(servers.NotControllable, match="environment"):
                given.kill()
            fresh = servers.plain_dsn(given.database("fresh"))
            psycopg2.connect(fresh).close()
        with pytest.raises(psycopg2.OperationalError, match="does not exist"):
            psycopg2.connect(fresh)
    monkeypatch.setenv("DATABASE_URL", "mysql://root:secret@127.0.0.1/shop")
    with pytest.raises(servers.Unavailable, match="PostgreSQL is needed") as caught:
        servers.postgres()
    assert "secret" not in str(caught.value)
