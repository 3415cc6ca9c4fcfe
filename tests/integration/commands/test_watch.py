"""``flask idempotency watch``: in a terminal, in a pipe, and while servers are away."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

import servers
from flask_idempotency.cli.watch import text_of
from flask_idempotency.operate import watch
from flask_idempotency.stores.admin import CAPPED, Overview, Tally
from tests.integration.commands.running import PROGRAM, ROOT, build, once
from tests.integration.commands.test_overview import fill

NOWHERE = "postgresql+psycopg2://nobody@127.0.0.1:1/nothing?connect_timeout=2"


def test_one_look_shows_what_there_is(world, run):
    assert "no records\n" in run("watch", "--once").output
    fill(world, 1, 3)
    fill(world, 4, 5, state="'in_progress'", lease="clock_timestamp() - interval '3 h'")
    fill(world, 6, 6, state="'in_progress'", lease="clock_timestamp() + interval '3 h'")
    fill(world, 7, 7, expires="now() - interval '3 days'")
    world.sql("update idempotency_record set created_at = now() - interval '3 h'")
    shown = run("watch", "--once").output
    assert re.search(r"pay +completed +4\n", shown)
    for line in (
        "7 records",
        "each second   - begun, - deleted",
        "leases        1 running",
        "interrupted   2, the oldest for 3 h",
        "to purge      1, the oldest for 3 d",
        "Redis         works",
    ):
        assert f"{line}\n" in shown
    (line,) = run("watch", "--once", "--json").output.splitlines()
    found = json.loads(line)
    assert {"operation": "pay", "state": "interrupted", "count": 2} in found["tallies"]
    assert (found["running"], found["expired"], found["error"]) == (1, 1, None)
    assert 3 * 3600 <= found["interrupted_seconds"] < 3 * 3600 + 60


def test_an_estimate_and_a_limit_are_told_as_such():
    overview = Overview([Tally("pay", "completed", 1_000_000)], True, 0, CAPPED, 5.0, 0, None)
    look = watch.Look(watch.datetime.now(), 0.0, overview, None, "works", 12.5, 0.0)
    text = text_of(look, "idempotency_record")
    assert "about 1,000,000 records" in text
    assert "interrupted   10,000 or more, the oldest for 5 s" in text
    assert "each second   12.5 begun, 0.0 deleted" in text


@pytest.mark.parametrize(
    ("before", "after", "rate"), [(10, 25, 7.5), (10, 5, None), (None, 5, None), (5, None, None)]
)
def test_a_rate_needs_two_counts_that_go_up(before, after, rate):
    assert watch.per_second(before, after, 2.0) == rate


def test_a_database_that_is_away_is_told_and_so_is_a_dead_redis():
    app = build(NOWHERE, IDEMPOTENCY_REDIS_URL="redis://127.0.0.1:1/0")
    result = once(app, "watch", "--once")
    assert result.exit_code == 1
    assert "the records cannot be reached: " in result.output
    assert re.search(r"Redis +ConnectionError", result.output)
    assert "Traceback" not in result.output


@contextmanager
def process(uri: Any, *options: str, **kwargs: Any) -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, "-uc", PROGRAM, str(uri), "watch", "--every", "0.5", *options]
    running = subprocess.Popen(arguments, cwd=ROOT, text=True, **kwargs)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


@pytest.mark.parametrize("store", ["postgres"])
def test_it_goes_on_while_the_database_is_away(world):
    uri = sa.make_url(world.app.config["SQLALCHEMY_DATABASE_URI"])
    with (
        servers.FaultProxy(uri.render_as_string(hide_password=False)) as proxy,
        process(proxy.url, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running,
    ):

        def until(is_away: bool) -> None:
            while (json.loads(running.stdout.readline())["error"] is not None) is not is_away:
                pass

        until(is_away=False)
        proxy.refuse()
        proxy.cut()
        until(is_away=True)
        proxy.accept()
        until(is_away=False)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=20)
        assert (running.returncode, errors) == (0, "")


@pytest.mark.parametrize("store", ["postgres"])
@pytest.mark.parametrize("end", ["q", signal.SIGINT, signal.SIGTERM])
def test_a_terminal_is_given_back_as_it_was(world, end):
    fill(world, 1, 3)
    ours, theirs = os.openpty()
    before = termios.tcgetattr(theirs)
    try:
        ends = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        with process(world.app.config["SQLALCHEMY_DATABASE_URI"], **ends) as running:
            shown = read_until(ours, "3 records")
            assert "\x1b[?1049h" in shown
            assert not termios.tcgetattr(theirs)[3] & termios.ICANON, "keys are read one by one"
            if end == "q":
                os.write(ours, b"xq")
            else:
                running.send_signal(end)
            shown = read_until(ours, "\x1b[?1049l")
            assert running.wait(20) == 0
        assert "\x1b[?25h" in shown
        assert termios.tcgetattr(theirs) == before
    finally:
        os.close(ours)
        os.close(theirs)


def read_until(terminal: int, text: str) -> str:
    """What a terminal shows until it has shown ``text``."""
    shown, until = "", time.monotonic() + 20
    while text not in shown:
        assert time.monotonic() < until, shown
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 65_536).decode()
    return shown
