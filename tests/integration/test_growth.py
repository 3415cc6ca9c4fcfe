"""The bench's many records are like those of requests: replayed, and purged when they have expired."""

from __future__ import annotations

from contextlib import closing

import pytest

from bench import records
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
