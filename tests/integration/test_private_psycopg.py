"""What is private in psycopg, or not in its manual: another version may break it.

``drivers/psycopg.py`` alone uses it, see ``tests/unit/test_private_sqlalchemy.py``.
"""

from __future__ import annotations

import inspect
from functools import partial

import psycopg
import pytest

from flask_idempotency.drivers.psycopg import _forget_prepared, _Pipeline
from tests.drivers import PSYCOPG


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


@PSYCOPG
def test_psycopg_is_told_to_forget_what_it_has_prepared(driver_connection):
    book = driver_connection._prepared
    assert not book.clear()
    prepare(driver_connection, "select 1")
    _forget_prepared(driver_connection)
    assert not book.clear()
    assert driver_connection.execute("select count(*) from pg_prepared_statements").fetchone() == (0,)
