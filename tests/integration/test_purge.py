"""The purge, alone and among requests: what it deletes, what it leaves, and whom it never stops."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg2
import pytest
import sqlalchemy as sa
from flask import request

import servers
from flask_idempotency import current_operation, idempotent
from flask_idempotency.cli import cli
from flask_idempotency.stores import admin, statements

ROOT = Path(__file__).parents[2]
EXPIRE = "update idempotency_record set expires_at = clock_timestamp()"

FILL = """insert into idempotency_record
       (key, name, state, fingerprint_version, fingerprint, attempt, owner, created_at, expires_at)
select sha256(n::text::bytea), 'filled', 'in_progress', 1, sha256(''), 1, 'somebody',
       now() - interval '2 h', now() - interval '1 h' from generate_series(1, {}) as n"""

PURGE_EVERY = """
import sys
from flask import Flask
from flask.cli import ScriptInfo
from flask_sqlalchemy import SQLAlchemy
from flask_idempotency import Idempotency
from flask_idempotency.cli import cli

app = Flask("shop")
app.config["SQLALCHEMY_DATABASE_URI"] = sys.argv[1]
SQLAlchemy(app)
Idempotency(app, scope=None)
cli.main(["purge", *sys.argv[2:]], obj=ScriptInfo(create_app=lambda: app))
"""


@pytest.fixture
def pay(world: Any) -> Callable[..., Any]:
    """Sends a request to a view that writes one payment."""

    def view() -> Any:
        payment = world.Payment(amount=request.get_json()["amount"])
        world.db.session.add(payment)
        world.db.session.commit()
        return {"id": payment.id, "attempt": current_operation.attempt}, 201

    for name in ("payments", "brief"):
        world.app.post(f"/{name}", endpoint=name)(idempotent(view))
    return world.post


def purge(world: Any, *options: str) -> str:
    result = world.app.test_cli_runner().invoke(cli, ["purge", *options])
    assert result.exit_code == 0, result.output
    return result.output


def purged(world: Any, batch: int = 1000) -> list[int]:
    """Purge without the command's output, which threads would share."""
    with world.app.app_context():
        return list(admin.purge(world.app.extensions["idempotency"].records, batch))


def eventually(true: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)


@contextmanager
def outside(world: Any) -> Iterator[Any]:
    """A cursor in a transaction of its own, rolled back unless it commits."""
    connection = psycopg2.connect(servers.plain_dsn(world.app.config["SQLALCHEMY_DATABASE_URI"]))
    try:
        yield connection.cursor()
    finally:
        connection.close()


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
    eventually(lambda: purge(world) == "1 expired record deleted\n")
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
            eventually(lambda: world.sql("select expires_at <= clock_timestamp() from"
                                         " idempotency_record")[0][0])  # fmt: skip
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
    start = statements.PURGE.index("SELECT key")
    subquery = statements.PURGE[start : statements.PURGE.index(")) RETURNING")]
    sql = subquery.format(table="idempotency_record", steps="idempotency_record_step") % {"batch": 1000}
    plan = "\n".join(line for (line,) in world.sql(f"explain (analyze, buffers) {sql}"))
    assert "Index Cond: (expires_at <= " in plan, plan
    assert "Rows Removed by Filter" not in plan, plan


def test_two_purges_do_not_wait_for_each_other_and_share_the_work(world):
    world.sql(FILL.format(3000))
    with outside(world) as other:
        for statement in statements.PURGE.split(";"):
            other.execute(
                statement.format(table="idempotency_record", steps="idempotency_record_step"),
                {"batch": 1000},
            )
        assert other.fetchone() == (1000,)
        began = time.monotonic()
        assert sum(purged(world, 300)) == 2000
        assert time.monotonic() - began < 10
        other.connection.commit()
    assert world.records() == []

    world.sql(FILL.format(4000))
    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(lambda _: sum(purged(world, 50)), range(4)))
    assert sum(counts) == 4000, counts
    assert world.records() == []


