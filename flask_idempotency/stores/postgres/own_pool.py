"""An engine beside the application's, to the same database, with a few connections of its own."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, event

from flask_idempotency.drivers.sqlalchemy_private import hear_disposed, pool_beside

OWN_CONNECTIONS = 6
"""The most that one process uses beside its requests' own: four for requests that are observed, and one
each for the purge after a response and the metrics."""


def apart(engine: Engine, size: int) -> Engine:
    """An engine that connects as ``engine`` does, and never more than ``size`` times.

    It has the same dialect, whose listeners may fetch a password, and tells those for new connections,
    which may set a search path. Those for check-outs serve requests, and are not told. It opens nothing
    before it is used, and closes what is idle when ``engine`` is disposed. Raises SQLAlchemy's
    ``TimeoutError`` at once if every connection is in use.
    """
    pool = pool_beside(engine, size)

    def connected(driver: Any, record: Any) -> None:
        for listener in engine.pool.dispatch.connect.listeners:  # those on the class are told anyway
            listener(driver, record)

    event.listen(pool, "connect", connected)
    own = Engine(pool, engine.dialect, engine.url)
    # Else whoever disposes the application's engine could not drop its database.
    hear_disposed(engine, lambda _engine: own.dispose())
    return own
