"""What is private in SQLAlchemy and psycopg, and used here: another version may break it.

For Flask: ``tests/unit/test_private_flask.py``.
"""

from __future__ import annotations

import inspect
from functools import partial

import psycopg
import pytest
import sqlalchemy as sa

from flask_idempotency.drivers.psycopg import _Pipeline
from flask_idempotency.session.databases import most_connections
from tests.drivers import PSYCOPG


def test_a_session_knows_its_connections_by_what_they_were_asked_for_with(world):
    with world.app.app_context():
        connection = world.db.session.connection()
        known = world.db.session().get_transaction()._connections
        assert known[world.db.engine][0] is known[connection][0] is connection


def test_what_is_under_a_connection_can_be_taken_away_and_put_back(world):
    with world.app.app_context():
        connection = world.db.session.connection()
        below = connection.connection
        assert below is connection._dbapi_connection
        connection._dbapi_connection = None
        with pytest.raises(sa.exc.PendingRollbackError):
            world.db.session.scalar(sa.text("select 1"))
        assert world.db.session.connection() is connection
        connection._dbapi_connection = below
        assert world.db.session.scalar(sa.text("select 1")) == 1


def test_a_pool_can_be_asked_to_tell_its_listeners_of_a_check_out(world):
    heard = []
    with world.app.app_context(), world.db.engine.connect() as connection:
        sa.event.listen(world.db.engine.pool, "checkout", lambda *what: heard.append(what))
        fairy = connection.connection
        world.db.engine.pool.dispatch.checkout(fairy.driver_connection, fairy._connection_record, fairy)
        assert heard == [(fairy.driver_connection, fairy._connection_record, fairy)]


@pytest.fixture
def driver_connection(world):
    with world.app.app_context(), world.db.engine.connect() as connection:
        yield connection.connection.driver_connection


def prepare(connection, text):
    connection.execute(text, prepare=True).fetchall()


@PSYCOPG
def test_psycopg_knows_what_it_has_prepared_and_numbers_it(driver_connection):
    book = driver_connection._prepared
    assert (len(book._names), book._prepared_idx) == (0, 0)
    prepare(driver_connection, "select 1")
    prepare(driver_connection, "select 2")
    assert list(book._names.values()) == [b"_pg3_0", b"_pg3_1"]
    assert book._prepared_idx == 2
    driver_connection.rollback()
    assert not book._names
    assert driver_connection.execute("select count(*) from pg_prepared_statements").fetchone() == (0,)
    prepare(driver_connection, "select 1")
    assert list(book._names.values()) == [b"_pg3_2"]


@PSYCOPG
def test_a_command_of_ours_can_be_put_into_psycopgs_pipeline(driver_connection):
    """As it does with its own: None in place of the cursor that would get the result."""
    driver_connection.execute("select 1")
    with driver_connection.pipeline() as pipeline:
        command = partial(driver_connection.pgconn.send_query_params, b"savepoint ours", None)
        pipeline.command_queue.append(command)
        pipeline.result_queue.append(None)
        cursor = driver_connection.execute("select 1")
    assert cursor.fetchall() == [(1,)]
    driver_connection.execute("rollback to ours")


@PSYCOPG
def test_psycopgs_pipeline_can_be_told_to_send_no_flush(driver_connection, tmp_path):
    """What is sent, libpq itself writes down. Without our hook it is a Flush, but not every time."""
    assert "flush" in inspect.signature(psycopg.Pipeline._fetch_gen).parameters
    written = tmp_path / "sent.txt"
    with written.open("wb") as file:
        driver_connection.pgconn.trace(file.fileno())
        with driver_connection.pipeline() as pipeline:
            pipeline.__class__ = _Pipeline
            driver_connection.execute("select 1")
        driver_connection.pgconn.untrace()
    sent = [line.split("\t")[3].strip() for line in written.read_text().splitlines() if "\tF\t" in line]
    assert "Sync" in sent
    assert "Flush" not in sent


def test_a_connection_without_options_of_its_own_has_those_of_its_engine(world):
    with world.app.app_context(), world.db.engine.connect() as connection:
        assert connection._execution_options is connection.engine._execution_options
        connection.execution_options(schema_translate_map={None: "elsewhere"})
        assert connection._execution_options is not connection.engine._execution_options


@PSYCOPG
def test_psycopg_is_told_to_forget_what_it_has_prepared(driver_connection):
    book = driver_connection._prepared
    assert not book.clear()
    prepare(driver_connection, "select 1")
    assert book.clear()
    driver_connection.wait(book.maintain_gen(driver_connection))
    assert driver_connection.execute("select count(*) from pg_prepared_statements").fetchone() == (0,)


@pytest.mark.parametrize(("overflow", "most"), [(2, 5), (0, 3), (-1, None)])
def test_a_pool_knows_how_many_connections_it_may_open(overflow, most):
    engine = sa.create_engine("postgresql+psycopg2://", pool_size=3, max_overflow=overflow)
    assert most_connections(engine) == most
    assert most_connections(sa.create_engine("postgresql+psycopg2://", poolclass=sa.NullPool)) is None


def test_hearing_of_the_end_of_an_engine_costs_its_connections_nothing(world):
    """SQLAlchemy would ask whether anybody hears them, at each of their steps."""
    with world.app.app_context():
        assert not world.db.engine._has_events
