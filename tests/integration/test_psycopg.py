"""psycopg 3: what only it has, and what it does with prepared statements.

Its ways to write: ``tests/differential/manuals.py``.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import psycopg
import pytest
import sqlalchemy as sa

from flask_idempotency import idempotent
from flask_idempotency.core.errors import NotAtomic
from tests.drivers import PSYCOPG

pytestmark = PSYCOPG

PREPARED = "select count(*) from pg_prepared_statements where name ~ '^idempotency_'"


@pytest.fixture
def shop(make_world, add_view):
    """An application with one pooled connection, on which our statements are prepared."""
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"pool_size": 1, "max_overflow": 0})
    add_view(world)
    add_view(
        world,
        "/deallocates",
        endpoint="deallocates",
        during=lambda: world.db.session.execute(sa.text("deallocate all")),
    )
    add_view(world, "/fails", endpoint="fails", during=partial(deallocate_too_late, world))
    world.post(key="warm-1")
    world.post(key="warm-2")
    assert world.sql(PREPARED)[0][0] > 0
    return world


def deallocate_too_late(world):
    for statement in ("select 1 / 0", "deallocate all"):
        with pytest.raises(sa.exc.DBAPIError):
            world.db.session.execute(sa.text(statement))
    world.db.session.rollback()


@pytest.fixture
def raw(shop):
    """Psycopg's connection, while it is in the pool."""
    with shop.app.app_context():
        pooled = shop.db.engine.raw_connection()
        driver = pooled.driver_connection
        pooled.close()
    return driver


def assert_serves(world, key):
    """Two requests, and a retry of the first."""
    first = world.post(key=key)
    assert first.status_code == 201, first.text
    assert world.post(key=f"{key}-next").status_code == 201
    assert world.post(key=key).headers["Idempotent-Replayed"] == "true"


def read(world, times):
    with world.app.app_context():
        for _ in range(times):
            world.db.session.execute(sa.text("select 1")).all()
        world.db.session.rollback()


def test_reads_between_cost_nothing_and_lose_nothing(shop):
    for number in range(8):
        read(shop, 1)
        assert shop.sql(PREPARED)[0][0] > 0
        assert shop.post(key=f"key-{number}").status_code == 201


def test_what_psycopg_deallocates_is_prepared_again(shop, raw):
    """It deallocates all statements of a connection, also ours, with a ROLLBACK."""
    for number in range(3):
        read(shop, 8)  # more than psycopg waits for until it prepares a statement
        assert shop.sql(PREPARED)[0][0] == 0
        assert_serves(shop, f"key-{number}")
        shop.post(key=f"again-{number}")
        assert shop.sql(PREPARED)[0][0] > 0


def test_what_somebody_else_deallocates_costs_no_request(shop, raw):
    raw.pgconn.exec_(b"DEALLOCATE ALL")  # of which psycopg knows nothing
    assert_serves(shop, "key")
    shop.post(key="again")
    assert shop.sql(PREPARED)[0][0] > 0


def test_what_the_view_deallocates_costs_no_request(shop):
    for number in range(3):
        assert shop.post("/deallocates", key=str(number)).status_code == 201
    assert_serves(shop, "key")


def test_a_deallocation_that_fails_costs_no_request(shop, postgres):
    """All that was prepared is still there, under names that are not given again."""
    mark = len(postgres.log)
    for number in range(3):
        assert shop.post("/fails", key=str(number)).status_code == 201
        assert_serves(shop, f"key-{number}")
    assert "already exists" not in postgres.log[mark:]


def test_nothing_is_prepared_where_the_application_says_so(make_world, add_view):
    options = {"connect_args": {"prepare_threshold": None}, "pool_size": 1, "max_overflow": 0}
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=options)
    add_view(world)
    for key in "abc":
        assert_serves(world, key)
    assert world.sql(PREPARED)[0][0] == 0


@pytest.mark.parametrize("atomic", [True, False])
def test_a_migration_under_prepared_statements_costs_no_request(make_world, add_view, postgres, atomic):
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"pool_size": 1, "max_overflow": 0})
    add_view(world, atomic=atomic)
    for key in "abc":
        assert_serves(world, key)
    with psycopg.connect(world.app.config["SQLALCHEMY_DATABASE_URI"].replace("+psycopg", "")) as other:
        other.execute("create domain bytes as bytea")
        other.execute("alter table idempotency_record alter fingerprint type bytes")
    mark = len(postgres.log)
    assert_serves(world, "key")
    assert "cached plan must not change result type" in postgres.log[mark:]
    assert "SET LOCAL can only be used" not in postgres.log[mark:]


def test_a_migration_under_what_psycopg_prepared_costs_one_request_as_without_us(make_world, add_view):
    """It forgets what it prepared when it rolls back, and we roll an operation back past it."""
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"pool_size": 1, "max_overflow": 0})
    text = sa.text("select * from payment")
    add_view(world, during=lambda: world.db.session.execute(text).all())
    for key in range(9):
        assert world.post(key=f"before-{key}").status_code == 201
    with psycopg.connect(world.app.config["SQLALCHEMY_DATABASE_URI"].replace("+psycopg", "")) as other:
        other.execute("alter table payment add column remark text")
    assert [world.post(key=f"after-{key}").status_code for key in range(3)] == [500, 201, 201]


