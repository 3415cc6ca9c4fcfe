"""What a view commits beside a response that is not stored: the operation undoes it.

Without the extension it would stay, so whoever protects a view is told, once: a counter of wrong
passwords that is committed before a 403 would never count.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from sqlalchemy import Connection

from flask_idempotency.core.logs import log

from .sources import Sessions
from .sqlalchemy_private import connections

_warned: set[tuple[bool, str]] = set()


def warn_undone(name: str, status: int, *, observed: bool = False) -> None:
    """Say once for each name that a response is not stored, and undoes what was committed."""
    if (observed, name) in _warned:
        return
    _warned.add((observed, name))
    log.warning(
        "the view of %s committed changes and responded with %d, which is not stored: %s. If they"
        " are to stay, store such responses with store=lambda response: response.status_code < 500, or"
        " write them on a connection of their own: with db.engine.begin()",
        name,
        status,
        "enforced, the changes are undone" if observed else "the changes are undone",
    )


@dataclass(eq=False)
class Commits:
    """What ``db.session`` commits during a request that is only observed."""

    sessions: Sessions
    has_committed = False
    _written: object = None  # the connection of the pool that it has written on

    def hear(self, connection: Connection) -> None:
        """Something is written on a connection: what is none of ``db.session``'s would stay."""
        session = self.sessions.present()
        if session is not None and connection in connections(session).values():
            self._written = connection.connection

    def end(self, how: str, pooled: object) -> None:
        """The transaction on a connection of a pool has ended."""
        if pooled is self._written:
            self._written = None
            self.has_committed = self.has_committed or how == "commit"


watched: ContextVar[Commits | None] = ContextVar("flask_idempotency.commits", default=None)
"""Those of the request that is observed here, until it is None again."""
