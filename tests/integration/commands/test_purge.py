"""``flask idempotency purge``: what it deletes, in which transactions, and what it leaves."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

from flask_idempotency import idempotent
from flask_idempotency.cli import cli
from flask_idempotency.stores.postgres import statements
from tests.integration.commands.purging import EXPIRE, FILL, outside, purge, purged, send_purge
from tests.waiting import wait_until

PAUSING_CLOCK = """create function public.clock_timestamp() returns timestamptz volatile
language plpgsql as
'begin perform pg_advisory_xact_lock_shared(1); return pg_catalog.clock_timestamp(); end'"""
WAITING = "select 1 from pg_locks where locktype = 'advisory' and not granted"


def test_what_is_expired_goes_and_what_is_not_stays(world, pay):
    kept = pay(key="kept").data
    pay(key="gone")
    world.sql(EXPIRE + " where created_at = (select max(created_at) from idempotency_record)")
    assert purge(world) == "1 expired record deleted\n"
    assert purge(world) == "0 expired records deleted\n"
    replay = pay(key="kept")
    assert (replay.data, replay.headers["Idempotent-Replayed"]) == (kept, "true")
    assert pay(key="gone").json["attempt"] == 1
    assert world.count() == 3


def test_an_abandoned_record_goes_and_a_held_one_stays_though_both_have_expired(world):
    world.sql(FILL.format(2))
    with outside(world) as holder:
        holder.execute("select key from idempotency_record limit 1 for update")
        (held,) = holder.fetchone()
        assert purge(world) == "1 expired record deleted\n"
        assert [bytes(row.key) for row in world.records()] == [bytes(held)]
    wait_until(lambda: purge(world) == "1 expired record deleted\n", "it is let go")
    assert world.records() == []


def test_a_view_that_outlives_its_record_is_not_purged(world):
    reached, go_on = threading.Event(), threading.Event()

    @world.app.post("/payments")
    @idempotent(ttl=1)
    def slow() -> Any:
        world.db.session.add(world.Payment(amount=1))
        world.db.session.commit()
        reached.set()
        assert go_on.wait(20)
        return {"done": True}, 201

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(world.post)
        try:
            assert reached.wait(20)
            expired = "select expires_at <= clock_timestamp() from idempotency_record"
            wait_until(lambda: world.sql(expired)[0][0], "it expires")
            assert purge(world) == "0 expired records deleted\n"
        finally:
            go_on.set()
        assert first.result().status_code == 201
    assert purge(world) == "0 expired records deleted\n", "completing it has renewed it"
    assert world.post().headers["Idempotent-Replayed"] == "true"
    assert world.count() == 1


def test_many_go_in_batches_each_its_own_transaction(world):
    world.sql(FILL.format(5000))
    world.sql("create table deletion (xid bigint)")
    world.sql("create function note() returns trigger language plpgsql as"
              " 'begin insert into deletion values (txid_current()); return old; end'")  # fmt: skip
    world.sql("create trigger note before delete on idempotency_record"
              " for each row execute function note()")  # fmt: skip
    assert purge(world, "--batch", "700") == "5000 expired records deleted\n"
    sizes = world.sql("select count(*) from deletion group by xid order by xid")
    assert [size for (size,) in sizes] == [700] * 7 + [100]
    assert world.records() == []


def test_the_search_for_expired_records_does_not_read_the_others(world):
    world.sql(FILL.format(5000))
    world.sql("update idempotency_record set expires_at = now() + interval '1 h'")
    world.sql("analyze idempotency_record")
    plan = plan_of_purge(world)
    assert "Index Cond: ((expires_at <= " in plan, plan
    assert "Rows Removed by Filter" not in plan, plan


def test_no_expired_record_is_searched_for_twice(world):
    world.sql(FILL.format(5000))
    plan = plan_of_purge(world)
    assert "Tid Scan on " in plan, plan
    assert plan.count("Index Scan using ") == 1, plan


def test_batches_do_not_read_again_what_older_transactions_still_see(make_world, postgres):
    # An index points to deleted rows until no transaction sees them any more, and then until a VACUUM.
    world = make_world(SQLALCHEMY_DATABASE_URI=postgres.database("purged"))  # has counted nothing yet
    world.sql(FILL.format(5000))
    with outside(world) as older:
        older.execute("set transaction isolation level repeatable read; select 1")
        assert purged(world, 100) == [100] * 50
        wait_until(lambda: rows_read(world) >= 5000, "the backends have reported")
        assert rows_read(world) < 5100


def test_a_record_renewed_at_that_instant_stays(world):
    """The statement has begun, and sees what was there; then a request takes the record over."""
    world.sql(FILL.format(3))
    world.sql(PAUSING_CLOCK)
    with outside(world) as gate, outside(world) as purging, ThreadPoolExecutor(1) as pool:
        gate.execute("select pg_advisory_lock(1)")
        purging.execute("set search_path = public, pg_catalog")
        purging.connection.commit()
        deleting = pool.submit(send_purge, purging)
        wait_until(lambda: world.sql(WAITING), "the purge reads the clock")
        world.sql(
            "update idempotency_record set expires_at = now() + interval '1 h' where key = sha256('1')"
        )
        world.sql("update idempotency_record set status = 500 where key = sha256('2')")
        gate.execute("select pg_advisory_unlock(1)")
        assert deleting.result() == 1, "the one that nobody has changed"
        purging.connection.commit()
    assert purge(world) == "1 expired record deleted\n"
    assert [bytes(row.key) for row in world.records()] == [sha256(b"1").digest()]


def plan_of_purge(world: Any) -> str:
    with outside(world) as cursor:
        message = statements.PURGE.format(table="idempotency_record", role="'none'")
        before, _, statement = message.rpartition(";")
        cursor.execute(before)
        values = {"batch": 1000, "since": "-infinity"}
        cursor.execute("explain (analyze, buffers) " + statement, values)
        return "\n".join(line for (line,) in cursor.fetchall())


def rows_read(world: Any) -> int:
    """Entries of the index on ``expires_at`` that were read, once the backends have reported it."""
    with world.app.app_context():
        world.db.engine.dispose()  # a backend reports when it ends, at the latest
    return world.sql(
        "select idx_tup_read from pg_stat_user_indexes"
        " where indexrelname = 'ix_idempotency_record_expires_at'"
    )[0][0]


def test_a_locked_table_is_not_waited_for(world):
    world.sql(FILL.format(1))
    with outside(world) as migration:
        migration.execute("lock table idempotency_record")
        began = time.monotonic()
        result = world.app.test_cli_runner().invoke(cli, ["purge"])
        assert time.monotonic() - began < 5
    assert result.exit_code == 1
    assert result.output == "Error: canceling statement due to lock timeout\n"
    assert len(world.records()) == 1
