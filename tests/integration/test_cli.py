"""``flask idempotency`` on real servers, whole and broken."""

from __future__ import annotations

import configparser
import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy

import servers
from flask_idempotency import Idempotency, idempotent
from flask_idempotency.cli import cli

ROOT = Path(__file__).parents[2]
KEY, ANSWER = "canary-key-7f3a", "canary-answer-91c2"
EXPIRE_OLDEST = """update idempotency_record set expires_at = clock_timestamp()
 where key = (select key from idempotency_record order by created_at limit 1)"""

IN_A_PROCESS = """
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
cli.main(sys.argv[2:], obj=ScriptInfo(create_app=lambda: app))
"""


def build(uri: Any, **config: Any) -> Flask:
    """A small application of its own, on servers that need not be there."""
    app = Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = uri
    app.config.update(config)
    db = SQLAlchemy(app)
    Idempotency(app, db, scope=None)
    return app


def runner(app: Flask) -> Callable[..., Any]:
    """Runs commands on an application. What is not an error message fails the test."""

    def run(*arguments: str) -> Any:
        result = app.test_cli_runner().invoke(cli, arguments)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


def once(app: Flask, *arguments: str) -> Any:
    """Run one command on an application that is not needed any more."""
    try:
        return runner(app)(*arguments)
    finally:
        with app.app_context():
            app.extensions["sqlalchemy"].engine.dispose()


@pytest.fixture
def run(world: Any) -> Callable[..., Any]:
    return runner(world.app)


@pytest.fixture
def pay(world: Any) -> Callable[..., Any]:
    """Sends a request to a view of the operation ``pay``."""

    @world.app.post("/payments", endpoint="pay")
    @idempotent
    def view() -> Any:
        world.db.session.add(world.Payment(amount=request.get_json()["amount"]))
        world.db.session.commit()
        return {"secret": ANSWER}, 201

    return world.post


@pytest.fixture
def stranger(world: Any) -> Iterator[sa.URL]:
    """The world's database for a user without any right in it."""
    role = f"stranger_{secrets.token_hex(4)}"
    world.sql(f"create role {role} login password '{role}'")
    world.sql("revoke create on schema public from public")
    yield sa.make_url(world.app.config["SQLALCHEMY_DATABASE_URI"]).set(username=role, password=role)
    world.sql(f"drop owned by {role}")
    world.sql(f"drop role {role}")


def findings(result: Any) -> dict[str, str]:
    """The checks by subject, and how each went."""
    lines = [line for line in result.stdout.splitlines() if line[:1] != " "]
    return {line[8:22].strip(): line[:8].strip() for line in lines}


def not_ok(result: Any) -> dict[str, str]:
    """The checks that were not ok; the exit code agrees with them."""
    found = {name: level for name, level in findings(result).items() if level != "ok"}
    assert result.exit_code == ("FAILED" in found.values()), result.output
    explained = found.keys() - {"claim", "db.session", "deletion"}  # their messages say what to do
    assert result.output.count("-> ") >= len(explained)
    return found


def test_the_entry_point_is_the_group():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    point = setup["options.entry_points"]["flask.commands"]
    assert point.split() == ["idempotency", "=", "flask_idempotency.cli:cli"]


def test_every_command_explains_itself():
    run = runner(Flask("any"))
    tables, records = {"create-table", "check", "purge"}, {"stats", "list", "show", "release", "resume"}
    assert set(cli.commands) == tables | records
    for name in cli.commands:
        assert name in run("--help").output
        assert len(run(name, "--help").output) > 300


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_an_application_without_the_extension_is_told_so(command):
    result = runner(Flask("bare"))(command, *["0123abcd"] * (command in {"show", "release"}))
    assert result.exit_code == 1
    assert result.output.startswith("Error: this application has no Idempotency: call")


@pytest.mark.parametrize("command", ["stats", "list", "purge"])
def test_a_missing_table_is_named_with_its_cure(world, run, command):
    world.sql("drop table idempotency_record")
    result = run(command)
    assert result.exit_code == 1
    assert "Error: the table idempotency_record is missing or not up to date" in result.output
    assert "flask idempotency create-table" in result.output


@pytest.mark.parametrize("command", ["create-table", "stats", "list", "purge"])
def test_without_postgres_a_command_says_so_in_one_line(command):
    port = servers.free_port()
    result = once(build(f"postgresql+psycopg2://me:hush@127.0.0.1:{port}/shop"), command)
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert result.output.count("\n") == 1
    assert "refused" in result.output
    assert "hush" not in result.output


