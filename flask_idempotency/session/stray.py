"""What is written past an operation, on another connection, is no part of it: its view is told once."""

from __future__ import annotations

from sqlalchemy import Connection

from flask_idempotency.core.logs import log

from .guard import traits_of
from .operation import outer_transaction
from .undone import watched

_warned: set[tuple[str, bool]] = set()


def hear(connection: Connection, statement: str) -> None:
    """A statement is about to be sent on a connection that is no operation's."""
    commits, running = watched.get(), outer_transaction()
    if (commits is None and running is None) or not traits_of(statement).writes:
        return
    if commits is not None:
        commits.hear(connection)
    if running is None or connection.engine in running.other_binds:
        return
    is_own = connection.engine.pool is running.transaction.connection.engine.pool
    if (running.operation.name, is_own) not in _warned:
        _warned.add((running.operation.name, is_own))
        log.warning(
            "the view of %s writes on %s: that is not part of the operation, and a retry may repeat it."
            " Use the view's db.session or current_operation.connection",
            running.operation.name,
            "a connection of its own (db.engine, or a session in another context)"
            if is_own
            else "an engine of its own",
        )
