"""The view's session is on the operation's connection, and what it leaves there.

That everything works in it as it does without us: ``tests/differential``.
"""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from flask_idempotency import current_operation, idempotent
from tests.integration.views import pay_once, protect


def pid(connection):
    return connection.scalar(sa.text("select pg_backend_pid()"))


def test_view_and_record_share_one_backend(world, view):
    seen = []

    def pay():
        session = world.db.session
        seen.append((pid(session), pid(current_operation.connection)))
        holders = session.execute(
            sa.text(
                "select pid from pg_locks where relation = 'idempotency_record'::regclass"
                " and mode = 'RowShareLock'"
            )
        ).scalars()
        seen.append(list(holders))
        session.add(world.Payment(amount=1))
        session.commit()
        return {}, 201

    view(pay)
    assert world.post().status_code == 201
    (of_session, of_operation), holders = seen
    assert of_session == of_operation
    assert holders == [of_session]


def test_afterwards_a_session_joins_other_transactions_as_it_did_before(world):
    session = world.db.session
    with world.app.app_context():
        found = session().join_transaction_mode
        world.idempotency.run("a", lambda: session.scalar(sa.select(1)), scope="s", name="read")
        assert session().join_transaction_mode == found


def test_a_client_that_goes_away_is_noticed_in_the_view_and_nowhere_else(world):
    interval = sa.text("show client_connection_check_interval")
    protect(world, lambda: [world.db.session.scalar(interval)])
    assert world.post().json == ["500ms"]
    with world.app.app_context(), world.db.engine.connect() as connection:
        assert connection.scalar(interval) == "0"


@pytest.mark.parametrize(("status", "left"), [(201, 1), (403, 0)])
def test_what_a_view_leaves_on_its_connection_stays_if_the_response_is_stored(make_world, status, left):
    """A temporary table is made by a statement like others; a lock of the session is by none."""
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"pool_size": 1, "max_overflow": 0})
    locks = []

    @world.app.post("/payments")
    @idempotent
    def pay():
        execute = world.db.session.execute
        execute(sa.text("create temp table basket as select now() as began"))
        execute(sa.text("select pg_advisory_lock(1), pg_advisory_xact_lock(2)"))
        world.db.session.commit()
        assert execute(sa.text("select began = now() from basket")).scalar_one()
        locked = "select objid::int from pg_locks where locktype = 'advisory' order by objid"
        locks.append(list(execute(sa.text(locked)).scalars()))
        return {}, status

    assert world.post().status_code == status
    assert locks == [[1, 2]]
    found = world.sql(
        "select (select count(*) from pg_class where relname = 'basket' and relpersistence = 't'),"
        " (select count(*) from pg_locks where locktype = 'advisory')"
    )
    assert found == [(left, 1)]


def test_a_function_that_only_reads_after_the_commit_is_no_lost_work(world, view):
    def pay():
        pay_once(world)
        world.db.session.execute(sa.text("select pg_table_is_visible('payment'::regclass)"))
        return {}, 201

    view(pay)
    assert world.post().status_code == 201
    assert world.count() == 1


POSTGRES = ("postgres", "psycopg2"), ("postgres", "psycopg")


@pytest.mark.parametrize(("store", "driver"), [*POSTGRES, ("sql", "psycopg2")], indirect=True)
@pytest.mark.parametrize(
    ("begins", "ends", "rows"),
    [
        (False, "rollback", [1, 3]),
        (False, "commit", [1, 2, 3]),
        (True, "rollback", [3]),
        (True, "close", [3]),
        (True, "commit", [1, 2, 3]),
    ],
)
def test_the_operations_connection_is_in_the_sessions_transaction_if_there_is_one(
    make_world, store, tmp_path, begins, ends, rows
):
    here = {"SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path}/shop.db"} if store == "sql" else {}
    world = make_world(**here)

    def write(amount, by):
        by.execute(sa.insert(world.Payment).values(amount=amount))

    def pay():
        session = world.db.session
        if begins:
            session.execute(sa.select(world.Payment))
        write(1, current_operation.connection)
        write(2, session)
        getattr(session, ends)()
        write(3, current_operation.connection)
        return {}, 201

    protect(world, pay)
    assert world.post().status_code == 201
    assert [amount for (amount,) in world.sql("select amount from payment order by 1")] == rows
