"""The bench's requests under gunicorn arrive, on both servers."""

from __future__ import annotations

import pytest

from bench import throughput

pytestmark = pytest.mark.of_tests


def test_each_path_is_served_with_the_extension_and_without(postgres, redis_server, monkeypatch):
    monkeypatch.setattr(throughput, "TURNS", 1)
    monkeypatch.setattr(throughput, "SECONDS", 0.5)
    urls = postgres.database("protected"), postgres.database("unprotected")
    figures = throughput.measure(*urls, redis_server.url)
    assert figures.keys() == throughput.PATHS.keys()
    assert all(figure.value > 0 for figure in figures.values())