def test_first_requests_and_replays_do_not_fail_while_it_runs(world, pay):
    done = threading.Event()
    failures: list[Any] = []

    def again_and_again(work: Callable[[], Any]) -> Callable[[], int]:
        def run() -> int:
            rounds = 0
            while not done.is_set():
                work()
                rounds += 1
            return rounds

        return run

    def send(path: str, key: str) -> Any:
        answer = pay(path, key)
        while path == "/brief" and answer.status_code == 409 and answer.headers["Retry-After"]:
            answer = pay(path, key)  # it expired just now, and the purge is deleting it
        return answer

    def requests(thread: int) -> int:
        for number in range(60):
            for path in ("/payments", "/brief"):
                answers = [send(path, f"{thread}-{number}") for _ in range(3)]
                failures.extend(a for a in answers if a.status_code != 201)
                if path == "/payments" and len({answer.data for answer in answers}) != 1:
                    failures.append(answers)
        return 60

    expire = f"{EXPIRE} where name = 'brief' and state = 'completed' and expires_at > now()"
    with ThreadPoolExecutor(8) as pool:
        background = [
            pool.submit(again_and_again(work))
            for work in (lambda: world.sql(expire), lambda: purged(world), lambda: purged(world, 3))
        ]
        try:
            assert list(pool.map(requests, range(4))) == [60] * 4
        finally:
            done.set()
        assert all(rounds.result() > 5 for rounds in background)
    assert failures == []
    kept = world.sql("select count(*) from idempotency_record where name = 'payments'")
    assert kept == [(240,)]
    assert world.count() > 480, "records of /brief have expired while they were used"


def test_a_replay_is_served_while_its_record_is_being_deleted(world, pay):
    first = pay()
    with outside(world) as purging:
        purging.execute("delete from idempotency_record")
        began = time.monotonic()
        replay = pay()
        assert time.monotonic() - began < 5
        assert (replay.status_code, replay.data) == (201, first.data)
        assert replay.headers["Idempotent-Replayed"] == "true"
        purging.connection.commit()
    assert pay().status_code == 201
    assert world.count() == 2, "the record is gone, so the key is new"


def test_a_key_whose_expired_record_is_being_deleted_is_told_to_come_again(world, pay):
    pay()
    world.sql(EXPIRE)
    with outside(world) as purging:
        for statement in statements.PURGE.split(";"):
            purging.execute(
                statement.format(table="idempotency_record", steps="idempotency_record_step"),
                {"batch": 1000},
            )
        assert purging.rowcount == 1
        refused = pay()
        assert refused.status_code == 409
        assert refused.headers["Retry-After"]
        purging.connection.commit()
    assert pay().json["attempt"] == 1
    assert world.count() == 2


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


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_it_does_not_mind_the_applications_isolation_level(make_world, level):
    world = make_world(
        SQLALCHEMY_ENGINE_OPTIONS={
            "connect_args": {
                "options": f"-c default_transaction_isolation={level.replace(' ', chr(92) + ' ')}"
            }
        }
    )
    world.sql(FILL.format(2000))
    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(lambda _: sum(purged(world, 20)), range(4)))
    assert sum(counts) == 2000, counts


@contextmanager
def process(uri: Any, *options: str) -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, "-uc", PURGE_EVERY, str(uri), *options]
    running = subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


@pytest.mark.parametrize("store", ["postgres"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_every_repeats_outlives_the_database_and_ends_on_a_signal(world, number):
    world.sql(FILL.format(10))
    uri = sa.make_url(world.app.config["SQLALCHEMY_DATABASE_URI"])
    with (
        servers.FaultProxy(uri.render_as_string(hide_password=False)) as proxy,
        process(proxy.url, "--every", "1") as running,
    ):
        assert running.stdout.readline() == "10 expired records deleted\n"
        proxy.refuse()
        proxy.cut()
        assert running.stderr.readline().startswith("Error: ")
        proxy.accept()
        world.sql(FILL.format(20))
        assert running.stdout.readline() == "20 expired records deleted\n"
        running.send_signal(number)
        began = time.monotonic()
        out, err = running.communicate(timeout=20)
        assert time.monotonic() - began < 5
        assert running.returncode == 0
        assert "Traceback" not in out + err


@pytest.mark.parametrize("store", ["postgres"])
def test_a_signal_ends_a_long_purge_between_two_transactions(world):
    world.sql(FILL.format(20_000))
    uri = world.app.config["SQLALCHEMY_DATABASE_URI"]
    with process(uri, "--batch", "1") as running:
        eventually(lambda: world.count("idempotency_record") < 20_000)
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=20)
        assert (running.returncode, err) == (0, "")
    left = world.count("idempotency_record")
    assert out == f"{20_000 - left} expired records deleted\n"
    assert left > 0
