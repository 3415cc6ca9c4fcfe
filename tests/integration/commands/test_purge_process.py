"""``flask idempotency purge`` as a process: it outlives its database, and ends on a signal."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

import servers
from tests.integration.commands.purging import FILL
from tests.integration.commands.running import PROGRAM, ROOT
from tests.waiting import wait_until


@contextmanager
def process(uri: Any, *options: str) -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, "-uc", PROGRAM, str(uri), "purge", *options]
    running = subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


@pytest.mark.parametrize("store", ["postgres"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_every_repeats_outlives_the_database_and_ends_on_a_signal(world, number):
    world.sql(FILL.format(10))
    uri = sa.make_url(world.app.config["SQLALCHEMY_DATABASE_URI"])
    with (
        servers.FaultProxy(uri.render_as_string(hide_password=False)) as proxy,
        process(proxy.url, "--every", "1") as running,
    ):
        assert running.stdout.readline() == "10 expired records deleted\n"
        proxy.refuse()
        proxy.cut()
        assert running.stderr.readline().startswith("Error: ")
        proxy.accept()
        world.sql(FILL.format(20))
        assert running.stdout.readline() == "20 expired records deleted\n"
        running.send_signal(number)
        out, err = running.communicate(timeout=20)
        assert running.returncode == 0
        assert "Traceback" not in out + err


@pytest.mark.parametrize("store", ["postgres"])
def test_a_signal_ends_a_long_purge_between_two_transactions(world):
    world.sql(FILL.format(20_000))
    uri = world.app.config["SQLALCHEMY_DATABASE_URI"]
    with process(uri, "--batch", "1") as running:
        wait_until(lambda: world.count("idempotency_record") < 20_000, "a record is deleted")
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=20)
        assert (running.returncode, err) == (0, "")
    left = world.count("idempotency_record")
    deleted = 20_000 - left
    assert out == f"{deleted} expired record{'s' if deleted != 1 else ''} deleted\n"
    assert left > 0
