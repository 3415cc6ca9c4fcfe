"""The commands on each store: PostgreSQL, SQLite, Redis, a process, or one's own."""

from __future__ import annotations

import getpass
import json
import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

import servers
from flask_idempotency import (
    Idempotency,
    OperationInterrupted,
    Retryable,
    current_operation,
    idempotent,
)
from flask_idempotency.core.keys import scope_tail
from flask_idempotency.core.records import StoredResponse
from flask_idempotency.stores.admin import AuditEntry
from tests.contract.in_redis import rewrite
from tests.integration.commands.running import ANSWER, findings, not_ok, runner
from tests.killed import Killed

KEY = "canary-key-7f3a"


class Shop:
    """An application with a view that is not atomic, killed after its first step at its first run."""

    def __init__(self, store: Any, folder: Any, url: str, uri: str = "", **config: Any) -> None:
        self.app, self.store = Flask("shop"), store
        self.app.config.update(
            SQLALCHEMY_DATABASE_URI=uri or f"sqlite:///{folder}/shop.db",
            IDEMPOTENCY_STORE=store,
            IDEMPOTENCY_REDIS_PREFIX=f"{folder.name}[*]:",
            PROPAGATE_EXCEPTIONS=False,
            **config,
        )
        if store == "redis":
            self.app.config["IDEMPOTENCY_REDIS_URL"] = url
        self.db = SQLAlchemy(self.app)
        Idempotency(self.app, self.db, scope=None)
        self.run, self.calls = runner(self.app), []
        self.app.post("/orders", endpoint="order")(idempotent(atomic=False)(self.order))
        answers = {"ok": ({"secret": ANSWER}, 201), "wrong": ({"secret": ANSWER}, 500)}
        for name, answer in answers.items():
            view = idempotent(atomic=False)(lambda answer=answer: answer)
            self.app.add_url_rule(f"/{name}", name, view, methods=["POST"])
        self.app.post("/free", endpoint="free")(idempotent(atomic=False)(self.give_back))

    def order(self) -> Any:
        current_operation.step("charge", lambda: self.calls.append(1) or ANSWER)
        if current_operation.attempt == 1:
            raise Killed
        return {"attempt": current_operation.attempt}, 201

    def give_back(self) -> Any:
        raise Retryable

    def post(self, path: str = "/orders", key: str = KEY) -> Any:
        return self.app.test_client().post(path, json={}, headers={"Idempotency-Key": key})

    def interrupt(self, key: str = KEY) -> str:
        """Interrupt an order; its digits."""
        with pytest.raises(Killed):
            self.post(key=key)
        return str(self.listed("--operation", "order", "--limit", "1")[0]["key"])

    def listed(self, *options: str) -> Any:
        result = self.run("list", "--json", *options)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)


@pytest.fixture(params=["postgres", "sql", "redis"])
def store(request: pytest.FixtureRequest) -> Any:
    return request.param


TABLES = pytest.mark.parametrize("store", ["postgres", "sql"], indirect=True)


@pytest.fixture
def shop(store: str, tmp_path: Any, redis_server: Any, databases: Any) -> Iterator[Shop]:
    uri = databases.take() if store == "postgres" else ""
    shop = Shop(store, tmp_path, redis_server.url, uri)
    if store != "redis":
        assert shop.run("create-table").exit_code == 0
    yield shop
    with shop.app.app_context():
        assert shop.db.engine.pool.checkedout() == 0
        shop.db.engine.dispose()
    if uri:
        databases.give_back(uri)


def test_an_operator_sees_how_far_it_came_and_lets_it_run_again(shop):
    key = shop.interrupt()
    assert shop.post().status_code == 409
    (line,) = shop.listed("--state", "interrupted")
    assert (line["key"], line["operation"], line["attempt"]) == (key, "order", 1)
    assert (line["status"], line["bytes"], line["completed"], line["expired"]) == (
        None,
        None,
        None,
        False,
    )
    assert line["expires"] is None, "what is interrupted does not expire"
    (record,) = json.loads(shop.run("show", key, "--json").output)
    (step,) = record.pop("steps")
    assert record.pop("audit") == []
    assert record == line
    assert (step["name"], step["attempt"]) == ("charge", 1)
    assert line["created"] <= step["finished"]
    assert (
        shop.run("release", "--why=asked", key).output
        == f"{key}: may be run again; until then it is listed as interrupted\n"
    )
    (line,) = shop.listed("--state", "interrupted")
    assert (line["key"], line["completed"], line["expires"]) == (key, None, None)
    assert shop.listed("--state", "in_progress") == []
    assert shop.run("release", "--why=asked", key).exit_code == 0
    assert shop.post().json == {"attempt": 2}
    assert shop.post().headers["Idempotent-Replayed"] == "true"
    assert shop.calls == [1]
    (line,) = shop.listed()
    assert (line["state"], line["status"], line["attempt"]) == ("completed", 201, 2)
    assert line["created"] <= line["completed"] < line["expires"]
    result = shop.run("release", "--why=asked", key)
    assert result.exit_code == 1
    assert "is completed: only what is interrupted or failed" in result.output


