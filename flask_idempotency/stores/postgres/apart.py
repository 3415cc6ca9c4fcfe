"""An engine beside the application's, to the same database, with a few connections of its own."""

from __future__ import annotations

from sqlalchemy import Engine
from sqlalchemy.pool import QueuePool


def apart(engine: Engine, size: int) -> Engine:
    """An engine that connects as ``engine`` does, and never more than ``size`` times.

    It has the same dialect and the same listeners: they may fetch a password, or set a search path. It
    opens nothing before it is used. Raises SQLAlchemy's ``TimeoutError`` at once if every connection is
    in use.
    """
    there = engine.pool
    pool = QueuePool(
        there._creator,  # noqa: SLF001 -- as the pool's own recreate() does
        pool_size=size,
        max_overflow=0,
        timeout=0,
        recycle=there._recycle,  # noqa: SLF001
        reset_on_return=there._reset_on_return,  # noqa: SLF001
        _dispatch=there.dispatch,
        dialect=engine.dialect,
    )
    return Engine(pool, engine.dialect, engine.url)
