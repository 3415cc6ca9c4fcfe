"""The bench: many records, requests under gunicorn, and other packages' workers."""

from __future__ import annotations

import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from bench import records, throughput
from bench.peers import crashes
from bench.peers.process import Died, Place, Running
from bench.peers.table import CONTENDERS, PACKAGES
from bench.records import NAME, Table

pytestmark = pytest.mark.of_tests


def test_the_copies_are_replayed_stand_apart_and_are_purged(postgres, monkeypatch):
    monkeypatch.setattr(records, "KNOWN", 10)
    with closing(Table(postgres.database("growth"), 2000)) as table:
        replay = table.replay()
        for _ in range(20):
            replay()
        pages = f"SELECT count(DISTINCT (ctid::text::point)[0]) FROM {NAME} WHERE key IN"
        assert table.ask(f"{pages} (SELECT key FROM known)") == 10
        table.add_expired(300)
        assert table.ask(f"SELECT count(*) FROM {NAME}") == 2300
        assert table.purge() == 300
        table.first()()
        assert table.ask(f"SELECT count(*) FROM {NAME}") == 2001


def test_each_path_is_served_with_the_extension_and_without(postgres, redis_server, monkeypatch):
    monkeypatch.setattr(throughput, "TURNS", 1)
    monkeypatch.setattr(throughput, "SECONDS", 0.5)
    urls = postgres.database("protected"), postgres.database("unprotected")
    figures = throughput.measure(*urls, redis_server.url)
    assert figures.keys() == throughput.PATHS.keys()
    assert all(figure.value > 0 for figure in figures.values())


@pytest.fixture
def place(postgres, redis_server):
    return Place("peer", postgres.database("peer"), redis_server.url)


@pytest.fixture
def start(place, tmp_path):
    ours = CONTENDERS["ours, `postgres`"]
    return partial(Running, Path(sys.executable), ours, place, tmp_path / "log")


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
