"""What a view is told once: what it writes past its operation, and commits beside a rejection.

Both would be otherwise without the extension: a write on another connection is repeated by a retry, and
a counter of wrong passwords that is committed before a 403 never counts.
"""

from __future__ import annotations

from sqlalchemy import Connection, event

from flask_idempotency.core.logs import log

from .guard import traits_of
from .operation import outer_transaction
from .sources import Sessions
from .sqlalchemy_private import connections
from .transaction import observed

_told: set[tuple[str, bool, str]] = set()


def _warn(name: str, kind: bool, text: str, *values: object) -> None:
    if (name, kind, text) not in _told:
        _told.add((name, kind, text))
        log.warning(text, name, *values)


def warn_undone(name: str, status: int, *, observed: bool = False) -> None:
    """Say once for each name that a response is not stored, and undoes what was committed."""
    _warn(
        name,
        observed,
        "the view of %s committed changes and responded with %d, which is not stored: %s. If they"
        " are to stay, store such responses with store=lambda response: response.status_code < 500, or"
        " write them on a connection of their own: with db.engine.begin()",
        status,
        "enforced, the changes are undone" if observed else "the changes are undone",
    )


def hear(connection: Connection, statement: str) -> None:
    """A statement is about to be sent on a connection that is no operation's."""
    note, running = observed.get(), outer_transaction()
    if (note is None and running is None) or not traits_of(statement).writes:
        return
    if note is not None:
        note(connection)
    if running is None or connection.engine in running.other_binds:
        return
    is_own = connection.engine.pool is running.transaction.connection.engine.pool
    _warn(
        running.operation.name,
        is_own,
        "the view of %s writes on %s: that is not part of the operation, and a retry may repeat it."
        " Use the view's db.session or current_operation.connection",
        "a connection of its own (db.engine, or a session in another context)"
        if is_own
        else "an engine of its own",
    )


class Commits:
    """What ``db.session`` commits during a request that is only observed, from now on."""

    has_committed = False

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        observed.set(self._hear)

    def _hear(self, connection: Connection) -> None:
        """Something is written on a connection: what is none of ``db.session``'s would stay."""
        session = self._sessions.present()
        if session is not None and connection in connections(session):
            event.listen(connection, "commit", self._note)

    def _note(self, _connection: Connection) -> None:
        self.has_committed = True

    def end(self) -> None:
        """Hear no more."""
        observed.set(None)
