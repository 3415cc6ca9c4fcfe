"""``flask idempotency create-table``: what it makes and leaves alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import ConfigurationError, Idempotency
from tests.drivers import EACH
from tests.integration.commands.purging import outside
from tests.integration.commands.running import build, not_ok, once, runner


def test_create_table_creates_ours_alone_completely_and_once(world, run):
    world.sql("drop table idempotency_record, payment")
    assert run("create-table").output == "idempotency_record: created the table\n"
    assert run("create-table").output == "idempotency_record: nothing to do\n"
    assert world.sql("select to_regclass('payment')::text") == [(None,)]
    assert not not_ok(run("check"))


@EACH
def test_create_table_makes_every_index_that_a_table_lacks(world, run, pay):
    pay()
    for index in "expires_at", "leased":
        world.sql(f"drop index ix_idempotency_record_{index}")
    assert run("create-table").output.splitlines() == [
        f"idempotency_record: created the index ix_idempotency_record_{index}"
        for index in ("expires_at", "leased")
    ]
    assert not not_ok(run("check"))
    assert len(world.records()) == 1


def test_create_table_alters_no_column_and_then_makes_nothing(world, run):
    world.sql("alter table idempotency_record drop column attempt")
    world.sql("drop index ix_idempotency_record_expires_at")
    result = run("create-table")
    assert result.exit_code == 1
    assert (
        "idempotency_record is there, but lacks columns (attempt INTEGER). Nothing is created: make a"
        in result.output
    )
    assert "where its records are not needed, drop the table and run" in result.output
    assert not_ok(run("check")) == {"columns": "FAILED"}


@pytest.mark.parametrize(
    "missing", ["table idempotency_record", "index ix_idempotency_record_expires_at"]
)
def test_create_table_says_when_the_user_may_not(world, stranger, missing):
    world.sql(f"grant all on idempotency_record to {stranger.username}")
    world.sql(f"drop {missing}")
    result = once(build(stranger), "create-table")
    assert result.exit_code == 1
    assert re.search("permission denied|must be owner", result.output)


def test_rights_that_a_role_inherits_are_enough(world, stranger):
    group = f"{stranger.username}_group"
    world.sql(f"create role {group}")
    world.sql(f"grant {group} to {stranger.username}")
    world.sql(f"grant select, insert, update, delete on idempotency_record to {group}")
    assert not not_ok(once(build(stranger), "check"))
    assert "nothing to do" in once(build(stranger), "create-table").output
    world.sql(f"drop owned by {group}")
    world.sql(f"drop role {group}")


@pytest.mark.parametrize("store", ["postgres"])
def test_of_several_processes_one_creates_and_the_others_find_it_done(make_world, background):
    world = make_world()
    world.sql("drop index ix_idempotency_record_expires_at")

    def create():
        with world.app.app_context():
            return world.app.extensions["idempotency"].records.admin().create()

    with outside(world) as other:
        other.execute("select pg_advisory_xact_lock(hashtext('flask idempotency create-table'))")
        other.execute(
            "create index ix_idempotency_record_expires_at on idempotency_record (expires_at)"
        )
        waiting = background(create)
        world.wait_until_blocked()
        other.connection.commit()
        assert waiting.result(10) == []


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


@pytest.mark.parametrize("name", ["t" * 50, "T" * 49, "order"])
def test_the_longest_name_and_one_that_must_be_quoted_serve_a_table(make_world, add_view, name):
    world = make_world_without_tables(make_world, SQLAlchemy(), IDEMPOTENCY_TABLE=name)
    run = runner(world.app)
    assert f"{name}: created the table\n" in run("create-table").output
    add_view(world)
    world.sql("create table payment (id serial primary key, amount int, note text)")
    assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert world.count(f'"{name}"') == world.count() == 1
    assert run("create-table").output == f"{name}: nothing to do\n"
    assert not not_ok(run("check"))


def test_a_table_that_was_reflected_before_the_extension_was_set_up_is_refused(world, pay):
    pay()
    app, db = Flask("another"), SQLAlchemy()
    app.config["SQLALCHEMY_DATABASE_URI"] = world.app.config["SQLALCHEMY_DATABASE_URI"]
    db.init_app(app)
    with app.app_context():
        db.reflect()
    with pytest.raises(ConfigurationError, match=r"db.reflect\(\) .* after idempotency.init_app\(\)"):
        Idempotency(app, db, scope=None)


def make_world_without_tables(make_world: Any, db: SQLAlchemy, **config: Any) -> Any:
    db.create_all = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return make_world(db=db, **config)
