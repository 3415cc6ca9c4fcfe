"""psycopg 3: what only it has, and what it does with prepared statements.

Its ways to write: ``tests/differential/manuals.py``.
"""

from __future__ import annotations

from contextlib import suppress

import psycopg
import pytest
import sqlalchemy as sa

from flask_idempotency.core.errors import NotAtomic
from tests.drivers import PSYCOPG

pytestmark = PSYCOPG

PREPARED = "select count(*) from pg_prepared_statements where name ~ '^idempotency_'"
ONE_CONNECTION = {"pool_size": 1, "max_overflow": 0}


@pytest.fixture
def make_shop(make_world, add_view):
    """A function that makes an application with one pooled connection, on which we prepare."""

    def make(connect_args=None, during=lambda: None, **options):
        pool = {**ONE_CONNECTION, "connect_args": connect_args or {}}
        world = make_world(SQLALCHEMY_ENGINE_OPTIONS=pool)
        add_view(world, **options)
        add_view(world, "/does", endpoint="does", during=lambda: during(world), **options)
        for number in range(2):  # what is sent for the second time is prepared
            assert world.post(key=f"warm-{number}").status_code == 201
        return world

    return make


def raw(world):
    """Psycopg's connection, while it is in the pool."""
    with world.app.app_context():
        pooled = world.db.engine.raw_connection()
        driver = pooled.driver_connection
        pooled.close()
    return driver


def beside(world, *statements):
    """Another connection, such as a migration's."""
    url = world.app.config["SQLALCHEMY_DATABASE_URI"].replace("+psycopg", "")
    with psycopg.connect(url, autocommit=True) as other:
        for statement in statements:
            other.execute(statement)


def assert_serves(world, key):
    """Two requests, and a retry of the first."""
    first = world.post(key=key)
    assert first.status_code == 201, first.text
    assert world.post(key=f"{key}-next").status_code == 201
    assert world.post(key=key).headers["Idempotent-Replayed"] == "true"


def read(world, times):
    """Psycopg prepares what it has sent more often than five times."""
    with world.app.app_context():
        for _ in range(times):
            world.db.session.execute(sa.text("select 1")).all()
        world.db.session.rollback()


def deallocate(world):
    world.db.session.execute(sa.text("deallocate all"))


def deallocate_too_late(world):
    """All that was prepared is still there, under names that are not given again."""
    for statement in ("select 1 / 0", "deallocate all"):
        with pytest.raises(sa.exc.DBAPIError):
            world.db.session.execute(sa.text(statement))
    world.db.session.rollback()


def hide_the_record(world):
    """A message of ours fails; what it had prepared by then is there, and not prepared once more."""
    world.db.session.execute(sa.text("delete from idempotency_record"))
    world.db.session.commit()


@pytest.mark.parametrize(
    ("during", "status"), [(deallocate, 201), (deallocate_too_late, 201), (hide_the_record, 500)]
)
def test_what_a_view_does_to_prepared_statements_costs_no_later_request(
    make_shop, postgres, during, status
):
    world = make_shop(during=during)
    assert world.sql(PREPARED)[0][0] > 0
    mark = len(postgres.log)
    for number in range(3):
        assert world.post("/does", key=f"does-{number}").status_code == status
    assert_serves(world, "key")
    assert "already exists" not in postgres.log[mark:]


def psycopg_rolls_back(world):
    """It deallocates all statements of a connection, also ours, with a ROLLBACK."""
    read(world, 8)


def somebody_deallocates(world):
    """Psycopg knows nothing of it."""
    raw(world).pgconn.exec_(b"DEALLOCATE ALL")


@pytest.mark.parametrize("deallocate_all", [psycopg_rolls_back, somebody_deallocates])
def test_what_is_deallocated_between_requests_is_prepared_again(make_shop, deallocate_all):
    world = make_shop()
    deallocate_all(world)
    assert world.sql(PREPARED)[0][0] == 0
    assert_serves(world, "key")
    world.post(key="again")
    assert world.sql(PREPARED)[0][0] > 0


def test_reads_between_cost_nothing(make_shop):
    world = make_shop()
    for number in range(8):
        read(world, 1)
        assert world.sql(PREPARED)[0][0] > 0
        assert world.post(key=f"key-{number}").status_code == 201


