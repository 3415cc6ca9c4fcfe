"""``flask idempotency create-table``, and every command while somebody else holds the table."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import sqlalchemy as sa
from flask_sqlalchemy import SQLAlchemy

from tests.drivers import EACH
from tests.integration.commands.purging import outside
from tests.integration.commands.running import build, build_console, not_ok, once, runner

NOTHING, CREATED = "nothing to do\n", "created the table\n"
INDEXES = [f"ix_idempotency_record_{name}" for name in ("expires_at", "leased")]


@pytest.fixture(params=["postgres", "sql"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Any, databases: Any) -> Any:
    """Runs a command, and SQL, on a database without tables of either kind."""
    taken = databases.take()
    uri = taken if request.param == "postgres" else f"sqlite:///{tmp_path}/shop.db"
    app = build(uri, IDEMPOTENCY_STORE=request.param)

    def sql(statement: str) -> None:
        with app.app_context(), app.extensions["sqlalchemy"].engine.begin() as connection:
            connection.execute(sa.text(statement))

    yield runner(app), sql
    with app.app_context():
        app.extensions["sqlalchemy"].engine.dispose()
    databases.give_back(taken)


def test_it_makes_what_is_missing_once_and_alters_nothing(anywhere):
    run, sql = anywhere
    result = run("check")
    assert not_ok(result) == {"table": "FAILED"}
    assert "-> run `flask idempotency create-table`" in result.output
    assert run("create-table").output == f"idempotency_record: {CREATED}"
    assert run("create-table").output == f"idempotency_record: {NOTHING}"
    assert run("create-table", "--json").output == "[]\n"
    assert not_ok(run("check")) == {}
    for index in INDEXES:
        sql(f"drop index {index}")
    assert not_ok(run("check")) == {"index": "FAILED"}
    created = [f"idempotency_record: created the index {index}" for index in INDEXES]
    assert run("create-table").output.splitlines() == created
    sql("alter table idempotency_record drop column owner")
    sql(f"drop index {INDEXES[0]}")
    assert not_ok(run("check")) == {"columns": "FAILED"}
    result = run("create-table")
    assert result.exit_code == 1
    lacks = "idempotency_record lacks columns, or has them of another type: owner VARCHAR(22); make a"
    assert lacks in result.output
    assert "if its records are not needed, drop the table and run" in result.output
    assert not_ok(run("check")) == {"columns": "FAILED"}, "still without the index"


@EACH
def test_it_keeps_the_records_and_creates_no_table_of_the_application(world, run, pay):
    pay()
    world.sql(f"drop table payment; drop index {INDEXES[0]}")
    done = {"table": "idempotency_record", "done": f"created the index {INDEXES[0]}"}
    assert json.loads(run("create-table", "--json").output) == [done]
    assert world.sql("select to_regclass('payment')::text") == [(None,)]
    assert (len(world.records()), not_ok(run("check"))) == (1, {})


@pytest.mark.parametrize("missing", ["table idempotency_record", f"index {INDEXES[0]}"])
def test_it_says_when_the_user_may_not(world, stranger, missing):
    world.sql(f"grant all on idempotency_record to {stranger.username}")
    world.sql(f"drop {missing}")
    result = once(build(stranger), "create-table")
    assert result.exit_code == 1
    assert re.search("permission denied|must be owner", result.output)


def test_of_several_processes_one_creates_and_the_others_find_it_done(world, background):
    world.sql(f"drop index {INDEXES[0]}")

    def create():
        with world.app.app_context():
            return world.app.extensions["idempotency"].records.admin().create()

    with outside(world) as other:
        other.execute("select pg_advisory_xact_lock(hashtext('flask idempotency create-table'))")
        other.execute(f"create index {INDEXES[0]} on idempotency_record (expires_at)")
        waiting = background(create)
        world.wait_until_blocked()
        other.connection.commit()
        assert waiting.result(10) == []


def test_a_name_that_must_be_quoted_serves_a_table(make_world, add_view):
    name = "order"
    db = SQLAlchemy()
    db.create_all = lambda: None
    world = make_world(db=db, IDEMPOTENCY_TABLE=name)
    run = runner(world.app)
    assert run("create-table").output == f"{name}: {CREATED}"
    add_view(world)
    world.sql("create table payment (id serial primary key, amount int, note text)")
    assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert world.count(f'"{name}"') == world.count() == 1
    assert run("create-table").output == f"{name}: {NOTHING}"
    assert not not_ok(run("check"))


class TestWhileItIsLocked:
    """As by a migration: no operator waits for it, and no page."""

    GAVE_UP = "canceling statement due to lock timeout"

    @pytest.fixture
    def world(self, make_world: Any) -> Any:
        """With a limit far above ours, so that what has none fails instead of hanging."""
        options = {"connect_args": {"options": "-c statement_timeout=3000"}}
        world = make_world(SQLALCHEMY_ENGINE_OPTIONS=options)
        build_console(world.app)
        world.sql(f"drop index {INDEXES[0]}")
        return world

    def test_every_command_and_page_gives_up(self, world, run):
        with outside(world) as migration:
            migration.execute("lock table idempotency_record")
            for command in (
                "list", "list --key k --operation pay", "show 12345678", "release 12345678 --why known",
                "forget --scope alice --yes", "purge", "create-table", "check",
            ):  # fmt: skip
                result = run(*command.split())
                assert (command, result.exit_code) == (command, 1)
                assert self.GAVE_UP in result.output
            assert "that no migration holds the table" in result.output
            for page in "", "records", "records/12345678":
                response = world.app.test_client().get(f"/operations/{page}")
                assert (response.status_code, self.GAVE_UP in response.text) == (503, True)

    def test_an_index_does_not_wait_for_a_view_with_requests_behind_it(self, world, run):
        with outside(world) as view:
            view.execute("lock table idempotency_record in row exclusive mode")
            result = run("create-table")
        assert (result.exit_code, self.GAVE_UP in result.output) == (1, True)
