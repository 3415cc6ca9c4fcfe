"""The throwaway servers leave nothing behind when the process that started them is killed."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_until

pytestmark = pytest.mark.of_tests

ROOT = Path(__file__).parents[2]
OWNER = """
import time, servers
pg, rd = servers.Postgres(fsync=False).start(), servers.Redis().start()
rd.pause()
print(pg.pid, rd.pid, pg.folder, rd.folder, flush=True)
time.sleep(60)
"""


def test_nothing_is_left_after_kill_9_of_the_owner():
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        *pids, pg_folder, rd_folder = owner.stdout.readline().split()
        owner.kill()
    folders = Path(pg_folder), Path(rd_folder)
    wait_until(lambda: not any(each.exists() for each in folders), "the folders are gone")
    running = {each.pid for each in psutil.process_iter() if each.status() != psutil.STATUS_ZOMBIE}
    assert running.isdisjoint(map(int, pids))
