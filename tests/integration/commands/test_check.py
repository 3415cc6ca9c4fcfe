"""``flask idempotency check`` on real servers, whole and broken."""

from __future__ import annotations

import re
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from flask import g
from redis.backoff import NoBackoff
from redis.retry import Retry

import servers
from flask_idempotency import current_operation, idempotent
from flask_idempotency.web.routes import app_state
from tests.integration.commands.running import build, findings, not_ok, once, runner
from tests.killed import Killed
from tests.sessions import factory_of
from tests.stores import BOTH


@BOTH
def test_check_passes_a_healthy_application_and_leaves_nothing(world, run, redis_server):
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushdb()
        result = run("check")
        assert client.keys() == []
    assert not not_ok(result)
    assert list(findings(result)) == [
        "PostgreSQL", "driver", "columns", "db.session", "claim", "own pool",
        *(["Redis"] if world.store == "hybrid" else []), "scope", "routes",
    ]  # fmt: skip
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
        ("drop column audit", "columns", "migration"),
        ("alter column status type integer", "columns", "migration"),
        ("alter column name type varchar(30)", "columns", "migration"),
        ("drop constraint idempotency_record_pkey", "claim", "ON CONFLICT"),
        ("set unlogged", "table", "ordinary"),
    ],
)
def test_check_notices_a_table_that_is_not_ours(world, run, change, subject, remedy):
    world.sql(f"alter table idempotency_record {change}")
    result = run("check")
    assert not_ok(result) == {subject: "FAILED"}
    assert remedy in result.output
    assert world.records() == []


def paste(world, result):
    """Run the statements that a check has shown, as one would in psql."""
    with world.app.app_context(), world.db.engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        for statement in re.findall("-> ((?:ALTER|CREATE|REINDEX) .+)", result.output):
            connection.execute(sa.text(statement))


