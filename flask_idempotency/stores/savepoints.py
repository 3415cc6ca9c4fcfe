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
transaction that holds the record's row. A view that reaches for the driver's connection
(``connection.connection``) gets one that refuses ``commit()`` and ``rollback()`` itself.

The hooks are public: the ``do_...`` methods of SQLAlchemy's dialect, the ``connection`` of its
connections, and psycopg2's ``connection.cursor_factory``, with a subclass of whatever cursor the
application has chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, NoReturn, cast

from psycopg2 import ProgrammingError, extensions
from sqlalchemy import Connection as SqlConnection
from sqlalchemy import Dialect, PoolProxiedConnection

from ..core.sqltext import ends_transaction
from ..errors import NotAtomic

Connection = extensions.connection
Cursor = extensions.cursor


class WatchedConnection(SqlConnection):
    """SQLAlchemy's connection; its room hears of whoever reaches for the driver's."""

    room: Room | None = None

    @property
    def connection(self) -> PoolProxiedConnection:
        """The driver's connection, through the pool."""
        if self.room is not None:
            self.room.expose()
        return super().connection

    @property
    def info(self) -> dict[Any, Any]:
        """What the application notes about the connection, which reaches for no driver."""
        return super().connection.info

    def close(self) -> None:
        """Give the driver's connection back; refused while the operation needs it."""
        if self.room is not None:
            self.room.refuse("the view closed the operation's connection")
        super().close()


class Room:
    """The statements that wait, for one connection during one operation."""

    def __init__(self, connection: WatchedConnection) -> None:
        driver = connection.connection.driver_connection
        assert isinstance(driver, Connection)  # noqa: S101 -- init_app refuses other drivers
        self.driver = driver
        self.broken: NotAtomic | None = None
        self._held: list[str] = []
        self._connection = connection
        self.exposed = False
        self._before: Any = driver.cursor_factory
        if type(driver) is Connection:
            self._factory = _subclass(Cursor if self._before is None else self._before)
        else:  # a class of the application's may have cursors of its own, such as LoggingConnection
            self._factory = _subclass(cast("Any", type(driver.cursor())))

    def open(self) -> None:
        """Hold savepoints back from now on, and watch every cursor that the connection makes."""
        self._connection.room = self
        self.driver.cursor_factory = self._make

    def close(self) -> None:
        """Give the connection its own cursors back; forget what is held."""
        self._connection.room = None
        self.driver.cursor_factory = self._before
        self._held.clear()

    def _make(self, *args: Any, **kwargs: Any) -> Cursor:
        cursor: Any = self._factory(*args, **kwargs)
        cursor.room = self
        return cursor  # type: ignore[no-any-return]

    def hold(self, statement: str) -> bool:
        """Keep a statement that answers nothing until the next one is sent; or say that it cannot."""
        if not self.exposed:
            self._held.append(statement)
        return not self.exposed

    def expose(self) -> None:
        """Hold nothing back any more: the view may use the driver in ways that pass by here."""
        if not self.exposed:
            self.flush()
            self.show()
            self.exposed = True

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

    def show(self) -> None:
        """Let psycopg2 see the transaction, as one of two phases, of which it commits no part itself.

        In autocommit mode its ``commit()`` and ``rollback()`` would do nothing, without a word, and a
        named cursor would be refused. It sends a BEGIN of its own, which changes nothing (the server
        warns). In a transaction that has failed the server would refuse that, and the view's own error
        would be lost: there it waits for the view's ROLLBACK TO.
        """
        failed = self.driver.info.transaction_status == extensions.TRANSACTION_STATUS_INERROR
        if self.driver.autocommit and not failed:
            self.driver.autocommit = False
            try:
                self.driver.tpc_begin(self.driver.xid(0, "flask-idempotency", ""))
            except BaseException:
                self.driver.autocommit = True
                raise

    def explain(self, error: BaseException | None) -> NotAtomic | None:
        """What it means that the driver refused to end the transaction, if ``error`` is that."""
        if isinstance(error, ProgrammingError) and "two-phase transaction" in str(error):
            return NotAtomic(
                "the view called commit() or rollback() of the driver's connection, which would end the"
                " operation's transaction: use those of db.session"
            )
        return self.broken

    def restore(self) -> None:
        """Undo :meth:`show`, once the transaction is over."""
        if self.driver.status != extensions.STATUS_READY:
            self.driver.tpc_rollback()


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
        room: Room | None = getattr(connection, "room", None)
        if room is None or not room.hold(f"{words} {quote(name)}"):
            send(connection, name)

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
                self.room.show()
                return super().execute(query, vars)
            prefix = self.room.take()
            result = super().execute(prefix + self.mogrify(query, vars))
            if self.room.exposed:
                self.room.show()
            return result

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
