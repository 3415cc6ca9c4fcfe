"""Pools come and go (``engine.dispose()``), and a new one may have the address of an old one."""

from __future__ import annotations

import sqlalchemy as sa

from flask_idempotency import idempotent
from flask_idempotency.drivers import driver_of
from tests.drivers import has_own_cursors, with_driver


def hear_nothing(*_what):
    pass


def pool_at(addresses, engine):
    """A new pool at the address of one that is gone: its room is given to objects of the same size."""
    others = []
    for _ in range(2_000):
        pool = engine.pool.recreate()
        if id(pool) in addresses:
            return pool
        others.append(pool)  # so that the next one gets other room
    # The allocator has given all of that room away, as it may: here nobody can be mistaken for another.
    return others[0]


def test_a_new_pool_at_an_old_ones_address_is_listened_to(databases, driver):
    """Otherwise a connection goes back with our cursors, and every operation on it is a TypeError."""
    taken, addresses = databases.take(), set()
    url = with_driver(taken, driver)
    engines = [sa.create_engine(url) for _ in range(30)]
    hear = driver_of(engines[0].dialect).hear
    for engine in engines:
        with engine.raw_connection() as raw:
            hear(engine.pool, raw.driver_connection, hear_nothing)
        addresses.add(id(engine.pool))
    for engine in engines:
        engine.dispose()  # its next pool takes the listeners over
    pool = pool_at(addresses - {id(engine.pool) for engine in engines}, sa.create_engine(url))
    raw = pool.connect()
    connection = raw.driver_connection
    hear(pool, connection, hear_nothing)
    assert not has_own_cursors(connection)
    raw.close()
    assert has_own_cursors(connection)
    pool.dispose()
    databases.give_back(taken)


def test_a_pool_is_listened_to_once_however_often_it_was_made_anew(make_world):
    world = make_world()

    @world.app.before_request
    def before():
        with world.db.session.connection().connection.cursor() as cursor:
            cursor.execute("select 1")

    @world.app.post("/payments")
    @idempotent
    def pay():
        return {}, 201

    with world.app.app_context():
        engine = world.db.engine
    for number in range(3):
        assert world.post(key=f"key-{number}").status_code == 201
        with engine.raw_connection() as raw:
            assert has_own_cursors(raw.driver_connection)
        assert len(engine.pool.dispatch.checkin) == 1
        engine.dispose()
