"""What is private in SQLAlchemy. No other file uses any of that.

Seen in SQLAlchemy 2.0.26, 2.0.58 and 2.1.9:

* ``_connections`` of a session's transaction has its connections by what they were asked for with,
  each as the first of several values. From 2.1.7 on the public ``connections`` has them alone.
* ``_dbapi_connection`` of a connection is what it stands on, from the pool; None if that is lost. If
  the connection is closed in a transaction, ``_close_special`` of that is called in place of ``close``.
* ``_execution_options`` are those of its engine, the same object, unless it was given some of its own.
* ``_connection_record`` of what comes from a pool is what the pool's listeners are told of it.
* ``_max_overflow`` of a pool is how many connections it may open beyond its size; -1 for any number.
* ``_creator``, ``_recycle`` and ``_pre_ping`` of a pool are arguments that it was made with.
* ``_has_events`` of an engine lets its connections look for listeners at each of their steps.

``tests/unit/test_private_sqlalchemy.py`` fails when a release changes this.
"""

# ruff: noqa: SLF001 -- this is what the file is for

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Engine, Pool, PoolProxiedConnection, QueuePool, event
from sqlalchemy.orm import Session

# Whole functions: in a request, a call for each attribute would be felt.


def connections(session: Session) -> dict[Engine | Connection, Connection]:
    """The connections of the session's present transaction, by what they were asked for with."""
    transaction = session.get_transaction()
    if transaction is None:
        return {}
    return {bind: found[0] for bind, found in transaction._connections.items()}


def connection_to(session: Session, bind: Engine | Connection) -> Connection | None:
    """That of the session's present transaction which was asked for with ``bind``, or None."""
    transaction = session.get_transaction()
    if transaction is None or bind not in transaction._connections:
        return None
    return transaction._connections[bind][0]


def has_options(session: Session) -> bool:
    """Return True if the session's transaction has options, such as ``schema_translate_map``.

    They end with it, and what is written above the view would go elsewhere.
    """
    for each in connections(session).values():  # get_execution_options() would make two calls
        if each._execution_options is not each.engine._execution_options:
            return True
    return False


class StandsUnder:
    """What stands under a connection in the place of what comes from a pool."""

    def close(self) -> None:
        """Nothing."""

    def _close_special(self, *_how: object, **_more: object) -> None:
        """See :meth:`close`."""
        self.close()


def put_under(connection: Connection, below: StandsUnder | PoolProxiedConnection | None) -> None:
    """Let a connection stand on something else. What SQLAlchemy knows of its transaction goes on.

    There is no public way to change what is under a connection in use.
    """
    connection._dbapi_connection = below  # type: ignore[assignment]


def tell_of_check_out(pool: Pool, pooled: Any) -> None:
    """Let the pool's listeners do what they do when a connection is taken from it."""
    pool.dispatch.checkout(pooled.dbapi_connection, pooled._connection_record, pooled)


def most_beyond(pool: QueuePool) -> int:
    """How many connections a pool may open beyond its size; -1 for any number."""
    return pool._max_overflow


def pool_beside(engine: Engine, size: int, wait_seconds: float) -> QueuePool:
    """A pool that connects as the engine's does, and never more than ``size`` times.

    It has none of the other's listeners. ``wait_seconds`` is how long to wait for a connection.
    """
    there: Any = engine.pool
    return QueuePool(
        there._creator,  # as the pool's own recreate() does
        pool_size=size,
        max_overflow=0,
        timeout=wait_seconds,
        recycle=there._recycle,
        pre_ping=there._pre_ping,
        use_lifo=True,  # the fewest connections
        dialect=engine.dialect,
    )


def hear_disposed(engine: Engine, hear: Callable[[Engine], None]) -> None:
    """Tell ``hear`` when the engine is disposed, at no cost to its connections."""
    has_events = engine._has_events
    event.listen(engine, "engine_disposed", hear)
    engine._has_events = has_events
