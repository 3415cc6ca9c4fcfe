"""``flask idempotency purge``: what it deletes, in which transactions, and whom it never stops."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import pytest
import sqlalchemy as sa

import servers
from flask_idempotency.stores.postgres import statements
from tests.integration.commands.purging import EXPIRE, FILL, outside, purge, purged, send_purge
from tests.integration.commands.running import PROGRAM, ROOT
from tests.waiting import wait_until

PAUSING_CLOCK = """create function public.clock_timestamp() returns timestamptz volatile
language plpgsql as
'begin perform pg_advisory_xact_lock_shared(1); return pg_catalog.clock_timestamp(); end'"""
WAITING = "select 1 from pg_locks where locktype = 'advisory' and not granted"


def test_a_view_that_outlives_its_record_is_not_purged(world, gate, background, add_view):
    add_view(world, during=gate, ttl=1)
    first = background(world.post)
    gate.wait_until_reached()
    expired = "select expires_at <= clock_timestamp() from idempotency_record"
    wait_until(lambda: world.sql(expired)[0][0], "it expires")
    assert purge(world) == "0 expired records deleted\n"
    gate.open()
    assert first.result().status_code == 201
    assert purge(world) == "0 expired records deleted\n", "completing it has renewed it"
    assert world.post().headers["Idempotent-Replayed"] == "true"
    assert world.count() == 1


def test_many_go_in_batches_each_its_own_transaction(world):
    world.sql(FILL.format(5000))
    world.sql(
        "create table deletion (xid bigint);"
        " create function note() returns trigger language plpgsql as"
        " 'begin insert into deletion values (txid_current()); return old; end';"
        " create trigger note before delete on idempotency_record for each row execute function note()"
    )
    assert purge(world, "--batch", "700") == "5000 expired records deleted\n"
    sizes = world.sql("select count(*) from deletion group by xid order by xid")
    assert [size for (size,) in sizes] == [700] * 7 + [100]
    assert world.records() == []


def test_the_search_reads_no_other_records_and_none_twice(world):
    world.sql(FILL.format(5000))
    plan = plan_of_purge(world)
    assert "Tid Scan on " in plan, plan
    assert plan.count("Index Scan using ") == 1, plan
    world.sql("update idempotency_record set expires_at = now() + interval '1 h'")
    world.sql("analyze idempotency_record")
    plan = plan_of_purge(world)
    assert "Index Cond: ((expires_at <= " in plan, plan
    assert "Rows Removed by Filter" not in plan, plan


def plan_of_purge(world: Any) -> str:
    with outside(world) as cursor:
        message = statements.PURGE.format(table="idempotency_record", role="'none'")
        before, _, statement = message.rpartition(";")
        cursor.execute(before)
        values = {"batch": 1000, "since": "-infinity"}
        cursor.execute("explain (analyze, buffers) " + statement, values)
        return "\n".join(line for (line,) in cursor.fetchall())


def test_batches_do_not_read_again_what_older_transactions_still_see(make_world, postgres):
    # An index points to deleted rows until no transaction sees them any more, and then until a VACUUM.
    world = make_world(SQLALCHEMY_DATABASE_URI=postgres.database("purged"))  # has counted nothing yet
    world.sql(FILL.format(5000))
    with outside(world) as older:
        older.execute("set transaction isolation level repeatable read; select 1")
        assert purged(world, 100) == [100] * 50
        wait_until(lambda: rows_read(world) >= 5000, "the backends have reported")
        assert rows_read(world) < 5100


def rows_read(world: Any) -> int:
    """Entries of the index on ``expires_at`` that were read, once the backends have reported it."""
    with world.app.app_context():
        world.db.engine.dispose()  # a backend reports when it ends, at the latest
    return world.sql(
        "select idx_tup_read from pg_stat_user_indexes"
        " where indexrelname = 'ix_idempotency_record_expires_at'"
    )[0][0]


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
        for number, change in (1, "expires_at = now() + interval '1 h'"), (2, "status = 500"):
            world.sql(f"update idempotency_record set {change} where key = sha256('{number}')")
        gate.execute("select pg_advisory_unlock(1)")
        assert deleting.result() == 1, "the one that nobody has changed"
        purging.connection.commit()
    assert purge(world) == "1 expired record deleted\n"
    assert [bytes(row.key) for row in world.records()] == [sha256(b"1").digest()]


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_purges_share_the_work_at_any_isolation_level_and_none_waits(make_world, level):
    options = f"-c default_transaction_isolation={level.replace(' ', chr(92) + ' ')}"
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"connect_args": {"options": options}})
    world.sql(FILL.format(3000))
    with outside(world) as other, ThreadPoolExecutor(4) as pool:
        assert send_purge(other) == 1000
        began = time.monotonic()
        counts = list(pool.map(lambda _: sum(purged(world, 20)), range(4)))
        assert sum(counts) == 2000, counts
        assert time.monotonic() - began < 10
        other.connection.commit()
    assert world.records() == []


def test_first_requests_and_replays_do_not_fail_while_it_runs(world, pay):
    done, failures = threading.Event(), list[Any]()

    def again_and_again(work: Callable[[], Any]) -> int:
        rounds = 0
        while not done.is_set():
            work()
            rounds += 1
        return rounds

    def send(path: str, key: str) -> Any:
        answer = pay(path, key)
        while path == "/brief" and answer.status_code == 409 and answer.headers["Retry-After"]:
            answer = pay(path, key)  # it expired just now, and the purge is deleting it
        return answer

    def requests(thread: int) -> None:
        for number in range(10):
            for path in ("/payments", "/brief"):
                answers = [send(path, f"{thread}-{number}") for _ in range(3)]
                failures.extend(a for a in answers if a.status_code != 201)
                if path == "/payments" and len({answer.data for answer in answers}) != 1:
                    failures.append(answers)

    expire = f"{EXPIRE} where name = 'brief' and state = 'completed' and expires_at > now()"
    works = [lambda: world.sql(expire), lambda: purged(world), lambda: purged(world, 3)]
    with ThreadPoolExecutor(8) as pool:
        background = [pool.submit(again_and_again, work) for work in works]
        try:
            list(pool.map(requests, range(4)))
        finally:
            done.set()
        assert all(rounds.result() > 5 for rounds in background)
    assert failures == []
    assert [row.name for row in world.records()].count("pay") == 40
    assert world.count() > 80, "records of /brief have expired while they were used"


def test_a_record_that_is_being_deleted_is_replayed_or_if_it_has_expired_comes_again(world, pay):
    first = pay()
    with outside(world) as purging:
        purging.execute("delete from idempotency_record")
        replay = pay()
        assert (replay.data, replay.headers["Idempotent-Replayed"]) == (first.data, "true")
        purging.connection.commit()
    assert pay().status_code == 201
    world.sql(EXPIRE)
    with outside(world) as purging:
        assert send_purge(purging) == 1
        refused = pay()
        assert (refused.status_code, bool(refused.headers["Retry-After"])) == (409, True)
        purging.connection.commit()
    assert pay().json["attempt"] == 1
    assert world.count() == 3, "each time the record is gone, and the key is new"


@pytest.mark.parametrize(("number", "many"), [(signal.SIGINT, 0), (signal.SIGTERM, 20_000)])
def test_every_repeats_outlives_the_database_and_ends_on_a_signal(world, number, many):
    """In its pause, or between two transactions of a long purge."""
    world.sql(FILL.format(10))
    uri = sa.make_url(world.app.config["SQLALCHEMY_DATABASE_URI"])
    with servers.FaultProxy(uri.render_as_string(hide_password=False)) as proxy:
        options = ["purge", "--every", "1", "--batch", "1"]
        running = subprocess.Popen(
            [sys.executable, "-uc", PROGRAM, str(proxy.url), *options],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert running.stdout.readline() == "10 expired records deleted\n"
            proxy.refuse()
            proxy.cut()
            assert running.stderr.readline().startswith("Error: ")
            proxy.accept()
            world.sql(FILL.format(20))
            assert running.stdout.readline() == "20 expired records deleted\n"
            world.sql(FILL.format(many))
            if many:
                wait_until(lambda: world.count("idempotency_record") < many, "a record is deleted")
            running.send_signal(number)
            out, err = running.communicate(timeout=20)
        finally:
            running.kill()
            running.communicate()
    left = world.count("idempotency_record")
    assert (running.returncode, "Traceback" in err, left > 0) == (0, False, many > 0)
    assert many - left == int("".join(filter(str.isdigit, out)) or 0), out
