"""What a record costs on disk, and that completing one touches no index."""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.keys import KEY_BYTES
from flask_idempotency.core.records import Claim, StoredResponse

HEADERS = (("Content-Type", "application/json"),)
UPDATES = """select n_tup_upd, n_tup_hot_upd from pg_stat_all_tables
 where relid = 'idempotency_record'::regclass"""


@pytest.fixture
def store() -> str:
    """Redis has no part in this."""
    return "postgres"


@pytest.fixture
def world(make_world: Any, postgres: Any) -> Any:
    """On a database that has counted nothing yet."""
    return make_world(SQLALCHEMY_DATABASE_URI=postgres.database("hot"))


def complete(world: Any, count: int, size: int) -> None:
    """Claim and complete ``count`` operations with answers of ``size`` bytes, as requests do."""
    records = world.app.extensions["idempotency"].records
    with world.app.app_context():
        for _ in range(count):
            fingerprint = Fingerprint(1, secrets.token_bytes(16))
            owner = secrets.token_urlsafe(9)
            claim = Claim(secrets.token_bytes(KEY_BYTES), "create_payment", fingerprint, owner, 86400.0)
            records.claim(claim).complete(StoredResponse(201, HEADERS, secrets.token_bytes(size)))


def updates(world: Any, count: int) -> tuple[int, int]:
    """All updates and the HOT ones, once the statistics have counted ``count``.

    A backend reports when it ends at the latest, so the pool's are closed.
    """
    end = time.monotonic() + 20
    while True:
        with world.app.app_context():
            world.db.engine.dispose()
        found = tuple(world.sql(UPDATES)[0])
        if found[0] >= count:
            return found
        assert time.monotonic() < end, found
        time.sleep(0.05)


def test_an_atomic_operation_is_not_in_the_partial_index(world):
    complete(world, 300, 20)
    [(name,)] = world.sql(
        "select indexrelid::regclass from pg_index"
        " where indrelid = 'idempotency_record'::regclass and indpred is not null"
    )
    empty = 8192  # one page, which says that there is no root yet
    assert world.sql(f"select pg_relation_size('{name}')") == [(empty,)]


@pytest.mark.parametrize("size", [20, 200, 600, 20_000])
def test_completing_is_a_hot_update(world, size):
    complete(world, 300, size)
    count, hot = updates(world, 300)
    assert count == 300
    assert hot >= 297  # a page in somebody else's hands, such as the autovacuum's, is not pruned


def test_completing_is_mostly_a_hot_update_with_larger_responses(world):
    # Five of their rows fill a page but for the twelfth that is left free: too little for the sixth.
    complete(world, 300, 1000)
    every, hot = updates(world, 300)
    assert every == 300
    assert hot >= 0.8 * every


def test_completing_is_nearly_always_a_hot_update_when_workers_share_pages(world):
    # Several claims may fill a page before the first of them is completed there.
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: complete(world, 100, 200), range(8)))
    every, hot = updates(world, 800)
    assert every == 800
    assert hot >= 0.99 * every


def test_what_a_record_takes_on_disk(world):
    # The row is 352 bytes, of which 200 are the body; both indexes take 90 more. The rest is the
    # twelfth of a page that is left free, and the first versions of the rows that came to a page last.
    complete(world, 2000, 200)
    (row,) = world.sql("select avg(pg_column_size(r.*)) from idempotency_record r")[0]
    (total,) = world.sql("select pg_total_relation_size('idempotency_record')")[0]
    print(f"an answer of 200 bytes: a row of {row:.0f} bytes, {total / 2000:.0f} with all")
    assert row < 360
    assert total / 2000 < 540