def test_what_an_operator_released_is_not_forgotten_if_its_view_gives_it_back(shop):
    """No step has finished; but what was cut off may have happened, and only the operator knows."""

    def view() -> Any:
        raise Killed if current_operation.attempt == 1 else Retryable

    shop.app.add_url_rule("/cut", "cut", idempotent(atomic=False)(view), methods=["POST"])
    with pytest.raises(Killed):
        shop.post("/cut")
    (line,) = shop.listed()
    assert shop.run("release", "--why=asked", line["key"]).exit_code == 0
    assert shop.post("/cut").status_code == 503
    (line,) = shop.listed()
    assert (line["state"], line["expires"], line["attempt"]) == ("interrupted", None, 2)


def test_an_operator_ends_it_and_thinks_better_of_it(shop):
    key = shop.interrupt()
    assert shop.run("release", "--why=asked", "--fail", key).output == f"{key}: failed for good\n"
    first, second = shop.post(), shop.post()
    assert (first.status_code, second.data) == (500, first.data)
    assert first.json["type"].endswith("operation-failed")
    assert shop.listed()[0]["state"] == "failed"
    assert (
        shop.run("release", "--why=asked", key).output
        == f"{key}: may be run again; until then it is listed as interrupted\n"
    )
    assert shop.post().json == {"attempt": 2}
    assert shop.calls == [1]


@pytest.mark.parametrize("decision", [["release", "--fail"], ["resolve", "--yes", "--status=201"]])
def test_a_decision_lives_for_the_ttl_of_its_route(shop, decision):
    """Not for the application's, after which a retry would run what is never to run again."""

    @shop.app.post("/long")
    @idempotent(atomic=False, ttl=7 * 86400)
    def long() -> Any:
        raise OperationInterrupted

    shop.post("/long")
    (line,) = shop.listed()
    assert shop.run(*decision, "--why=asked", line["key"]).exit_code == 0
    (line,) = shop.listed()
    created, expires = (datetime.fromisoformat(line[name]) for name in ("created", "expires"))
    assert (expires - created).total_seconds() > 7 * 86400 - 60


def test_where_the_result_of_a_step_is_lost_nobody_is_advised_to_release(shop):
    @shop.app.post("/lost")
    @idempotent(atomic=False)
    def lost() -> Any:
        return current_operation.step("charge", lambda: float("nan"))

    assert shop.post("/lost").status_code == 500
    (line,) = shop.listed()
    shown = shop.run("show", line["key"]).output
    assert "The result of charge could not be stored: do not release it" in shown
    assert "repeats no finished step" not in shown
    shop.run("release", "--why=asked", line["key"])
    assert shop.post("/lost").status_code == 500


def test_an_operator_gives_it_the_response_that_it_should_have_had(shop):
    key = shop.interrupt()
    given = ["--status", "201", "--body", '{"paid": 1}', "--header", "X-A: b", "--why", "paid é"]
    assert shop.run("resolve", key, *given, "--yes").output == f"{key}: every retry gets this 201\n"
    assert (shop.post().json, shop.post().headers["X-A"]) == ({"paid": 1}, "b")
    result = shop.run("resolve", key, *given, "--yes")
    assert (result.exit_code, "is completed: only what is" in result.output) == (1, True)
    (record,) = json.loads(shop.run("show", key, "--json").output)
    (entry,) = record["audit"]
    assert (entry["did"], entry["why"]) == ("resolved", "paid é")
    assert record["created"] <= entry["at"] <= record["completed"]
    shop.post("/wrong", "key")
    (line,) = shop.listed("--operation", "wrong")
    shop.run("release", line["key"], "--why", "1")
    shop.run("release", "--fail", line["key"], "--why", "2")
    for why in "3", "4":
        shop.post("/wrong", "key")
        shop.run("release", line["key"], "--why", why)
    (record,) = json.loads(shop.run("show", line["key"], "--json").output)
    assert [entry["why"] for entry in record["audit"]] == ["1", "2", "3", "4"]


