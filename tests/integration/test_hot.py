"""What a record costs on disk, and that completing one touches no index."""

import secrets
from dataclasses import replace

import pytest

from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.records import StoredResponse
from tests.contract.claims import a_claim
from tests.waiting import wait_until

HEADERS = (("Content-Type", "application/json"),)
COUNT = 1000
UPDATES = """select n_tup_upd, n_tup_hot_upd from pg_stat_all_tables
 where relid = 'idempotency_record'::regclass"""


# A page in somebody else's hands, such as the autovacuum's, is not pruned. Of answers of 1000 bytes
# five rows fill a page but for the twelfth that is left free: too little for a sixth.
@pytest.mark.parametrize(("size", "part"), [(200, 0.99), (1000, 0.8), (20_000, 0.99)])
def test_completing_is_a_hot_update_of_a_small_row(make_world, postgres, size, part):
    # On a database that has counted nothing yet.
    world = make_world(SQLALCHEMY_DATABASE_URI=postgres.database("hot"))
    records = world.app.extensions["idempotency"].records
    for _ in range(COUNT):
        fingerprint, owner = Fingerprint(1, secrets.token_bytes(16)), secrets.token_urlsafe(9)
        claim = replace(a_claim(ttl=86400.0), fingerprint=fingerprint, owner=owner)
        records.claim(claim).complete(StoredResponse(201, HEADERS, secrets.token_bytes(size)))

    def counted():
        """A backend reports when it ends at the latest, so the pool's are closed."""
        with world.app.app_context():
            world.db.engine.dispose()
        return [row for row in world.sql(UPDATES) if row[0] >= COUNT]

    [(every, hot)] = wait_until(counted, "the updates are counted")
    assert every == COUNT
    assert hot >= COUNT * part
    partial = "indrelid = 'idempotency_record'::regclass and indpred is not null"
    [(of_index,)] = world.sql(f"select pg_relation_size(indexrelid) from pg_index where {partial}")
    assert of_index == 8192, "an atomic operation is not there: one page, which has no root yet"
    # The row is 152 bytes and the body; both indexes take 90 more. The rest is the twelfth of a page
    # that is left free, and the first versions of the rows that came to a page last.
    (row,) = world.sql("select avg(pg_column_size(r.*)) from idempotency_record r")[0]
    (total,) = world.sql("select pg_total_relation_size('idempotency_record')")[0]
    print(f"an answer of {size} bytes: a row of {row:.0f} bytes, {total / COUNT:.0f} with all")
    if size == 200:
        assert row < 360
        assert total / COUNT < 600