# create-table


def test_create_table_creates_ours_alone_completely_and_once(world, run):
    world.sql("drop table idempotency_record, payment")
    assert run("create-table").output == "idempotency_record: created the table\n"
    assert run("create-table").output == "idempotency_record: nothing to do\n"
    assert world.sql("select to_regclass('payment')::text") == [(None,)]
    assert not not_ok(run("check"))


def test_create_table_adds_index_and_fill_factor_to_a_table_in_use(world, run, pay):
    pay()
    world.sql("drop index ix_idempotency_record_expires_at")
    world.sql("alter table idempotency_record reset (fillfactor)")
    result = run("create-table")
    assert result.exit_code == 0
    assert "created the index on expires_at" in result.output
    assert "set the fill factor to 80" in result.output
    assert not not_ok(run("check"))
    assert len(world.records()) == 1


def test_an_index_that_was_left_half_built_is_noticed_and_made_anew(world, run):
    world.sql(
        "update pg_index set indisvalid = false"
        " where indexrelid = 'ix_idempotency_record_expires_at'::regclass"
    )
    assert not_ok(run("check")) == {"index": "FAILED"}
    assert "created the index" in run("create-table").output
    assert not not_ok(run("check"))


def test_a_fill_factor_that_somebody_chose_is_left_alone(world, run):
    world.sql("alter table idempotency_record set (fillfactor = 95)")
    assert run("create-table").output == "idempotency_record: nothing to do\n"
    result = run("check")
    assert not_ok(result) == {"fill factor": "advice"}
    assert "-> ALTER TABLE idempotency_record SET (fillfactor = 80)" in result.output


def test_create_table_alters_no_column(world, run):
    world.sql("alter table idempotency_record drop column owner")
    result = run("create-table")
    assert result.exit_code == 1
    assert "make a migration" in result.output


def test_create_table_says_when_the_user_may_not(world, stranger):
    world.sql("drop table idempotency_record")
    result = once(build(stranger), "create-table")
    assert result.exit_code == 1
    assert "the database user may not create tables here" in result.output