def test_each_decision_is_a_line_of_the_log_which_outlives_the_record(shop, caplog):
    caplog.set_level(logging.WARNING, "flask_idempotency")
    key, me = shop.interrupt(), getpass.getuser()
    shop.run("release", key, "--why", "lost\nERROR forged", "--by", "ann")
    shop.post("/wrong", "key-2")
    wrong = shop.listed("--operation", "wrong")[0]["key"]
    shop.run("release", "--fail", wrong, "--why", "unknown")
    shop.run("resolve", wrong, "--status", "201", "--why", "paid", "--yes")
    shop.run("forget", "--key", "key-2", "--operation", "wrong", "--yes", "--by", "bob")
    lines = [each for each in caplog.records if hasattr(each, "did")]
    assert [each.getMessage() for each in lines] == [
        rf"operator released: operation order, id {key}, origin cli, by ann, why lost\nERROR forged",
        f"operator failed: operation wrong, id {wrong}, status 500, origin cli, by {me}, why unknown",
        f"operator resolved: operation wrong, id {wrong}, status 201, origin cli, by {me}, why paid",
        f"operator erased: operation wrong, id {wrong}, records 1, origin cli, by bob",
    ]
    first, *_, last = lines
    assert (first.did, first.operation, first.id, first.by) == ("released", "order", key, "ann")
    assert (last.did, last.records, last.origin) == ("erased", 1, "cli")


def test_what_is_refused_is_no_line_of_the_log(shop, caplog):
    caplog.set_level(logging.WARNING, "flask_idempotency")
    shop.post("/ok")
    (line,) = shop.listed()
    assert shop.run("release", line["key"], "--why", "x").exit_code == 1
    assert shop.run("forget", "--key", "another", "--operation", "ok", "--yes").exit_code == 1
    assert [each for each in caplog.records if hasattr(each, "did")] == []


def test_what_a_scope_has_stored_is_erased_except_what_is_undecided(shop, store):
    def forget(*options: str) -> Any:
        result = shop.run("forget", *options, "--yes", "--json")
        (row,) = json.loads(result.output)
        assert result.exit_code == (0 if any(row.values()) else 1)
        return row

    key = shop.interrupt("dead")
    for number in range(3):
        shop.post("/ok", f"key-{number}")
    shop.post("/free", "free")
    assert forget("--scope", "nobody") == {"erased": 0, "in_progress": 0, "interrupted": 0}
    assert forget("--key", "key-1", "--operation", "ok")["erased"] == 1
    with shop.app.app_context():
        records = shop.app.extensions["idempotency"].records.admin()
        keys, left = records.belonging(scope_tail(None), None)
        assert (len(keys), left) == (3, {"interrupted": 1})
        assert len(records.belonging(scope_tail(None), "ok")[0]) == 2
        (undecided,) = records.lines(2, start=bytes.fromhex(key))
        assert records.erase([*keys, undecided.hash, bytes(23)]) == 3
    left = [(line["key"], line["state"]) for line in shop.listed() if line["state"] != "erased"]
    assert left == [(key, "interrupted")]


def test_only_what_an_operator_has_seen_is_decided_or_erased(shop):
    key = shop.interrupt("dead")
    with shop.app.app_context():
        store = shop.app.extensions["idempotency"].records.admin()
        entry = AuditEntry("ann", "failed", "")
        failure = StoredResponse(500, (), b"")

        def seen() -> Any:
            return store.lines(2, start=bytes.fromhex(key))[0]

        first = seen()
        assert store.settle(first, entry, 60, failure)
        failed = seen()
        assert not store.settle(first, entry, 60)
        assert store.erase([first.hash], first.version) == 0
        assert store.settle(failed, entry, 60)
        assert store.erase([first.hash], failed.version) == 0
        assert store.erase([first.hash], seen().version) == 0, "it is released, and has not ended"
        assert store.settle(seen(), entry, 60, failure)
        assert store.notes(first.hash)[0].keys() == {"charge"}
        assert store.erase([first.hash], seen().version) == 1
        assert store.notes(first.hash) == ({}, [])
    assert shop.listed() == []


