"""What a process remembers of statements and of an application's classes stays small."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from weakref import WeakSet

import psycopg
import pytest
import sqlalchemy as sa
from flask import request
from psycopg2 import extensions

from flask_idempotency import idempotent
from flask_idempotency.drivers.parsed import note_parsed, parsed
from flask_idempotency.drivers.sqltext import LONG, TRAITS
from tests.drivers import PSYCOPG2, ways

REQUESTS = 5
"""Each with seven texts."""
MEGABYTE = 1_000_000
SIZE = 10 * LONG
"""Of a text that is not to be remembered."""
ONE_CONNECTION = {"pool_size": 1, "max_overflow": 0}


def with_orm(session, text):
    session.execute(sa.text(text))


def with_an_error(session, text):
    with pytest.raises(sa.exc.ProgrammingError):
        session.connection().exec_driver_sql(f"{text} from nowhere")
    session.rollback()


def with_values(session, text):
    with session.connection().connection.cursor() as cursor:
        cursor.execute(f"{text} where %s = any(%s)", (1, [1, 2]))


def with_many(session, text):
    with session.connection().connection.cursor() as cursor:
        cursor.executemany(text, [(), ()])


def as_bytes(session, text):
    with session.connection().connection.cursor() as cursor:
        cursor.execute(text.encode())


def with_a_value(session, text):
    session.execute(sa.select(sa.literal(text)))


def with_a_temporary_table(session, text):
    name = f"t{request.headers['Idempotency-Key']}"
    session.execute(sa.text(f"create temporary table {name} on commit drop as {text}"))
    session.commit()


WAYS = (
    *(with_orm, with_an_error, with_values, with_many, as_bytes, with_a_value),
    with_a_temporary_table,
)


@ways("where", {"in the view": "view"}, psycopg2={"before the view": "before"})
def test_texts_that_are_long_leave_nothing(make_world, driver, where):
    options = {**ONE_CONNECTION, "query_cache_size": 0}
    if driver == "psycopg":  # else it remembers the last hundred texts of each connection itself
        options["connect_args"] = {"prepare_threshold": None}
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=options)

    def send():
        for way in WAYS:
            number = f"{request.headers['Idempotency-Key']} {way.__name__} "
            way(world.db.session, f"select '{number * (SIZE // len(number))}'")

    @world.app.before_request
    def before():
        if where == "before":
            send()

    @world.app.post("/payments")
    @idempotent
    def pay():
        if where == "view":
            send()
        return {}, 201

    def requests(numbers):
        for number in numbers:
            assert world.post(key=f"{number:08}").status_code == 201
        gc.collect()

    requests(range(2))
    tracemalloc.start()
    try:
        requests(range(10, 12))
        before_them = tracemalloc.get_traced_memory()[0]
        requests(range(100, 100 + REQUESTS))
        grown = tracemalloc.get_traced_memory()[0] - before_them
    finally:
        tracemalloc.stop()
    assert grown < SIZE


def test_what_is_remembered_is_counted_in_bytes():
    """Not in characters, of which each of these has four bytes, and not in texts."""
    for number in range(300):  # of 40,000 bytes each
        text = f"select '{number}{'𝄞' * (LONG - 100)}'"
        note_parsed((text, ()))
        assert TRAITS[text] == 0
    for remembered in (TRAITS, [text for text, _ in parsed]):
        assert remembered
        assert sum(map(sys.getsizeof, remembered)) < 5 * MEGABYTE


@PSYCOPG2  # whose cursor says what was sent with its statement
def test_a_temporary_table_that_a_commit_has_dropped_is_forgotten(make_world):
    world, sent = make_world(SQLALCHEMY_ENGINE_OPTIONS=ONE_CONNECTION), []

    @world.app.post("/payments")
    @idempotent
    def pay():
        number = request.headers["Idempotency-Key"]
        world.db.session.execute(sa.text(f"create temporary table t{number} (a int) on commit drop"))
        world.db.session.commit()
        cursor = world.db.session.connection().connection.cursor()
        cursor.execute("select 1")
        sent.append(cursor.query.count(b"DROP TABLE"))
        return {}, 201

    for number in range(5):
        assert world.post(key=str(number)).status_code == 201
    assert sent[1:] == [1] * 4, "in front of a statement that was parsed before"


CURSORS = {
    "psycopg2": [("cursor_factory", extensions.cursor)] * 2,
    "psycopg": [("cursor_factory", psycopg.Cursor), ("server_cursor_factory", psycopg.ServerCursor)],
}


def test_a_cursor_class_of_each_request_does_not_stay(make_world, driver):
    world, kinds = make_world(), WeakSet()

    @world.app.post("/payments")
    @idempotent
    def pay():
        raw = world.db.session.connection().connection.driver_connection
        for (factory, base), name in zip(CURSORS[driver], [(), ("stream",)], strict=True):
            kind = type("Cursor", (base,), {})
            kinds.add(kind)
            setattr(raw, factory, kind)
            with raw.cursor(*name) as cursor:
                cursor.execute("select 1")
        return {}, 201

    for number in range(60):
        assert world.post(key=f"key-{number}").status_code == 201
    gc.collect()
    assert len(kinds) < 100