REFUSES = """create function refuse() returns trigger language plpgsql as
    $$begin raise exception 'replica only'; end$$;
    create trigger refuse before {} on {{table}} for each row execute function refuse()"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("alter table {table} add column tenant text not null", 'column "tenant"'),
        ("alter table {table} add constraint never check (key <> key)", 'constraint "never"'),
        (REFUSES.format("insert"), "replica only"),
        (REFUSES.format("update"), "replica only"),
    ],
)
@pytest.mark.parametrize("store", ["postgres"])
def test_check_names_what_rejects_a_record(world, run, change, said):
    world.sql(change.format(table="idempotency_record"))
    result = run("check")
    assert not_ok(result) == {"claim": "FAILED"}
    assert said in result.output
    assert "let the table take what a request writes" in result.output
    assert world.records() == []


def test_check_notices_a_trigger_that_keeps_records_as_they_are(world, run):
    world.sql("create function keep() returns trigger language plpgsql as 'begin return null; end'")
    world.sql("create trigger keep before update on idempotency_record"
              " for each row execute function keep()")  # fmt: skip
    result = run("check")
    assert not_ok(result) == {"claim": "FAILED"}
    assert "trigger" in result.output


def test_check_misses_the_index_of_operations_with_a_lease(world, run):
    world.sql("drop index ix_idempotency_record_leased")
    result = run("check")
    assert not_ok(result) == {"index": "FAILED"}
    assert "-> CREATE INDEX CONCURRENTLY ix_idempotency_record_leased ON" in result.output
    paste(world, result)
    assert not not_ok(run("check"))


@pytest.mark.parametrize("index", ["expires_at", "leased"])
def test_check_notices_an_index_that_was_left_half_built(world, run, index):
    name = f"ix_idempotency_record_{index}"
    world.sql(f"update pg_index set indisvalid = false where indexrelid = '{name}'::regclass")
    result = run("check")
    assert not_ok(result) == {"index": "FAILED"}
    assert run("create-table").output == "idempotency_record: nothing to do\n"
    paste(world, result)
    assert not not_ok(run("check"))


def test_an_index_of_another_name_serves(world, run):
    world.sql("alter index ix_idempotency_record_leased rename to odd")
    assert not not_ok(run("check"))


def test_check_refuses_a_partitioned_table(world, run):
    world.sql("alter table idempotency_record rename to old")
    world.sql("create table idempotency_record (like old including indexes) partition by hash (key)")
    assert not_ok(run("check"))["table"] == "FAILED"


def test_check_misses_the_index_of_what_expires(world, run):
    world.sql("drop index ix_idempotency_record_expires_at")
    result = run("check")
    assert not_ok(result) == {"index": "FAILED"}
    assert findings(result)["claim"] == "ok"
    paste(world, result)
    assert not not_ok(run("check"))


def test_check_needs_postgres(world):
    port = servers.free_port()
    result = once(build(f"postgresql+psycopg2://me:hush@127.0.0.1:{port}/shop"), "check")
    assert not_ok(result) == {"database": "FAILED"}
    assert "refused" in result.output
    assert "hush" not in result.output


def test_check_notices_missing_rights(world, stranger):
    result = once(build(stranger), "check")
    assert not_ok(result) == dict.fromkeys(("claim", "deletion", "own pool"), "FAILED")
    assert "may not use the table idempotency_record:" in result.output
    world.sql(f"grant select, insert, update on idempotency_record to {stranger.username}")
    result = once(build(stranger), "check")
    assert not_ok(result) == {"deletion": "FAILED"}, "no purge could"
    world.sql("delete from idempotency_record")
    world.sql(f"grant delete on idempotency_record to {stranger.username}")
    assert not not_ok(once(build(stranger), "check"))


def test_check_notices_a_standby():
    # In recovery without a primary: it takes no writes, like any standby.
    with servers.Postgres(fsync=False) as server:
        app = build(server.url)
        assert once(app, "create-table").exit_code == 0
        server.stop()
        (server.data / "standby.signal").touch()
        server.start()
        result = once(app, "check")
        purge = once(app, "purge")
    assert not_ok(result) == {"claim": "FAILED", "deletion": "FAILED"}
    assert "a primary that takes writes" in result.output
    assert purge.exit_code == 1
    assert purge.output.startswith("Error: cannot")


@pytest.mark.parametrize("store", ["postgres"])
def test_check_fails_without_the_keys_that_other_processes_have(make_world):
    world = make_world(IDEMPOTENCY_ENCRYPTION_KEYS=[bytes(32)])
    world.app.post("/payments", endpoint="pay")(idempotent(lambda: ({}, 201)))
    keyless = make_world(SQLALCHEMY_DATABASE_URI=world.app.config["SQLALCHEMY_DATABASE_URI"])
    assert not not_ok(runner(keyless.app)("check"))
    assert world.post().status_code == 201
    assert not not_ok(runner(world.app)("check"))
    result = runner(keyless.app)("check")
    assert not_ok(result) == {"encryption": "FAILED"}
    assert result.exit_code == 1
    assert "set IDEMPOTENCY_ENCRYPTION_KEYS" in result.output


@pytest.mark.parametrize("store", ["postgres"])
def test_check_fails_for_a_lost_key_and_for_responses_from_before_there_were_keys(make_world):
    """Before the new processes get traffic: the last record is one of the old processes."""
    before = make_world(IDEMPOTENCY_ENCRYPTION_KEYS=[bytes(32)])
    uri = before.app.config["SQLALCHEMY_DATABASE_URI"]
    before.app.post("/payments", endpoint="pay")(idempotent(lambda: ({}, 201)))
    assert before.post().status_code == 201
    after = make_world(SQLALCHEMY_DATABASE_URI=uri, IDEMPOTENCY_ENCRYPTION_KEYS=[b"k" * 32])
    result = runner(after.app)("check")
    assert not_ok(result) == {"encryption": "FAILED"}
    assert (
        "1 responses or steps are encrypted under a key that this process does not have"
        in result.output
    )
    before.sql("update idempotency_record set headers = '[]', body = ''")
    result = runner(before.app)("check")
    assert not_ok(result) == {"encryption": "FAILED"}
    assert "IDEMPOTENCY_ACCEPT_UNSEALED" in result.output


@pytest.mark.parametrize("store", ["postgres"])
def test_check_counts_by_key_what_has_not_expired(make_world):
    """Whoever takes a key away must know whether anything is left under it."""
    old, new = bytes(32), b"k" * 32
    before = make_world(IDEMPOTENCY_ENCRYPTION_KEYS=[old])
    uri = before.app.config["SQLALCHEMY_DATABASE_URI"]
    after = make_world(SQLALCHEMY_DATABASE_URI=uri, IDEMPOTENCY_ENCRYPTION_KEYS=[new])
    for world in before, after:
        world.app.post("/payments", endpoint="pay")(idempotent(lambda: ({}, 201)))
    assert before.post(key="old").status_code == 201
    assert after.post(key="new").status_code == 201
    assert not_ok(runner(after.app)("check")) == {"encryption": "FAILED"}
    both = make_world(SQLALCHEMY_DATABASE_URI=uri, IDEMPOTENCY_ENCRYPTION_KEYS=[new, old])
    assert "under each key, newest first: 1, 1 (" in runner(both.app)("check").output
    # What has expired, or has no response, hides no other.
    before.sql(
        "insert into idempotency_record (key, expires_at, created_at, attempt, fingerprint_version,"
        " state, owner, name, fingerprint) select 'x', now() + interval '1 minute', now(), 1, 1,"
        " 'in_progress', owner, name, fingerprint from idempotency_record limit 1"
    )
    assert not_ok(runner(after.app)("check")) == {"encryption": "FAILED"}
    before.sql(
        "update idempotency_record set expires_at = created_at where key = (select key from"
        " idempotency_record where state <> 'in_progress' order by created_at limit 1)"
    )
    assert not not_ok(runner(after.app)("check"))
    after.sql("delete from idempotency_record where key = 'x'")
    after.sql("update idempotency_record set expires_at = created_at")
    assert not not_ok(runner(before.app)("check"))  # no retry needs what has expired, before any purge


@pytest.mark.parametrize("store", ["postgres"])
def test_a_key_is_needed_for_a_finished_step_too(make_world):
    old, new = bytes(32), b"k" * 32
    before = make_world(IDEMPOTENCY_ENCRYPTION_KEYS=[old])
    uri = before.app.config["SQLALCHEMY_DATABASE_URI"]

    def pay():
        current_operation.step("charge", lambda: 17)
        raise Killed

    before.app.post("/payments", endpoint="pay")(idempotent(atomic=False)(pay))
    with pytest.raises(Killed):
        before.post()
    after = make_world(SQLALCHEMY_DATABASE_URI=uri, IDEMPOTENCY_ENCRYPTION_KEYS=[new])
    assert not_ok(runner(after.app)("check")) == {"encryption": "FAILED"}
    both = make_world(SQLALCHEMY_DATABASE_URI=uri, IDEMPOTENCY_ENCRYPTION_KEYS=[new, old])
    assert "newest first: 0, 1 (" in runner(both.app)("check").output


@pytest.mark.parametrize("store", ["postgres"])
def test_check_opens_what_was_only_observed(make_world):
    world = make_world(IDEMPOTENCY_ENCRYPTION_KEYS=[bytes(32)], IDEMPOTENCY_ENFORCE=False)
    world.app.post("/payments", endpoint="pay")(idempotent(lambda: ({}, 201)))
    assert world.post().status_code == 201
    assert "encryption" not in not_ok(runner(world.app)("check"))


def test_check_notices_a_session_that_does_not_join(world, run):
    class Stubborn(factory_of(world.app, world.db).class_):
        def get_bind(self, *args: Any, **kwargs: Any) -> Any:
            return world.db.engine

    factory_of(world.app, world.db).class_ = Stubborn
    assert not_ok(run("check")) == {"db.session": "FAILED"}
    assert world.records() == []


def test_check_advises_on_redis_which_requests_do_without(make_world):
    world = make_world(IDEMPOTENCY_REDIS_URL=f"redis://:hush@127.0.0.1:{servers.free_port()}/0")
    result = runner(world.app)("check")
    assert result.exit_code == 0
    assert not_ok(result) == {"Redis": "advice"}
    assert "refused" in result.output
    assert "every duplicate reaches PostgreSQL" in result.output
    assert "hush" not in result.output
    assert findings(result)["db.session"] == "ok"


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
    assert not_ok(result) == {"Redis": "advice"}
    assert "its user may EVAL" in result.stdout
    assert words in result.stdout
    world.app.extensions["idempotency"].lock._skip_until = 0.0  # left alone since it failed
    assert not not_ok(run("check"))


def test_check_advises_on_a_client_that_makes_requests_wait(make_world, redis_server):
    for options, advice in (
        ({"retry": Retry(NoBackoff(), 3), "socket_timeout": 0.1}, "3 retries"),
        ({"retry": None, "socket_timeout": 5}, "5 s"),
        ({"retry": None, "socket_timeout": 0.1}, ""),
    ):
        with redis.Redis.from_url(redis_server.url, socket_connect_timeout=0.2, **options) as client:
            world = make_world(init={"redis": client})
            result = runner(world.app)("check")
            assert result.exit_code == 0
            assert not_ok(result) == ({"Redis client": "advice"} if advice else {})
            assert advice in result.output


@BOTH
def test_check_leaves_nothing(world, pay, redis_server):
    config = {"IDEMPOTENCY_REDIS_URL": redis_server.url} if world.store == "hybrid" else {}
    app = build(world.app.config["SQLALCHEMY_DATABASE_URI"], **config)
    assert once(app, "create-table").exit_code == 0
    assert pay().status_code == 201
    world.sql("update idempotency_record set expires_at = created_at")
    result = once(app, "check")
    assert not not_ok(result)
    assert "own pool      reaches the records" in result.output
    assert len(world.records()) == 1


def test_our_own_connections_are_made_ready_by_what_listens_for_a_check_out(world, stranger):
    app = build(stranger)
    owner = world.sql("select current_user")[0][0]
    world.sql(f"alter role {stranger.username} noinherit")
    world.sql(f"grant {owner} to {stranger.username}")

    def checked_out(driver, _record, _proxy):
        with driver.cursor() as cursor:
            cursor.execute(f"set role {owner}")
        driver.commit()

    with app.app_context():
        sa.event.listen(app.extensions["sqlalchemy"].engine, "checkout", checked_out)
    assert not_ok(once(app, "check")) == {}
    with app.app_context():
        app_state(app).records.messages.engine.dispose()


@pytest.mark.parametrize("name", ["connect", "checkout"])
def test_check_names_a_listener_that_needs_a_request(world, name):
    app = build(world.app.config["SQLALCHEMY_DATABASE_URI"])
    with app.app_context():
        sa.event.listen(app.extensions["sqlalchemy"].engine, name, lambda *_: g.tenant)
    result = once(app, "check")
    assert not_ok(result) == {"listener": "FAILED"}
    assert "AttributeError" in result.output
    assert "as with g.get(...)" in result.output
