"""Nothing waits for the console's counts: no request, not the overview, not the end of a process."""

import os
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from flask_idempotency.console import rates as module
from flask_idempotency.console.rates import PATIENCE_SECONDS
from flask_idempotency.web.setup.state import app_state
from servers.proxy import FaultProxy
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
LOCKS = {
    "writes": "lock table idempotency_record_count in share mode",  # a row would be that of one minute
    "the table": "lock table idempotency_record_count in access exclusive mode",
}


@pytest.fixture
def config():
    options = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 1}
    return {"SQLALCHEMY_ENGINE_OPTIONS": options}


@pytest.fixture(params=LOCKS)
def locked(request, world, rates):
    """Somebody else holds the counts, when one enters."""

    @contextmanager
    def hold():
        engine = sa.create_engine(world.app.config["SQLALCHEMY_DATABASE_URI"])
        with engine.begin() as connection:
            connection.execute(sa.text(LOCKS[request.param]))
            yield
        engine.dispose()

    assert world.post().status_code == 201
    rates.tick()
    return hold


def test_no_request_waits_for_counts_that_somebody_has_locked(
    world, rates, locked, monkeypatch, caplog
):
    monkeypatch.setattr(module, "EVERY_SECONDS", 0.05)
    del rates.begin
    with locked():
        assert world.post(key="key-2").status_code == 201
        world_waits = "select 1 from pg_stat_activity where wait_event_type = 'Lock'"
        wait_until(lambda: world.sql(world_waits), "the thread waits for the lock")
        for number in range(20):
            assert world.post(key=f"key-{number + 3}").status_code == 201
        wait_until(lambda: "counts cannot be written" in caplog.text, "it has given up")
    wait_until(lambda: not rates.has_work() and rates._thread is None, "they are written")
    assert sum(count for (count,) in world.sql("select count from idempotency_record_count")) == 22


def test_the_overview_says_so_and_shows_the_rest(world, browser, rates, locked):
    assert world.post(key="key-2").status_code == 201
    with locked():
        began = time.monotonic()
        text = browser.get().text
        assert time.monotonic() - began < PATIENCE_SECONDS + 1
    assert "The counts cannot be read or written" in text
    assert "Records by operation and state" in text
    wait_until(rates._asked.done, "the question has ended")
    assert "The counts cannot be read" not in browser.get().text


def test_a_pool_that_is_in_use_is_no_matter_to_the_counts(world, rates):
    assert world.post().status_code == 201
    with world.app.app_context(), world.db.engine.connect():
        rates.tick()
    assert not rates.has_work()


def test_a_silent_database_delays_the_overview_for_a_moment(world, browser, rates, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.2)
    assert world.post().status_code == 201
    own = app_state(world.app).own_engine
    with FaultProxy(world.app.config["SQLALCHEMY_DATABASE_URI"]) as proxy:
        rates._counts._engine = sa.create_engine(proxy.url)
        proxy.hang()
        text = browser.get().text
        assert "The counts cannot be read or written: no reply within 0.2 s" in text
        asked = rates._asked
        browser.get()
        assert rates._asked is asked, "what hangs is not asked again"
        proxy.flow()
        wait_until(asked.done, "the question has ended")
        rates._counts._engine.dispose()
    rates._counts._engine = own


@contextmanager
def counting(url):
    """A process that counts in this database."""
    command = [sys.executable, str(Path(__file__).with_name("counting.py")), url]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_process_ends_soon_whatever_its_database_does(world):
    """Of three, one finds its database silent in the end, one finds it gone, and one finds it there."""
    url = world.app.config["SQLALCHEMY_DATABASE_URI"]
    with ExitStack() as stack:
        proxies = [stack.enter_context(FaultProxy(url)) for _ in range(3)]
        silent, gone, _ = proxies
        processes = [stack.enter_context(counting(proxy.url)) for proxy in proxies]
        for process in processes:
            assert process.stdout.readline() == "201\n"
        silent.hang()
        gone.refuse()
        gone.cut()
        began = time.monotonic()
        for process in processes:
            process.stdin.write("end\n")
            process.stdin.flush()
        for process in processes:
            assert process.wait(PATIENCE_SECONDS + 10) == 0
            assert time.monotonic() - began < PATIENCE_SECONDS + 5, "the last counts are given up"
        silent.flow()
    assert world.sql("select sum(count) from idempotency_record_count") == [(1,)]