def test_what_is_released_is_out_of_its_holders_hands(shop, store, redis_server):
    def slow() -> Any:
        current_operation.steps._lease.abandon()  # as if the lease were over
        (line,) = shop.listed("--state", "interrupted")
        assert shop.run("release", "--why=asked", line["key"]).exit_code == 0
        return {}, 201

    shop.app.post("/slow", endpoint="slow")(idempotent(atomic=False)(slow))
    assert shop.post("/slow").status_code == 409
    assert shop.listed("--operation", "slow")[0]["state"] != "completed"


def test_what_the_view_gave_back_is_released(shop):
    assert shop.post("/free").status_code == 503
    assert [(line["operation"], line["state"]) for line in shop.listed()] == [("free", "released")]
    assert "1 record in all: 1 released" in shop.run("list").output


def test_what_runs_is_left_alone(shop):
    def slow() -> Any:
        (line,) = shop.listed("--state", "in_progress")
        assert line["expires"] is None, "not before its end"
        assert shop.run("release", "--why=asked", line["key"]).exit_code == 1
        assert shop.listed("--state", "interrupted") == []
        return {}, 201

    shop.app.post("/slow", endpoint="slow")(idempotent(atomic=False)(slow))
    assert shop.post("/slow").status_code == 201


def test_an_overview_counts(shop):
    def overview() -> Any:
        with shop.app.app_context():
            return shop.app.extensions["idempotency"].records.admin().overview()

    assert overview().counts == {}
    shop.interrupt()
    shop.post("/ok", "ok")
    shop.post("/free", "free")
    found = overview()
    assert found.counts == {
        "free": {"released": 1},
        "ok": {"completed": 1},
        "order": {"interrupted": 1},
    }
    assert (found.estimated, found.interrupted, found.expired) == (False, 1, 0)
    assert 0 <= found.interrupted_seconds < 60
    assert found.expired_seconds is None


def test_list_shows_the_newest_first_and_counts_all(shop):
    for number in range(3):
        shop.post("/ok", f"key-{number}")
    shop.post("/wrong", "key")
    shop.interrupt()
    lines = shop.listed()
    # Two may have been created in the same millisecond.
    assert sorted(line["operation"] for line in lines) == ["ok", "ok", "ok", "order", "wrong"]
    created = [line["created"] for line in lines]
    assert created == sorted(created, reverse=True)
    assert [line["created"] for line in shop.listed("--limit", "2")] == created[:2]
    assert [line["state"] for line in shop.listed("--operation", "wrong")] == ["failed"]
    assert shop.listed("--operation", "ok", "--state", "failed") == []
    text = shop.run("list", "--limit", "1").output.splitlines()
    assert text[2] == "only the newest 1: there are more, see --limit"
    assert text[4] == "5 records in all: 3 completed, 1 failed, 1 interrupted"
    assert text[5].startswith("waiting for a retry or an operator: 1, the oldest for ")
    assert text[1].split()[:3] == [
        lines[0]["key"],
        lines[0]["operation"],
        lines[0]["state"].replace("_", " ").split()[0],
    ]
    assert "there is no record whose digits are 00000000" in shop.run("show", "00000000").output


def test_no_command_shows_a_key_or_a_response(shop):
    """And only `show` a step's result."""
    step = shop.interrupt()
    shop.post("/ok")
    (line,) = shop.listed("--operation", "ok")
    key = line["key"]
    commands = ["list", "list --json", f"show {key}", f"show {key} --json", "check", "purge"]
    output = "".join(shop.run(*command.split()).output for command in commands)
    assert key in output
    assert KEY not in output
    assert ANSWER not in output
    (shown,) = json.loads(shop.run("show", step, "--json").stdout)
    (step,) = shown["steps"]
    assert (json.loads(step["result"]), len(step["derived_key"])) == (ANSWER, 43)