@pytest.mark.parametrize("store", ["postgres"])
def test_create_table_run_by_several_at_once(world):
    world.sql("drop table idempotency_record")
    uri = str(world.app.config["SQLALCHEMY_DATABASE_URI"])
    arguments = [sys.executable, "-c", IN_A_PROCESS, uri, "create-table"]
    processes = [
        subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert sum(b"created the table" in out for out, _ in outputs) == 1, outputs


def test_a_table_in_a_schema_with_an_odd_name_and_a_naming_convention(make_world, store):
    metadata = sa.MetaData(schema="Odd Schema", naming_convention={"ix": "odd %(column_0_N_name)s"})
    world = make_world_without_tables(make_world, SQLAlchemy(metadata=metadata))
    run = runner(world.app)
    world.sql('create schema "Odd Schema"')
    assert "created the table" in run("create-table").output
    world.sql('drop index "Odd Schema"."odd expires_at"')
    assert not_ok(run("check")) == {"index": "FAILED"}
    assert "created the index" in run("create-table").output
    assert not not_ok(run("check"))


def make_world_without_tables(make_world: Any, db: SQLAlchemy) -> Any:
    db.create_all = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return make_world(db=db)


# stats and list


def test_stats_counts_each_operation_and_state(world, run, pay):
    assert run("stats").output == "no records\n"
    assert run("stats", "--json").output == "[]\n"
    for number in range(3):
        pay(key=f"key-{number}")
    world.sql(EXPIRE_OLDEST)
    world.sql(
        "insert into idempotency_record select sha256('x'), now() + interval '1 h', now(), null,"
        " null, 1, 1::int2, null, 'in_progress', 'somebody', 'other', sha256('y'), null, null"
    )
    size = len(pay(key="key-2").data)
    other, paid = json.loads(run("stats", "--json").output)
    assert (other["operation"], other["state"], other["count"]) == ("other", "in_progress", 1)
    assert (paid["operation"], paid["state"], paid["count"]) == ("pay", "completed", 3)
    assert (other["bytes"], paid["bytes"]) == (0, 3 * size)
    assert (other["expired"], paid["expired"]) == (0, 1)
    assert paid["oldest"].endswith("Z")
    head, *lines = run("stats").output.splitlines()
    assert head.split() == ["operation", "state", "count", "expired", "bytes", "oldest"]
    assert len(lines) == 2
    assert lines[1].split()[:5] == ["pay", "completed", "3", "1", str(3 * size)]
    assert len({len(line) for line in lines}) == 1, "aligned"


def test_list_shows_the_newest_first_and_filters(world, run, pay):
    for number in range(5):
        pay(key=f"key-{number}")
    world.sql(EXPIRE_OLDEST)

    def listed(*options: str) -> Any:
        return json.loads(run("list", "--json", *options).output)

    everything = listed()
    digests = [bytes(row.key).hex()[:8] for row in world.records()]
    assert [line["key"] for line in everything] == digests[::-1]
    assert [line["expired"] for line in everything] == [False] * 4 + [True]
    assert listed("--limit", "2") == everything[:2]
    assert listed("--operation", "pay", "--state", "completed") == everything
    assert listed("--operation", "nothing") == listed("--state", "in_progress") == []
    newest = everything[0]
    assert (newest["operation"], newest["state"], newest["attempt"]) == ("pay", "completed", 1)
    assert (newest["status"], newest["bytes"]) == (201, len(pay(key="key-4").data))
    assert newest["created"] <= newest["completed"] <= newest["expires"]
    lines = run("list").output.splitlines()
    assert lines[0].split()[:5] == ["key", "operation", "state", "attempt", "status"]
    assert lines[1].split()[0] == digests[-1]
    assert run("list", "--state", "unheard-of").exit_code == 2
    assert run("list", "--limit", "0").exit_code == 2


def test_no_command_shows_a_key_or_an_answer(world, run, pay):
    pay(key=KEY, user="canary-user-55d0")
    (record,) = world.records()
    world.sql("update idempotency_record set expires_at = now()")
    commands = ["stats", "stats --json", "list", "list --json", "check", "create-table", "purge"]
    output = "".join(run(*command.split()).output for command in commands)
    assert bytes(record.key).hex()[:8] in output
    for secret in (KEY, ANSWER, "canary-user-55d0", bytes(record.key).hex()[:9], record.owner):
        assert secret not in output
    for setting in ("SQLALCHEMY_DATABASE_URI", "IDEMPOTENCY_REDIS_URL"):
        if url := world.app.config.get(setting):
            assert sa.make_url(url).password not in output


# check


def test_check_passes_a_healthy_application_and_leaves_nothing(world, run, redis_server):
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushdb()
        result = run("check")
        assert client.keys() == []
    assert not not_ok(result)
    assert list(findings(result)) == [
        "PostgreSQL", "driver", "writable", "columns", "primary key", "index", "fill factor",
        "claim", "db.session", "Redis",
    ]  # fmt: skip
    assert ("not used" in result.output) == (world.store == "postgres")
    assert world.records() == []


def test_check_misses_the_table(world, run):
    world.sql("drop table idempotency_record")
    result = run("check")
    assert not_ok(result) == {"table": "FAILED"}
    assert "-> run `flask idempotency create-table`" in result.output


@pytest.mark.parametrize(
    ("change", "subject", "remedy"),
    [
        ("drop column lease_expires_at", "columns", "migration"),
        ("alter column status type integer", "columns", "migration"),
        ("alter column name type varchar(30)", "columns", "migration"),
        ("drop constraint idempotency_record_pkey", "primary key", "ADD PRIMARY KEY (key)"),
        ("set unlogged", "table", "SET LOGGED"),
    ],
)
def test_check_notices_a_table_that_is_not_ours(world, run, change, subject, remedy):
    world.sql(f"alter table idempotency_record {change}")
    result = run("check")
    assert not_ok(result) == {subject: "FAILED"}
    assert remedy in result.output
    assert world.records() == []


def test_check_misses_the_index_and_advises_on_the_fill_factor(world, run):
    world.sql("drop index ix_idempotency_record_expires_at")
    world.sql("create index half on idempotency_record (expires_at) where status = 200")
    world.sql("alter table idempotency_record reset (fillfactor)")
    result = run("check")
    assert not_ok(result) == {"index": "FAILED", "fill factor": "advice"}
    assert findings(result)["claim"] == "ok"


def test_check_needs_postgres(world):
    port = servers.free_port()
    result = once(build(f"postgresql+psycopg2://me:hush@127.0.0.1:{port}/shop"), "check")
    assert not_ok(result) == {"PostgreSQL": "FAILED"}
    assert "refused" in result.output
    assert "hush" not in result.output


def test_check_notices_missing_rights(world, stranger):
    result = once(build(stranger), "check")
    assert not_ok(result) == {"claim": "FAILED"}
    assert "may not use the table" in result.output
    world.sql(f"grant select, insert, update on idempotency_record to {stranger.username}")
    result = once(build(stranger), "check")
    assert not_ok(result) == {"deletion": "FAILED"}, "no purge could"
    world.sql("delete from idempotency_record")
    world.sql(f"grant delete on idempotency_record to {stranger.username}")
    assert not not_ok(once(build(stranger), "check"))


def test_check_notices_settings_of_the_server(world, run, postgres):
    name = world.sql("select current_database()")[0][0]
    for setting, expected in (
        ("default_transaction_read_only = on", {"writable": "FAILED"}),
        ("synchronous_commit = off", {"durability": "advice"}),
    ):
        with world.app.app_context():
            world.db.engine.dispose()
        world.sql(f"alter database {name} set {setting}")
        with world.app.app_context():
            world.db.engine.dispose()
        assert not_ok(run("check")) == expected
        world.sql(f"begin read write; alter database {name} reset all; commit")


def test_check_notices_a_standby():
    # In recovery without a primary: it takes no writes, like any standby.
    with servers.Postgres(fsync=False) as server:
        app = build(server.url)
        assert once(app, "create-table").exit_code == 0
        server.stop()
        (server._data / "standby.signal").touch()
        server.start()
        result = once(app, "check")
        purge = once(app, "purge")
    assert not_ok(result) == {"writable": "FAILED"}
    assert "connect to the primary" in result.output
    assert purge.exit_code == 1
    assert purge.output.startswith("Error: cannot")


@pytest.mark.parametrize("store", ["postgres"])
def test_check_refuses_an_engine_in_autocommit(make_world):
    world = make_world()
    app = build(
        world.app.config["SQLALCHEMY_DATABASE_URI"],
        SQLALCHEMY_ENGINE_OPTIONS={"isolation_level": "AUTOCOMMIT"},
    )
    result = once(app, "check")
    assert not_ok(result) == {"claim": "FAILED"}
    assert "AUTOCOMMIT" in result.output


def test_check_notices_a_session_that_does_not_join(world, run):
    class Stubborn(world.db.session.session_factory.class_):
        def get_bind(self, *args: Any, **kwargs: Any) -> Any:
            return world.db.engine

    world.db.session.session_factory.class_ = Stubborn
    assert not_ok(run("check")) == {"db.session": "FAILED"}
    assert world.records() == []


@pytest.mark.parametrize("store", ["hybrid"])
def test_check_needs_redis(make_world):
    world = make_world(IDEMPOTENCY_REDIS_URL=f"redis://:hush@127.0.0.1:{servers.free_port()}/0")
    result = runner(world.app)("check")
    assert not_ok(result) == {"Redis": "FAILED"}
    assert "refused" in result.output
    assert "every duplicate reaches PostgreSQL" in result.output
    assert "hush" not in result.output
    assert findings(result)["db.session"] == "ok"


@pytest.mark.parametrize("store", ["hybrid"])
@pytest.mark.parametrize(
    ("damage", "repair", "words"),
    [
        ("replicaof 127.0.0.1 1", "replicaof no one", "read only replica"),
        ("acl setuser default -eval", "acl setuser default +eval", "permission"),
        ("config set maxmemory 1", "config set maxmemory 0", "memory"),
    ],
)
def test_check_takes_the_lock_in_earnest(world, run, redis_server, damage, repair, words):
    with redis.Redis.from_url(redis_server.url) as client:
        try:
            client.execute_command(*damage.split())
            result = run("check")
        finally:
            client.execute_command(*repair.split())
    assert not_ok(result) == {"Redis": "FAILED"}
    assert words in result.stdout
    world.app.extensions["idempotency"].lock._skip_until = None  # left alone since it failed
    assert not not_ok(run("check"))


@pytest.mark.parametrize("store", ["hybrid"])
def test_check_advises_on_a_redis_that_will_be_full(world, run, redis_server):
    with redis.Redis.from_url(redis_server.url) as client:
        client.config_set("maxmemory", "100mb")
        try:
            assert not_ok(run("check")) == {"Redis memory": "advice"}
            client.config_set("maxmemory-policy", "volatile-ttl")
            assert not not_ok(run("check"))
            client.config_set("maxmemory-policy", "noeviction")
            client.execute_command("acl", "setuser", "default", "-info")
            assert not not_ok(run("check")), "INFO is not needed"
        finally:
            client.execute_command("acl", "setuser", "default", "+info")
            client.config_set("maxmemory", "0")
            client.config_set("maxmemory-policy", "noeviction")
