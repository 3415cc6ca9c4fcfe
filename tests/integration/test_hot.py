"""What a record costs on disk, and that completing one touches no index."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.records import StoredResponse
from tests.contract.claims import a_claim
from tests.waiting import wait_until

HEADERS = (("Content-Type", "application/json"),)
UPDATES = """select n_tup_upd, n_tup_hot_upd from pg_stat_all_tables
 where relid = 'idempotency_record'::regclass"""


@pytest.fixture
def store():
    """Redis has no part in this."""
    return "postgres"


@pytest.fixture
def world(make_world, postgres):
    """On a database that has counted nothing yet."""
    return make_world(SQLALCHEMY_DATABASE_URI=postgres.database("hot"))


def complete(world, count, size):
    """Claim and complete ``count`` operations with answers of ``size`` bytes, as requests do."""
    records = world.app.extensions["idempotency"].records
    with world.app.app_context():
        for _ in range(count):
            fingerprint, owner = Fingerprint(1, secrets.token_bytes(16)), secrets.token_urlsafe(9)
            claim = replace(a_claim(ttl=86400.0), fingerprint=fingerprint, owner=owner)
            records.claim(claim).complete(StoredResponse(201, HEADERS, secrets.token_bytes(size)))


def updates(world, count):
    """All updates and the HOT ones, once the statistics have counted ``count``.

    A backend reports when it ends at the latest, so the pool's are closed.
    """

    def counted():
        with world.app.app_context():
            world.db.engine.dispose()
        every, hot = world.sql(UPDATES)[0]
        return (every, hot) if every >= count else None

    return wait_until(counted, "the updates are counted")


@pytest.mark.parametrize(
    ("size", "part"),
    [
        # A page in somebody else's hands, such as the autovacuum's, is not pruned.
        (20, 0.99),
        (600, 0.99),
        (20_000, 0.99),
        # Five of their rows fill a page but for the twelfth that is left free: too little for a sixth.
        (1000, 0.8),
    ],
)
def test_completing_is_a_hot_update(world, size, part):
    complete(world, 300, size)
    every, hot = updates(world, 300)
    assert every == 300
    assert hot >= 300 * part
    partial = "indrelid = 'idempotency_record'::regclass and indpred is not null"
    [(bytes_of_index,)] = world.sql(
        f"select pg_relation_size(indexrelid) from pg_index where {partial}"
    )
    assert bytes_of_index == 8192, "an atomic operation is not there: one page, which has no root yet"


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
