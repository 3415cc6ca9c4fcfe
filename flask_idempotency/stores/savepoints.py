"""Savepoints held back, and a watch on the transaction: the cursor of an operation's connection.

The view's session works in savepoints, so that its ``commit()`` and ``rollback()`` leave the
operation's transaction alone. SQLAlchemy sends each SAVEPOINT, RELEASE and ROLLBACK TO as a message
of its own. None of them answers anything, so they are kept here and travel in front of the next
statement: a view costs no more round trips than without us. A statement that fails leaves the
savepoints before it in place, because the server runs a message's statements one by one.

All statements of the connection pass here, so this is also where a view's own ``COMMIT``,
``ROLLBACK`` or ``BEGIN``, sent as text, is refused: it would end the transaction that holds
the record's row.

The hook is public: psycopg2's ``connection.cursor_factory``, with a subclass of whatever cursor the
application has chosen.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from psycopg2 import extensions

from ..errors import NotAtomic

Connection = extensions.connection
Cursor = extensions.cursor

_COMMENTS = rb"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)*"
_HELD = re.compile(
    _COMMENTS + rb"(?:SAVEPOINT|RELEASE|ROLLBACK\s+(?:(?:WORK|TRANSACTION)\s+)?TO)\b[^;]*$",
    re.IGNORECASE | re.DOTALL,
)
_ENDS = re.compile(
    _COMMENTS + rb"(?:COMMIT|END|ABORT|ROLLBACK(?!\s+(?:(?:WORK|TRANSACTION)\s+)?TO\b)"
    rb"|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION)\b",
    re.IGNORECASE | re.DOTALL,
)
_INITIALS = frozenset(b"sSrRcCeEaAbBpP-/ \t\r\n")  # what a statement of interest can begin with


class Room:
    """The statements that wait, for one connection during one operation."""

    def __init__(self, connection: Connection) -> None:
        self.held: list[bytes] = []
        self.broken: NotAtomic | None = None
        self._connection = connection
        self._before: Any = connection.cursor_factory
        self._factory = _subclass(Cursor if self._before is None else self._before)

    def open(self) -> None:
        """Watch every cursor the connection makes from now on."""
        self._connection.cursor_factory = self._make

    def close(self) -> None:
        """Give the connection its own cursors back; forget what is held."""
        self._connection.cursor_factory = self._before
        self.held.clear()

    def _make(self, *args: Any, **kwargs: Any) -> Cursor:
        cursor: Any = self._factory(*args, **kwargs)
        cursor.room = self
        return cursor  # type: ignore[no-any-return]

    def keep_back(self, statement: bytes) -> bool:
        """Whether the statement was kept; raises :class:`NotAtomic` if it may not be sent at all."""
        if statement[:1] and statement[0] not in _INITIALS:
            return False
        if _HELD.match(statement):
            self.held.append(statement)
            return True
        if _ENDS.match(statement):
            self.broken = NotAtomic(
                "the view sent a statement that begins or ends a transaction; inside an atomic"
                " operation use db.session.commit(), rollback() or begin_nested()"
            )
            raise self.broken
        return False

    def take(self) -> bytes:
        """What waits, as a prefix for the next statement."""
        prefix = b"".join(statement + b";" for statement in self.held)
        self.held.clear()
        return prefix

    def flush(self) -> None:
        """Send what waits on its own, before a call that cannot carry a prefix."""
        if self.held:
            with Cursor(self._connection) as cursor:
                cursor.execute(self.take())

    def leave_autocommit(self) -> None:
        """Let psycopg2 see the transaction: it refuses a named cursor in autocommit."""
        if self._connection.autocommit:
            self._connection.autocommit = False


@lru_cache(maxsize=16)
def _subclass(base: type[Cursor]) -> type[Cursor]:
    """The application's cursor class, with its statements passing through a room."""

    class OperationCursor(base):  # type: ignore[valid-type, misc]
        room: Room

        def execute(self, query: Any, vars: Any = None) -> Any:  # noqa: A002
            if self.name is not None:
                self.room.flush()
                self.room.leave_autocommit()
                return super().execute(query, vars)
            statement = self.mogrify(query, vars)
            if self.room.keep_back(statement):
                return None
            if self.room.held:
                statement = self.room.take() + statement
            return super().execute(statement)

        def executemany(self, query: Any, vars_list: Any) -> Any:
            self.room.flush()
            return super().executemany(query, vars_list)

        def callproc(self, procname: Any, parameters: Any = None) -> Any:
            self.room.flush()
            return super().callproc(procname, parameters)

        def copy_expert(self, *args: Any, **kwargs: Any) -> Any:
            self.room.flush()
            return super().copy_expert(*args, **kwargs)

        def copy_from(self, *args: Any, **kwargs: Any) -> Any:
            self.room.flush()
            return super().copy_from(*args, **kwargs)

        def copy_to(self, *args: Any, **kwargs: Any) -> Any:
            self.room.flush()
            return super().copy_to(*args, **kwargs)

    return OperationCursor