def test_the_records_of_a_scope_are_listed(shop):
    shop.post("/ok")
    with shop.app.app_context():
        store = shop.app.extensions["idempotency"].records.admin()
        (line,) = store.lines(9, tail=scope_tail(None))
        assert line.operation == "ok"
        (again,) = store.lines(9, name="ok", state="completed", tail=scope_tail(None))
        assert again.key == line.key  # Redis tells what is left to a millisecond: the expiry may differ
        assert store.lines(9, name="other", tail=scope_tail(None)) == []
        assert store.lines(9, state="failed", tail=scope_tail(None)) == []
        assert store.lines(9, tail=scope_tail("bob")) == []


def test_check_passes_a_healthy_application_and_leaves_nothing(shop, store):
    result = shop.run("check")
    assert not_ok(result).keys() <= {"persistence"}  # the tests' Redis keeps nothing on disk
    assert shop.listed() == []
    there = {
        "postgres": ["PostgreSQL", "driver", "columns", "db.session", "claim", "own pool"],
        "sql": ["SQLite", "columns", "db.session", "claim", "own pool"],
        "redis": ["memory", "persistence", "claim"],
    }
    assert list(findings(result)) == [*there[store], "scope", "routes"]


def test_check_fails_without_keys_that_other_processes_have(shop, store, tmp_path, redis_server):
    keys = [bytes(32)]
    uri = shop.app.config["SQLALCHEMY_DATABASE_URI"]
    sealed = Shop(store, tmp_path, redis_server.url, uri, IDEMPOTENCY_ENCRYPTION_KEYS=keys)
    assert sealed.post("/ok").status_code == 201
    assert findings(sealed.run("check"))["encryption"] == "ok"
    result = shop.run("check")
    assert (findings(result)["encryption"], result.exit_code) == ("FAILED", 1)
    assert shop.post("/ok", "plain").status_code == 201
    assert findings(sealed.run("check"))["encryption"] == "FAILED"  # for the newest
    assert findings(shop.run("check"))["encryption"] == "FAILED"  # for the other one
    with sealed.app.app_context():
        sealed.db.engine.dispose()


def test_a_record_is_found_by_its_key(shop):
    shop.post("/ok", "another")
    key = shop.interrupt()
    assert [line["key"] for line in shop.listed("--key", KEY, "--operation", "order")] == [key]
    result = shop.run("list", "--json", "--key", "another", "--operation", "order")
    assert (json.loads(result.stdout), result.exit_code) == ([], 1)


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_sqlite_is_purged(shop):
    shop.post("/ok", "expires")
    shop.interrupt()
    sql(shop, "update idempotency_record set expires_at = '2000-01-01 00:00:00.000'")
    assert [line["expired"] for line in shop.listed()] == [False, True], "the interrupted one stays"
    assert "waiting for a purge: 1, the oldest for " in shop.run("list").output
    assert shop.run("purge").output == "1 expired record deleted\n"
    assert shop.run("purge").output == "0 expired records deleted\n"
    assert [line["operation"] for line in shop.listed()] == ["order"]


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_times_in_sqlite_that_are_none_are_shown_as_text(shop):
    for key in "BC", "word", "number", "usual":
        shop.post("/ok", key)
    for column, value in (
        ("expires_at", "'0044-01-01 BC'"),
        ("created_at", "'soon'"),
        ("created_at", "7"),
    ):
        sql(shop, f"update idempotency_record set {column} = {value} where rowid ="
                  " (select rowid from idempotency_record where length(created_at) > 9 and"
                  " expires_at not like '%BC' limit 1)")  # fmt: skip
    assert sorted(line["created"][:2] for line in shop.listed()) == ["20", "20", "7", "so"]
    assert [line["expires"] for line in shop.listed() if "BC" in line["expires"]] == ["0044-01-01 BC"]
    for line in shop.listed():
        assert shop.run("show", line["key"]).exit_code == 0
    assert " records in all: " in shop.run("list").output


