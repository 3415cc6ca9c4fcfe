"""The comparison with other packages, as far as it needs none: ours alone, nothing installed."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from bench.clients import callers
from bench.clients import run as clients
from bench.peers import crashes
from bench.peers.process import Died, Place, Running
from bench.peers.table import CONTENDERS, PACKAGES

pytestmark = pytest.mark.of_tests

OURS = "ours, `postgres`"


@pytest.fixture
def place(postgres, redis_server):
    return Place("peer", postgres.database("peer"), redis_server.url)


@pytest.fixture
def start(place, tmp_path):
    return partial(Running, Path(sys.executable), CONTENDERS[OURS], place, tmp_path / "log")


def test_a_worker_checks_times_and_counts(start):
    with start("--calls") as worker:
        assert worker.ask("check", path="first") == {"201": 10}
        assert worker.ask("check", path="replay") == {"201": 10}
        taken = worker.ask("measure", path="replay", base="empty", rounds=3, pids=[])
        assert [len(each) for each in taken] == [4, 4, 4]
        calls = worker.ask("calls", paths=["first", "bare"])
        assert calls["first"] > calls["bare"] > 1000


def test_a_worker_that_is_killed_in_its_view_pays_once_for_each_key(start, place):
    assert str(crashes.killed_before(start, place)) == "10; of 10 keys: 201 at once"


def test_a_process_that_ends_says_its_last_line(start):
    with start() as worker, pytest.raises(Died, match="no_such_command"):
        worker.ask("no_such_command")


def test_every_file_in_apps_is_compared_and_every_package_pinned():
    apps = {path.stem for path in Path("bench/peers/apps").glob("[!_]*.py")}
    assert apps == {each.app for each in CONTENDERS.values()}
    assert {each.package for each in CONTENDERS.values()} == set(PACKAGES)
    assert all("==" in one for each in PACKAGES.values() for one in each.requirements)


@pytest.mark.parametrize("client", ["ours_requests", "ours_httpx"])
def test_a_client_meets_a_server_that_fails(client):
    fault = "connection reset after the request, once"
    measured = clients.measure(Path(sys.executable), client, fault)
    assert (measured.outcome, measured.attempts, measured.keys) == ("201", 2, 1)
    [retry] = [line for line in measured.log if line[1] == "flask_idempotency.client"]
    assert "canary" not in "".join(retry)


def test_a_hundred_calls_wait_for_nothing():
    measured = clients.measure(Path(sys.executable), "ours_requests", clients.AT_ONCE, 100)
    assert 100 < measured.attempts < 300, "the budget ends the storm"


def test_every_client_that_is_compared_has_its_call_and_is_pinned():
    assert {name for name in clients.CLIENTS if not hasattr(callers, name)} == set()
    others = [requirements[0] for name, (_, requirements) in clients.CLIENTS.items() if requirements]
    assert [one for one in others if "==" not in one] == ["requests"], "as here, by the constraints"
