"""An engine beside the application's, to the same database, with a few connections of its own."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.pool import QueuePool

OWN_CONNECTIONS = 9
"""The most that our threads in one process use: four for requests that are observed, two for the
console's counts, and one each for the heartbeat, the background purge and the metrics."""


def apart(engine: Engine, size: int) -> Engine:
    """An engine that connects as ``engine`` does, and never more than ``size`` times.

    It has the same dialect, whose listeners may fetch a password, and tells those for new connections,
    which may set a search path. Those for check-outs serve requests, and are not told. It opens nothing
    before it is used, and is disposed of with ``engine``. Raises SQLAlchemy's ``TimeoutError`` at once if
    every connection is in use.
    """
    there: Any = engine.pool
    pool = QueuePool(
        there._creator,  # noqa: SLF001 -- as the pool's own recreate() does
        pool_size=size,
        max_overflow=0,
        timeout=0,
        recycle=there._recycle,  # noqa: SLF001
        pre_ping=there._pre_ping,  # noqa: SLF001
        use_lifo=True,  # the fewest connections
        dialect=engine.dialect,
    )

    def connected(driver: Any, record: Any) -> None:
        for listener in engine.pool.dispatch.connect.listeners:  # those on the class are told anyway
            listener(driver, record)

    event.listen(pool, "connect", connected)
    own = Engine(pool, engine.dialect, engine.url)
    # Whoever disposes of the engine is about to drop the database, or to shut down.
    event.listen(engine, "engine_disposed", lambda _: own.dispose())
    return own
