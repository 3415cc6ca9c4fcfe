"""Savepoints held back, and a watch on the transaction: what happens on an operation's connection.

The view's session works in savepoints, so that its ``commit()`` and ``rollback()`` leave the
operation's transaction alone. SQLAlchemy sends each SAVEPOINT, RELEASE and ROLLBACK TO as a message
of its own. None of them answers anything, so they are kept here and travel in front of the next
statement: a view costs no more round trips than without us. A statement that fails leaves the
savepoints before it in place, because the server runs a message's statements one by one. (It parses
the whole message first. A syntax error is a mistake in the code, and ends the operation: the
savepoint before it never ran.)

All statements of the connection pass here, so this is also where a view's own ``COMMIT``,
``ROLLBACK`` or ``BEGIN``, sent as text or through the connection, is refused: it would end the
transaction that holds the record's row.

Both hooks are public: the ``do_...`` methods of SQLAlchemy's dialect, and psycopg2's
``connection.cursor_factory``, with a subclass of whatever cursor the application has chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, NoReturn, cast

from psycopg2 import extensions
from sqlalchemy import Connection as SqlConnection
from sqlalchemy import Dialect

from ..core.sqltext import ends_transaction
from ..errors import NotAtomic

Connection = extensions.connection
Cursor = extensions.cursor

_ROOM = "flask_idempotency"  # in SQLAlchemy's ``connection.info``


class Room:
    """The statements that wait, for one connection during one operation."""

    def __init__(self, connection: SqlConnection) -> None:
        driver = connection.connection.driver_connection
        assert isinstance(driver, Connection)  # noqa: S101 -- init_app refuses other drivers
        self.driver = driver
        self.broken: NotAtomic | None = None
        self._held: list[str] = []
        self.exposed = False
        self._info = connection.info
        self._before: Any = driver.cursor_factory
        if type(driver) is Connection:
            self._factory = _subclass(Cursor if self._before is None else self._before)
        else:  # a class of the application's may have cursors of its own, such as LoggingConnection
            self._factory = _subclass(cast("Any", type(driver.cursor())))

    def open(self) -> None:
        """Hold savepoints back from now on, and watch every cursor that the connection makes."""
        self._info[_ROOM] = self
        self.driver.cursor_factory = self._make

    def close(self) -> None:
        """Give the connection its own cursors back; forget what is held."""
        self._info.pop(_ROOM, None)
        self.driver.cursor_factory = self._before
        self._held.clear()

    def _make(self, *args: Any, **kwargs: Any) -> Cursor:
        cursor: Any = self._factory(*args, **kwargs)
        cursor.room = self
        return cursor  # type: ignore[no-any-return]

    def hold(self, statement: str) -> None:
        """Keep a statement that answers nothing until the next one is sent."""
        self._held.append(statement)

    def expose(self) -> None:
        """Hold nothing back any more: the view may use the connection in ways that pass by here."""
        self.exposed = True
        self.flush()

    def guard(self, query: Any) -> None:
        """Raise :class:`NotAtomic` for a query that would begin or end a transaction.

        Reads the query as the view wrote it, without the values, which are a client's.
        """
        if isinstance(query, bytes):
            query = query.decode("latin-1")
        elif not isinstance(query, str):  # psycopg2.sql
            query = query.as_string(self.driver)
        if ends_transaction(query):
            self.refuse("the view sent a statement that begins or ends a transaction")

    def refuse(self, what: str) -> NoReturn:
        """Break the operation for good: what the view did would split it from its record."""
        self.broken = NotAtomic(
            f"{what}; inside an atomic operation use db.session.commit(), rollback() or begin_nested()"
        )
        raise self.broken

    def take(self) -> bytes:
        """What waits, as a prefix for the next statement."""
        prefix = "".join(statement + ";" for statement in self._held)
        self._held.clear()
        return prefix.encode()

    def flush(self) -> None:
        """Send what waits on its own, before a call that cannot carry a prefix."""
        if self._held:
            with Cursor(self.driver) as cursor:
                cursor.execute(self.take())

    def leave_autocommit(self) -> None:
        """Let psycopg2 see the transaction: it refuses a named cursor in autocommit."""
        if self.driver.autocommit:
            self.driver.autocommit = False


def hold_back(dialect: Dialect) -> None:
    """Let a dialect leave its savepoints with the room, where a connection has one.

    It also refuses to commit or roll back the transaction that the room is there for.
    """
    if hasattr(dialect.do_savepoint, "__wrapped__"):
        return
    for method, words in (
        ("do_savepoint", "SAVEPOINT"),
        ("do_release_savepoint", "RELEASE SAVEPOINT"),
        ("do_rollback_to_savepoint", "ROLLBACK TO SAVEPOINT"),
    ):
        setattr(dialect, method, _holding(getattr(dialect, method), words, dialect))
    for method in ("do_commit", "do_rollback"):
        setattr(dialect, method, _refusing(getattr(dialect, method)))


def _holding(
    send: Callable[[SqlConnection, str], None], words: str, dialect: Dialect
) -> Callable[[SqlConnection, str], None]:
    quote = dialect.identifier_preparer.quote

    @wraps(send)
    def hold_or_send(connection: SqlConnection, name: str) -> None:
        room: Room | None = connection.info.get(_ROOM)
        if room is None or room.exposed:
            send(connection, name)
        else:
            room.hold(f"{words} {quote(name)}")

    return hold_or_send


def _refusing(end: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(end)
    def end_or_refuse(connection: Any) -> None:
        # SQLAlchemy hands over a pooled connection, a stand-in for one, or the driver's.
        driver = getattr(connection, "driver_connection", connection)
        room = getattr(getattr(driver, "cursor_factory", None), "__self__", None)
        if isinstance(room, Room):
            room.refuse("the view ended the operation's transaction")
        end(connection)

    return end_or_refuse


@lru_cache(maxsize=16)
def _subclass(base: type[Cursor]) -> type[Cursor]:
    """The application's cursor class, with its statements passing through a room."""

    class OperationCursor(base):  # type: ignore[valid-type, misc]
        room: Room

        def execute(self, query: Any, vars: Any = None) -> Any:  # noqa: A002
            self.room.guard(query)
            if self.name is not None:
                self.room.flush()
                self.room.leave_autocommit()
                return super().execute(query, vars)
            prefix = self.room.take()
            return super().execute(prefix + self.mogrify(query, vars))

        def executemany(self, query: Any, vars_list: Any) -> Any:
            self.room.guard(query)
            self.room.flush()
            return super().executemany(query, vars_list)

        def callproc(self, procname: Any, parameters: Any = None) -> Any:
            self.room.flush()
            return super().callproc(procname, parameters)

        def copy_expert(self, sql: Any, *args: Any, **kwargs: Any) -> Any:
            self.room.guard(sql)
            self.room.flush()
            return super().copy_expert(sql, *args, **kwargs)

        def copy_from(self, *args: Any, **kwargs: Any) -> Any:
            self.room.flush()
            return super().copy_from(*args, **kwargs)

        def copy_to(self, *args: Any, **kwargs: Any) -> Any:
            self.room.flush()
            return super().copy_to(*args, **kwargs)

    return OperationCursor
