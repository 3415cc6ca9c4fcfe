"""``flask idempotency create-table`` and ``check`` on the tables of the release before this one."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from flask_idempotency import idempotent
from flask_idempotency.stores.postgres import upgrade
from flask_idempotency.stores.postgres.admin import PostgresAdmin
from tests.integration.commands.running import build, build_console, not_ok, once, runner
from tests.integration.migrations.catalog import CATALOG
from tests.integration.migrations.project import create_all, read
from tests.integration.migrations.tables import make_earlier


@pytest.fixture
def store():
    """Redis has no part in this."""
    return "postgres"


@pytest.fixture
def run(world):
    return runner(world.app)


@pytest.fixture
def sleeps(monkeypatch):
    """What happens between two tries to lock the table, in place of waiting; a list of actions."""
    actions, seconds = [], []

    def sleep(pause):
        seconds.append(pause)
        if actions:
            actions.pop(0)()

    monkeypatch.setattr(PostgresAdmin, "sleep", staticmethod(sleep))
    return actions, seconds


@pytest.fixture
def reader(world):
    """A transaction that has read the table and stays open, as that of a view does."""
    with world.app.app_context(), world.db.engine.connect() as connection:
        yield lambda: connection.execute(sa.text("select from idempotency_record")), connection.rollback


def test_check_advises_on_what_is_new_and_create_table_adds_it(world, run):
    as_made_now = world.sql(CATALOG)
    make_earlier(world)
    result = run("check")
    assert not_ok(result) == {"columns": "advice", "index": "advice"}
    assert "audit" in result.output
    assert result.output.count("-> run `flask idempotency create-table`, or make a migration") == 2
    assert run("create-table").output.splitlines() == [
        "idempotency_record: added the column audit",
        "idempotency_record: created the index ix_idempotency_record_leased",
    ]
    assert world.sql(CATALOG) == as_made_now
    assert not not_ok(run("check"))
    assert run("create-table").output == "idempotency_record: nothing to do\n"


def test_a_column_is_added_between_two_views_and_no_request_fails(world, run, sleeps, reader, add_view):
    make_earlier(world)
    add_view(world)
    read, end = reader
    actions, seconds = sleeps
    read()
    actions += [lambda: world.post(key="meanwhile"), end]
    assert "added the column audit" in run("create-table").output
    assert len(seconds) == 2
    assert [record.status for record in world.records()] == [201]


def test_a_table_that_is_never_free_is_left_as_it_is(world, run, sleeps, reader, monkeypatch):
    make_earlier(world)
    monkeypatch.setattr(upgrade, "TRIES", 3)  # each waits a tenth of a second
    reader[0]()
    result = run("create-table")
    assert result.exit_code == 1
    assert "always held by some transaction" in result.output
    assert len(sleeps[1]) == 3
    assert not_ok(run("check"))["columns"] == "advice"


def test_only_one_process_upgrades_and_the_others_wait_without_a_snapshot(world, run, sleeps):
    make_earlier(world)
    url = world.app.config["SQLALCHEMY_DATABASE_URI"]
    pool = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 2, "isolation_level": "SERIALIZABLE"}

    def other():
        sleeps[0][:] = [last]
        (row,) = world.sql("select count(backend_xmin) from pg_stat_activity where pid in"
                           " (select pid from pg_locks where locktype = 'advisory')")  # fmt: skip
        assert row == (0,)

    def last():
        lock.rollback()

    with world.app.app_context(), world.db.engine.connect() as lock:
        lock.execute(sa.text("select pg_advisory_xact_lock(hashtext('idempotency_record'))"))
        sleeps[0][:] = [other]
        result = once(build(url, SQLALCHEMY_ENGINE_OPTIONS=pool), "create-table")
    assert result.output.count("\n") == 2, result.output
    assert not not_ok(run("check"))


def test_an_index_that_was_left_half_built_is_made_anew_whichever_it_is(world, run):
    for index in "ix_idempotency_record_leased", "ix_idempotency_record_resumable":
        world.sql(f"update pg_index set indisvalid = false where indexrelid = '{index}'::regclass")
        assert not_ok(run("check")) == {"index": "advice"}
        assert run("create-table").output == f"idempotency_record: created the index {index}\n"
        assert not not_ok(run("check"))


def test_an_index_of_another_name_serves_and_one_with_another_condition_does_not(world, run):
    world.sql("alter index ix_idempotency_record_leased rename to odd")
    assert not not_ok(run("check"))
    world.sql("drop index odd")
    world.sql("create index odd on idempotency_record (lease_expires_at) where status is null")
    assert not_ok(run("check")) == {"index": "advice"}


def test_who_does_not_own_the_table_is_told_so(world, run, stranger):
    make_earlier(world)
    world.sql(f"grant all on idempotency_record, idempotency_record_step to {stranger.username}")
    result = once(build(stranger), "create-table")
    assert result.exit_code == 1
    assert "run this as one that may, such as the owner" in result.output


def test_rights_that_a_role_inherits_are_enough(world, stranger):
    group = f"{stranger.username}_group"
    world.sql(f"create role {group}")
    world.sql(f"grant {group} to {stranger.username}")
    world.sql(f"grant select, insert, update, delete on idempotency_record,"
              f" idempotency_record_step to {group}")  # fmt: skip
    assert not not_ok(once(build(stranger), "check"))
    assert "nothing to do" in once(build(stranger), "create-table").output
    world.sql(f"drop owned by {group}")
    world.sql(f"drop role {group}")


class TestPartitioned:
    @pytest.fixture
    def world(self, make_world):
        """The table of the records in two partitions, by hash of the key."""
        world = make_world()
        make_earlier(world)
        world.sql("alter table idempotency_record rename to old")
        world.sql("create table idempotency_record (like old) partition by hash (key)")
        for number in 0, 1:
            world.sql(
                f"create table part_{number} partition of idempotency_record for values"
                f" with (modulus 2, remainder {number}) with (fillfactor = 92)"
            )
        world.sql("alter table idempotency_record add primary key (key)")
        world.sql("drop table old")
        return world

    def test_the_advice_is_what_works_there(self, world, run):
        result = run("check")
        assert not_ok(result) == {"columns": "advice", "index": "FAILED"}
        for line in run("check").output.splitlines():
            if " -> CREATE INDEX" in line:
                world.sql(line.partition("-> ")[2])
        assert run("create-table").output == "idempotency_record: added the column audit\n"
        assert not not_ok(run("check"))

    def test_each_partition_has_a_fill_factor(self, world, run):
        world.sql("alter table part_1 reset (fillfactor)")
        result = run("check")
        assert not_ok(result)["fill factor"] == "advice"
        assert "-> ALTER TABLE part_1 SET (fillfactor = 92)" in result.output

    def test_create_table_adds_the_column_and_says_what_it_cannot_do(self, world, run):
        result = run("create-table")
        assert result.exit_code == 1
        assert "partitions" in result.output
        assert "columns" not in not_ok(run("check"))


def test_in_a_sqlite_file_it_is_the_same(tmp_path):
    uri = f"sqlite:///{tmp_path}/shop.db"
    make = lambda: build(uri, IDEMPOTENCY_STORE="sql")  # noqa: E731
    assert once(make(), "create-table").exit_code == 0
    read(make(), "drop index ix_idempotency_record_leased")
    read(make(), "alter table idempotency_record drop column audit")
    assert not_ok(once(make(), "check")) == {"columns": "advice", "index": "FAILED"}
    assert once(make(), "create-table").output.splitlines() == [
        "idempotency_record: added the column audit",
        "idempotency_record: created the index ix_idempotency_record_leased",
    ]
    assert not not_ok(once(make(), "check"))
    read(make(), "alter table idempotency_record drop column name")
    assert not_ok(once(make(), "check")) == {"columns": "FAILED"}
    assert "make a migration" in once(make(), "create-table").output


@pytest.mark.parametrize("kind", ["postgres", "sqlite"])
def test_records_that_no_request_finds_are_noticed_by_the_length_of_their_keys(database_of, kind):
    app = build(database_of(kind), IDEMPOTENCY_STORE="sql")
    app.post("/payments", endpoint="pay")(idempotent(dict))
    create_all(app)
    for key in "one", "two":
        app.test_client().post("/payments", headers={"Idempotency-Key": key})
    assert not not_ok(once(app, "check"))
    longer = "key || key" if kind == "postgres" else "cast(key || key as blob)"
    read(app, f"update idempotency_record set key = {longer} where attempt = 1")
    result = once(app, "check")
    assert not_ok(result) == {"keys": "advice"}
    assert "2 of the first 1,000 records" in result.output


@pytest.mark.parametrize("kind", ["postgres", "sqlite"])
def test_the_consoles_table_is_advised_made_and_completed(database_of, kind):
    make = lambda: build_console(build(database_of(kind), IDEMPOTENCY_STORE="sql"))  # noqa: E731
    create_all(build(database_of(kind), IDEMPOTENCY_STORE="sql"))
    result = once(make(), "check")
    assert not_ok(result) == {"counts": "advice"}
    assert "-> run `flask idempotency create-table`, or make a migration" in result.output
    made = "idempotency_record: created the table of the console's counts\n"
    assert once(make(), "create-table").output == made
    assert not not_ok(once(make(), "check"))
    read(make(), "alter table idempotency_record_count rename column outcome to other")
    assert not_ok(once(make(), "check")) == {"counts": "advice"}


@pytest.fixture
def database_of(postgres, tmp_path):
    urls = {"postgres": postgres.database("counts"), "sqlite": f"sqlite:///{tmp_path}/shop.db"}
    return urls.get
