"""The bench: many records, requests under gunicorn, and other packages' workers."""

import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from bench import records, throughput
from bench.peers import crashes
from bench.peers.process import Died, Place, Running
from bench.peers.table import CONTENDERS
from bench.records import NAME, Table

pytestmark = pytest.mark.of_tests


def test_the_copies_are_replayed_and_are_purged(postgres, monkeypatch):
    monkeypatch.setattr(records, "KNOWN", 10)
    with closing(Table(postgres.database("growth"), 2000)) as table:
        table.replay()()
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


def test_a_peers_worker_checks_times_counts_and_is_killed(postgres, redis_server, tmp_path):
    place = Place("peer", postgres.database("peer"), redis_server.url)
    ours = CONTENDERS["ours, `postgres`"]
    start = partial(Running, Path(sys.executable), ours, place, tmp_path / "log")
    with start("--calls") as worker:
        assert worker.ask("check", path="replay") == {"201": 10}
        taken = worker.ask("measure", path="replay", base="empty", rounds=3, pids=[])
        assert [len(each) for each in taken] == [4, 4, 4]
        calls = worker.ask("calls", paths=["first", "bare"])
        assert calls["first"] > calls["bare"] > 1000
    assert str(crashes.killed_before(start, place)) == "10; of 10 keys: 201 at once"
    with start() as worker, pytest.raises(Died, match="no_such_command"):
        worker.ask("no_such_command")
