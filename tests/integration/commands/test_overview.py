"""What the end of ``list``, an operator's page and the metrics ask for."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from flask_idempotency.stores.admin import CAPPED, Overview
from flask_idempotency.stores.postgres import statements

FILL = """insert into idempotency_record
       (key, expires_at, created_at, lease_expires_at, attempt, fingerprint_version, status, state,
        owner, name, fingerprint)
select substring(sha256(int8send(n)) for 23), {expires}, now(), {lease}, 1, 1,
       case when {state} = 'completed' then 201 end, {state}, 'somebody', {name}, sha256('x')
  from generate_series({first}, {last}) as n"""


def fill(world: Any, first: int, last: int, **values: str) -> None:
    """Records numbered ``first`` to ``last``, completed ones of ``pay`` unless said otherwise."""
    usual = {"state": "'completed'", "name": "'pay'", "expires": "now() + interval '1 h'"}
    given = {**usual, "lease": "null::timestamptz", **values}
    world.sql(FILL.format(first=first, last=last, **given))


def overview(app: Any) -> Overview:
    with app.app_context():
        return app.extensions["idempotency"].records.admin().overview()


def test_a_small_table_is_counted(world):
    assert overview(world.app).counts == {}
    fill(world, 1, 30)
    fill(world, 31, 33, state="'failed'", name="'order'")
    running, ended = (f"clock_timestamp() {sign} interval '1 min' * (n - 30)" for sign in "+-")
    fill(world, 34, 36, state="'in_progress'", lease=running)
    fill(world, 37, 38, state="'in_progress'", lease=ended, name="'order'")
    fill(world, 39, 42, expires="now() - interval '2 h'")
    world.sql(f"update idempotency_record set created_at = {ended} from (values (38)) as one (n)")
    found = overview(world.app)
    assert found.counts == {
        "order": {"failed": 3, "interrupted": 2},
        "pay": {"completed": 34, "in_progress": 3},
    }
    assert (found.total, found.estimated) == (42, False)
    assert found.by_state == {"completed": 34, "failed": 3, "in_progress": 3, "interrupted": 2}
    assert (found.interrupted, found.expired) == (2, 4)
    assert 8 * 60 <= found.interrupted_seconds < 9 * 60
    assert 7200 <= found.expired_seconds < 7260


def read_fewer_pages(monkeypatch: Any) -> None:
    sql = statements.SQL.overview
    monkeypatch.setattr(statements.SQL, "overview", sql.replace("100.0 * 1000", "100.0 * 200"))


def test_a_large_table_is_estimated_but_interrupted_operations_are_counted(world, monkeypatch):
    read_fewer_pages(monkeypatch)
    fill(world, 1, 15_000)
    fill(world, 15_001, 20_000, state="'failed'")
    fill(world, 20_001, 20_003, state="'in_progress'", lease="clock_timestamp()")
    found = overview(world.app)
    assert found.estimated
    assert found.interrupted == found.by_state["interrupted"] == 3
    assert found.by_state["completed"] == pytest.approx(15_000, rel=0.5)
    assert found.total == pytest.approx(20_003, rel=0.3)
    assert overview(world.app).counts == found.counts, "the same pages each time"


def test_an_estimate_does_not_wait_for_the_statistics_after_a_purge(world, monkeypatch):
    read_fewer_pages(monkeypatch)
    fill(world, 1, 20_000)
    world.sql("analyze idempotency_record")
    world.sql("delete from idempotency_record where get_byte(key, 0) < 192")
    assert overview(world.app).total == pytest.approx(5_000, rel=0.4)


def test_pages_that_a_purge_has_emptied_count_as_empty(world, monkeypatch):
    read_fewer_pages(monkeypatch)
    fill(world, 1, 20_000)
    world.sql("analyze idempotency_record")
    first = "select substring(sha256(int8send(n)) for 23) from generate_series(1, 8000) as n"
    world.sql(f"delete from idempotency_record where key in ({first})")
    assert overview(world.app).total == pytest.approx(12_000, rel=0.35)
    with world.app.app_context(), world.db.engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        connection.execute(sa.text("vacuum idempotency_record"))
    assert overview(world.app).total == pytest.approx(12_000, rel=0.35)


def test_what_should_be_few_is_counted_up_to_a_limit(world):
    fill(world, 1, CAPPED + 5, expires="'-infinity'")
    fill(world, CAPPED + 6, 2 * CAPPED + 10, state="'in_progress'", lease="clock_timestamp()")
    found = overview(world.app)
    assert found.expired == found.interrupted == CAPPED
    assert found.expired_seconds is None, "since ever"


def test_interrupted_operations_are_listed_by_their_index(world):
    fill(world, 1, 5_000)
    fill(world, 5_001, 5_003, state="'in_progress'", lease="clock_timestamp()")
    world.sql("analyze idempotency_record")
    sql = statements.SQL.lines.format(table="idempotency_record")
    for word, value in {
        "low": r"'\x00'::bytea",
        "high": r"'\xff'::bytea",
        "tail": "''::bytea",
        "size": "0",
        "name": "null",
        "state": "'interrupted'",
        "limit": "20",
    }.items():
        sql = sql.replace(f"%({word})s", value)
    plan = "\n".join(row[0] for row in world.sql(f"explain {sql}"))
    assert "ix_idempotency_record_leased" in plan
    assert "Seq Scan" not in plan
    assert len(world.sql(sql)) == 3
