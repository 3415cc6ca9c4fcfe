"""What a process remembers of statements stays small."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
import sqlalchemy as sa

from flask_idempotency import idempotent

SIZE = 100_000
"""Of a text that is not to be remembered."""


def with_an_error(session, text):
    with pytest.raises(sa.exc.ProgrammingError):
        session.connection().exec_driver_sql(f"{text} from nowhere")
    session.rollback()


def with_a_cursor(session, text):
    with session.connection().connection.cursor() as cursor:
        cursor.execute(f"{text} where %s = any(%s)", (1, [1, 2]))


WAYS = (
    lambda session, text: session.execute(sa.text(text)),
    lambda session, text: session.execute(sa.select(sa.literal(text))),
    with_an_error,
    with_a_cursor,
)


def test_texts_that_are_long_leave_nothing(make_world, driver):
    options = {"pool_size": 1, "max_overflow": 0, "query_cache_size": 0}
    if driver == "psycopg":  # else it remembers the last hundred texts of each connection itself
        options["connect_args"] = {"prepare_threshold": None}
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=options)
    numbers = iter(range(10**7, 10**8))

    @world.app.post("/payments")
    @idempotent
    def pay():
        for way in WAYS:
            way(world.db.session, f"select '{f'{next(numbers)} ' * (SIZE // 9)}'")
        return {}, 201

    def requests(keys):
        for key in keys:
            assert world.post(key=str(key)).status_code == 201
        gc.collect()

    requests(range(2))
    tracemalloc.start()
    try:
        requests(range(2, 4))
        before_them = tracemalloc.get_traced_memory()[0]
        requests(range(4, 9))
        grown = tracemalloc.get_traced_memory()[0] - before_them
    finally:
        tracemalloc.stop()
    assert grown < SIZE
