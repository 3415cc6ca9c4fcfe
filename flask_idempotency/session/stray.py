"""What a view is told once: what it writes past its operation, and commits beside a rejection.

Both would be otherwise without the extension: a write on another connection is repeated by a retry, and
a counter of wrong passwords that is committed before a 403 never counts.
"""

from __future__ import annotations

from functools import lru_cache

from sqlalchemy import Connection

from flask_idempotency.core.logs import log

from .guard import traits_of
from .operation import outer_transaction


@lru_cache(1000)
def warn_once(text: str, *values: object) -> None:
    """Log a warning, once for each text and its values."""
    log.warning(text, *values)


NO_RESPONSE = "raised an error whose response the extension does not see"


def warn_undone(name: str, status: int | None) -> None:
    """Say that a response is not stored, and undoes what was committed; None: there is no response."""
    warn_once(
        "the view of %s committed changes and %s: the changes are undone. If they are to stay, store"
        " such responses with store=lambda response: response.status_code < 500, or write them on a"
        " connection of their own: with db.engine.begin()",
        name,
        f"responded with {status}, which is not stored" if status else NO_RESPONSE,
    )


def hear(connection: Connection, statement: str) -> None:
    """A statement is about to be sent on a connection that is no operation's."""
    running = outer_transaction()
    if running is None or connection.engine in running.other_binds or not traits_of(statement).writes:
        return
    warn_once(
        "the view of %s writes on a connection of its own (db.engine, a session in another context, or"
        " another engine): that is not part of the operation, and a retry may repeat it. Use the view's"
        " db.session or current_operation.connection",
        running.operation.name,
    )