def test_a_message_of_ours_that_fails_costs_no_later_request(make_world, add_view):
    """What it had prepared by then is there, and is not prepared once more under the same name."""
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"pool_size": 1, "max_overflow": 0})
    add_view(world)

    def hide():
        world.db.session.execute(sa.text("delete from idempotency_record"))
        world.db.session.commit()

    add_view(world, "/hides", endpoint="hides", during=hide)
    world.post(key="warm")  # what is sent for the second time is prepared
    assert world.post("/hides", key="hidden").status_code == 500
    assert_serves(world, "key")


def test_an_interrupted_message_leaves_no_connection_in_the_pool(shop, raw, monkeypatch):
    """A worker's time-out strikes anywhere."""
    original, waits = raw.wait, []

    def wait(generator, *args):
        waits.append(generator)
        if len(waits) == 1:
            next(generator)
            raise SystemExit
        return original(generator, *args)

    monkeypatch.setattr(raw, "wait", wait)
    with pytest.raises(SystemExit):
        shop.post(key="interrupted")
    assert raw.closed
    assert shop.post(key="interrupted").status_code == 201
    shop.assert_clean()


def test_a_savepoint_that_waits_is_not_lost_by_reading_on(make_world, add_view):
    world = make_world()

    def during():
        session = world.db.session
        numbers = sa.text("select generate_series(1, 4)").execution_options(yield_per=1)
        rows = session.execute(numbers)
        next(rows)
        savepoint = session.connection().begin_nested()
        assert [row[0] for row in rows] == [2, 3, 4]
        session.add(world.Payment(amount=7))
        session.flush()
        savepoint.rollback()
        session.commit()

    add_view(world, during=during)
    assert world.post().status_code == 201
    assert world.count() == 1


@pytest.mark.parametrize("name", ["set_autocommit", "set_read_only", "tpc_begin"])
def test_what_would_change_the_transaction_psycopg_itself_refuses(make_world, add_view, name):
    world = make_world()

    def during():
        driver = world.db.session.connection().connection.driver_connection
        getattr(driver, name)(True if name.startswith("set") else driver.xid(1, "a", "b"))

    add_view(world, during=during)
    assert world.post().status_code == 500
    assert world.count() == 0
    world.assert_clean()


@pytest.mark.parametrize("name", ["transaction", "pipeline"])
def test_a_cursors_connection_begins_nothing_of_its_own(make_world, add_view, name):
    world = make_world()

    def during():
        cursor = world.db.session.connection().connection.cursor()
        with suppress(NotAtomic), getattr(cursor.connection, name)():
            cursor.execute("insert into payment (amount) values (7)")

    add_view(world, during=during)
    assert world.post().status_code == 500
    assert world.count() == 0
    assert world.records()[0].state == "in_progress"


def test_a_long_value_behind_what_waits_arrives(make_world, add_view):
    """More than the sockets hold: libpq keeps the rest until somebody lets it send."""
    world = make_world()

    def during():
        world.db.session.commit()
        length = world.db.session.scalar(sa.text("select length(:it)"), {"it": "x" * 20_000_000})
        assert length == 20_000_000

    add_view(world, during=during)
    assert world.post().status_code == 201


def test_a_record_is_read_whatever_the_application_makes_of_its_types(make_world, add_view):
    class Counted(psycopg.types.string.ByteaLoader):
        def load(self, data):
            return len(data)

    world = make_world()
    add_view(world)

    def load(connection, _record):
        connection.adapters.register_loader("bytea", Counted)

    with world.app.app_context():
        sa.event.listen(world.db.engine, "connect", load)
        world.db.engine.dispose()
    first, again = world.post(), world.post()
    assert (again.status_code, again.data) == (201, first.data)


def test_a_statement_that_cannot_be_parsed_while_psycopg_prepares_it_costs_no_later_request(make_world):
    """Behind what waits: psycopg notes it as prepared as soon as it is sent."""
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"pool_size": 1, "max_overflow": 0})

    @world.app.post("/payments")
    @idempotent
    def pay():
        world.db.session.add(world.Payment(amount=1))
        world.db.session.commit()
        return {"rows": world.db.session.scalar(sa.text("select count(*) from moved"))}, 201

    world.sql("create table moved (id int)")
    for number in range(5):  # psycopg's threshold
        assert world.post(key=f"before-{number}").status_code == 201
    with psycopg.connect(world.app.config["SQLALCHEMY_DATABASE_URI"].replace("+psycopg", "")) as other:
        other.execute("alter table moved rename to away")
        other.commit()
        assert world.post(key="while").status_code == 500
        other.execute("alter table away rename to moved")
        other.commit()
    assert world.post(key="while").status_code == 201
    for number in range(8):
        assert world.post(key=f"after-{number}").status_code == 201
    assert world.sql("select count(*) from pg_prepared_statements where statement ~ 'moved'") == [(1,)]