def test_nothing_is_prepared_where_the_application_says_so(make_shop):
    assert make_shop(connect_args={"prepare_threshold": None}).sql(PREPARED)[0][0] == 0


@pytest.mark.parametrize("atomic", [True, False])
def test_a_migration_under_prepared_statements_costs_no_request(make_shop, postgres, atomic):
    world = make_shop(atomic=atomic)
    for key in "abc":
        assert_serves(world, key)
    change = "alter table idempotency_record alter fingerprint type bytes"
    beside(world, "create domain bytes as bytea", change)
    mark = len(postgres.log)
    assert_serves(world, "key")
    assert "cached plan must not change result type" in postgres.log[mark:]
    assert "SET LOCAL can only be used" not in postgres.log[mark:]


@pytest.mark.parametrize(
    ("used", "change", "back"),
    [
        # It forgets what it prepared when it rolls back, and we roll an operation back past it.
        (9, "alter table moved add column remark text", "select 1"),
        # It notes a statement as prepared as soon as it is sent, also if it cannot be parsed.
        (5, "alter table moved rename to away", "alter table away rename to moved"),
    ],
)
def test_a_migration_under_what_psycopg_prepares_costs_one_request_as_without_us(
    make_shop, used, change, back
):
    text = sa.text("select * from moved")
    world = make_shop(during=lambda world: world.db.session.execute(text).all())
    world.sql("create table moved (id int)")
    for number in range(used):
        assert world.post("/does", key=f"before-{number}").status_code == 201
    beside(world, change)
    assert world.post("/does", key="while").status_code == 500
    beside(world, back)
    assert [world.post("/does", key=key).status_code for key in ("while", "after")] == [201, 201]


def test_an_interrupted_message_leaves_no_connection_in_the_pool(make_shop, monkeypatch):
    """A worker's time-out strikes anywhere."""
    world = make_shop()
    driver, waits = raw(world), []
    original = driver.wait

    def wait(generator, *args):
        waits.append(generator)
        if len(waits) == 1:
            next(generator)
            raise SystemExit
        return original(generator, *args)

    monkeypatch.setattr(driver, "wait", wait)
    with pytest.raises(SystemExit):
        world.post(key="interrupted")
    assert driver.closed
    assert world.post(key="interrupted").status_code == 201
    world.assert_clean()


def connection_of(world):
    return world.db.session.connection().connection.driver_connection


def begin_in_a_cursors_connection(name):
    def begin(world):
        cursor = connection_of(world).cursor()
        with suppress(NotAtomic), getattr(cursor.connection, name)():
            cursor.execute("insert into payment (amount) values (7)")

    return begin


REFUSED = {
    "autocommit": lambda world: connection_of(world).set_autocommit(True),
    "read_only": lambda world: connection_of(world).set_read_only(True),
    "tpc": lambda world: connection_of(world).tpc_begin(connection_of(world).xid(1, "a", "b")),
    "transaction": begin_in_a_cursors_connection("transaction"),
    "pipeline": begin_in_a_cursors_connection("pipeline"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_what_would_change_the_transaction_is_refused(make_world, add_view, way):
    world = make_world()
    add_view(world, during=lambda: REFUSED[way](world))
    assert world.post().status_code == 500
    assert world.count() == 0
    assert world.records()[0].state == "in_progress"
    world.assert_clean()


def roll_a_savepoint_back_while_a_stream_is_read(world):
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


def send_a_long_value(world):
    """More than the sockets hold: libpq keeps the rest until somebody lets it send."""
    length = world.db.session.scalar(sa.text("select length(:it)"), {"it": "x" * 20_000_000})
    assert length == 20_000_000


@pytest.mark.parametrize("during", [roll_a_savepoint_back_while_a_stream_is_read, send_a_long_value])
def test_what_waits_for_the_next_message_arrives_with_it(make_world, add_view, during):
    world = make_world()
    add_view(world, during=lambda: during(world))
    assert world.post().status_code == 201
    assert world.count() == 1


def test_a_record_is_read_whatever_the_application_makes_of_its_types(
    make_world, add_view, assert_replayed
):
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
    assert_replayed(world.post(), world.post())