@pytest.mark.parametrize("store", ["redis"], indirect=True)
def test_what_is_no_record_in_redis_hides_no_other(shop, redis_server, tmp_path):
    shop.post("/ok", "forged")
    with redis.Redis.from_url(redis_server.url) as client:
        (name,) = client.keys(f"{tmp_path.name}\\[[*]]:record:*")
        shop.post("/ok", "usual")
        for forged in {"created": 1e300}, {"name": "\ud800"}, {"attempt": "x"}, {"state": "done"}:
            rewrite(client, name, **forged)
            assert len(shop.listed()) == 1
            assert "1 record in all: " in shop.run("list").output
        for digit in b"0123456789abcdef":  # wherever the server lists them
            client.rpush(name[:-64] + bytes([digit]) * 64, "no record")
        assert len(shop.listed()) == 1


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_sqlite_is_told_how_to_get_its_tables(shop):
    assert shop.run("create-table").output == "idempotency_record: nothing to do\n"
    sql(shop, "drop index ix_idempotency_record_expires_at")
    assert not_ok(shop.run("check")) == {"index": "FAILED"}
    assert "created the index ix_idempotency_record_expires_at" in shop.run("create-table").output
    sql(shop, "alter table idempotency_record drop column audit")
    assert not_ok(shop.run("check")) == {"columns": "FAILED"}
    assert "is there, but lacks columns (audit JSON)" in shop.run("create-table").output
    sql(shop, "drop table idempotency_record")
    result = shop.run("list")
    assert result.exit_code == 1
    assert "the table idempotency_record is missing" in result.output
    assert "flask idempotency create-table" in result.output
    assert not_ok(shop.run("check")) == {"table": "FAILED"}
    assert shop.run("create-table").output == "idempotency_record: created the table\n"
    sql(shop, "alter table idempotency_record drop column owner")
    assert not_ok(shop.run("check")).get("columns") == "FAILED"
    result = shop.run("create-table")
    assert (result.exit_code, "make a migration" in result.output) == (1, True)


def sql(shop: Shop, statement: str) -> None:
    with shop.app.app_context(), shop.db.engine.begin() as connection:
        connection.execute(sa.text(statement))


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_a_locked_sqlite_file_is_said_in_one_line(shop, tmp_path):
    key = shop.interrupt()
    with shop.app.app_context(), shop.db.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout = 0")
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    with engine.connect() as other:
        other.exec_driver_sql("BEGIN IMMEDIATE")
        result = shop.run("release", "--why=asked", key)
    engine.dispose()
    assert result.exit_code == 1
    assert result.output == "Error: database is locked\n"


@pytest.mark.parametrize("store", ["redis"], indirect=True)
def test_redis_needs_neither_tables_nor_a_purge(shop):
    shop.post("/ok")
    assert shop.run("purge").output == "0 expired records deleted\n"
    assert shop.run("create-table").output == "idempotency_record: nothing to do\n"


@pytest.mark.parametrize("store", ["redis"], indirect=True)
def test_redis_is_asked_for_our_records_alone(shop, redis_server, tmp_path):
    shop.post("/ok")
    with redis.Redis.from_url(redis_server.url) as client:
        (name,) = client.keys(f"{tmp_path.name}\\[[*]]:record:*")
        client.set(name + b"0", "somebody's")
        client.set(f"{tmp_path.name}*:record:{'0' * 64}", "another application's")
        client.set(f"{tmp_path.name}[*]:{'0' * 64}", "a lock")
    assert len(shop.listed()) == 1
    assert shop.run("show", "00000000").exit_code == 1


def test_a_client_that_decodes_replies_does_no_harm(tmp_path, redis_server):
    shop = Shop("redis", tmp_path, redis_server.url)
    key = shop.interrupt()
    with redis.Redis.from_url(redis_server.url, decode_responses=True) as client:
        shop.app.extensions["idempotency"].records.connected = lambda: client
        assert [line["key"] for line in shop.listed()] == [key]
        assert "charge" in shop.run("show", key).output
        assert not_ok(shop.run("check")).keys() <= {"persistence"}
        assert shop.run("release", "--why=asked", key).exit_code == 0
        assert shop.post().json == {"attempt": 2}


def test_redis_that_is_full_or_forgets_does_not_pass(tmp_path):
    with servers.Redis() as server:
        shop = Shop("redis", tmp_path, server.url)
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory", "100mb")
            client.config_set("maxmemory-policy", "volatile-lru")
            assert not_ok(shop.run("check"))["memory"] == "FAILED"
            client.config_set("maxmemory-policy", "noeviction")
            assert "memory" not in not_ok(shop.run("check"))
            client.replicaof("127.0.0.1", servers.free_port())
            assert not_ok(shop.run("check"))["claim"] == "FAILED"
        server.stop()
        assert not_ok(shop.run("check")) == {"claim": "FAILED", "deletion": "FAILED"}
        result = shop.run("list")
        assert (result.exit_code, result.output.count("\n")) == (1, 1)
        assert "refused" in result.output
        assert server.password not in result.output
