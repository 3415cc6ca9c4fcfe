"""``flask idempotency create-table``: what it makes, completes and leaves alone."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency
from tests.drivers import EACH
from tests.integration.commands.running import PROGRAM, ROOT, build, not_ok, once, runner
from tests.integration.migrations.tables import make_earlier


def test_create_table_creates_ours_alone_completely_and_once(world, run):
    world.sql("drop table idempotency_record, payment")
    assert run("create-table").output == "idempotency_record: created the table\n"
    assert run("create-table").output == "idempotency_record: nothing to do\n"
    assert world.sql("select to_regclass('payment')::text") == [(None,)]
    assert not not_ok(run("check"))


@EACH
def test_create_table_adds_index_and_fill_factor_to_a_table_in_use(world, run, pay):
    pay()
    world.sql("drop index ix_idempotency_record_expires_at")
    world.sql("alter table idempotency_record reset (fillfactor)")
    result = run("create-table")
    assert result.exit_code == 0
    assert "created the index ix_idempotency_record_expires_at" in result.output
    assert "set the fill factor of idempotency_record to 92" in result.output
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
    assert "-> ALTER TABLE idempotency_record SET (fillfactor = 92)" in result.output


def test_create_table_alters_no_column(world, run):
    world.sql("alter table idempotency_record drop column owner")
    result = run("create-table")
    assert result.exit_code == 1
    assert "make a migration" in result.output


def test_create_table_says_when_the_user_may_not(world, stranger):
    world.sql("drop table idempotency_record")
    result = once(build(stranger), "create-table")
    assert result.exit_code == 1
    assert "the database user may not create or alter tables here" in result.output


@pytest.mark.parametrize("store", ["postgres"])
@pytest.mark.parametrize(
    ("begin", "done"),
    [
        (lambda world: world.sql("drop table idempotency_record"), b"created the table"),
        (make_earlier, b"created the index ix_idempotency_record_leased"),
    ],
    ids=["missing", "earlier"],
)
def test_create_table_run_by_several_at_once(world, begin, done):
    begin(world)
    uri = str(world.app.config["SQLALCHEMY_DATABASE_URI"])
    arguments = [sys.executable, "-c", PROGRAM, uri, "create-table"]
    processes = [
        subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert sum(done in out for out, _ in outputs) == 1, outputs
    assert not not_ok(runner(world.app)("check"))


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


def test_a_table_that_was_reflected_before_the_extension_was_set_up_serves(world, run, pay):
    pay()
    app, db = Flask("another"), SQLAlchemy()
    app.config["SQLALCHEMY_DATABASE_URI"] = world.app.config["SQLALCHEMY_DATABASE_URI"]
    db.init_app(app)
    world.sql("drop index ix_idempotency_record_resumable")
    with app.app_context():
        db.reflect()
    Idempotency(app, db, scope=None)
    result = once(app, "create-table")
    assert result.output == "idempotency_record: created the index ix_idempotency_record_resumable\n"


def make_world_without_tables(make_world: Any, db: SQLAlchemy, **config: Any) -> Any:
    db.create_all = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return make_world(db=db, **config)
