"""The bench's many records are like those of requests: replayed, purged, completed on their page."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from bench import records
from bench.records import NAME, Table

pytestmark = pytest.mark.of_tests

RECORDS = 2000
KNOWN = 10


@pytest.fixture
def table(postgres: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(records, "KNOWN", KNOWN)
    with closing(Table(postgres.database("growth"), RECORDS)) as table:
        yield table


def test_the_copies_are_replayed_and_stand_apart(table):
    replay = table.replay()
    for _ in range(2 * KNOWN):
        replay()
    count, pages = (table.ask(f"SELECT {what} FROM {NAME} WHERE key IN (SELECT key FROM known)")
                    for what in ("count(*)", "count(DISTINCT (ctid::text::point)[0])"))  # fmt: skip
    assert (count, pages) == (KNOWN, KNOWN)
    assert table.ask(f"SELECT count(*) FROM {NAME}") == RECORDS


def test_a_purge_deletes_those_that_were_added_expired(table):
    assert table.purge() == 0
    table.add_expired(300)
    assert table.ask(f"SELECT count(*) FROM {NAME}") == RECORDS + 300
    assert table.purge() == 300
    table.first()()
    assert table.ask(f"SELECT count(*) FROM {NAME}") == RECORDS + 1
