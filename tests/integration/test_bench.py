"""The bench: each path of requests under gunicorn, and another package's worker, which is killed."""

import sys
from functools import partial
from pathlib import Path

import pytest

from bench import throughput
from bench.peers import crashes
from bench.peers.process import Place, Running
from bench.peers.table import CONTENDERS

pytestmark = pytest.mark.of_tests


def test_each_path_is_served_with_the_extension_and_without(postgres, redis_server, monkeypatch):
    monkeypatch.setattr(throughput, "TURNS", 1)
    monkeypatch.setattr(throughput, "SECONDS", 0.5)
    urls = postgres.database("protected"), postgres.database("unprotected")
    figures = throughput.measure(*urls, redis_server.url)
    assert figures.keys() == throughput.PATHS.keys()
    assert all(figure.value > 0 for figure in figures.values())


def test_a_peers_worker_is_killed(postgres, redis_server, tmp_path):
    place = Place("peer", postgres.database("peer"), redis_server.url)
    ours = CONTENDERS["ours, `postgres`"]
    start = partial(Running, Path(sys.executable), ours, place, tmp_path / "log")
    assert str(crashes.killed_before(start, place)) == "10; of 10 keys: 201 at once"
