"""psycopg2.

It sends BEGIN as a message of its own. In its autocommit mode it sends only what it is given, so a
whole transaction fits into one message. Switching the mode leaves nothing behind on the server, and
costs no round trip (one, if the engine names an isolation level). The drawback: its ``commit()`` and
``rollback()`` and the pool's reset do nothing then.

The hook is public: ``connection.cursor_factory``, with a subclass of whatever cursor the application
has chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, cast

import psycopg2
from psycopg2 import extensions
from sqlalchemy import Pool

from flask_idempotency.core.errors import sqlstate

from .cursors import in_its_unit, is_open, listen, sending, text_of
from .parsed import Text, note_parsed, parsed, shape_of
from .port import KINDS, Hear, innermost, methods_of
from .sqltext import CURSOR, READS, WRITES

Error = psycopg2.Error
Connection = extensions.connection
Cursor = extensions.cursor

_STATE = {
    *("notices", "notifies", "encoding", "info", "closed", "dsn", "server_version", "log", "filter"),
    *("get_transaction_status", "get_parameter_status", "get_backend_pid", "get_dsn_parameters"),
    *("isolation_level", "readonly", "deferrable", "cursor_factory", "protocol_version"),
}
REFUSED = methods_of(Connection) - _STATE
FACTORIES = {"cursor_factory"}
DOORS: set[str] = set()
ANSWERS_EACH = False

_UNREAD = {"42601", "22021", "22P05", None}
"""A syntax error, characters the server cannot take, or nothing to run: perhaps no statement of the
message did, or its result would be that of what travels in front."""

LEVELS = {
    None: "",
    extensions.ISOLATION_LEVEL_AUTOCOMMIT: "AUTOCOMMIT",
    extensions.ISOLATION_LEVEL_READ_UNCOMMITTED: "READ UNCOMMITTED",
    extensions.ISOLATION_LEVEL_READ_COMMITTED: "READ COMMITTED",
    extensions.ISOLATION_LEVEL_REPEATABLE_READ: "REPEATABLE READ",
    extensions.ISOLATION_LEVEL_SERIALIZABLE: "SERIALIZABLE",
}


def take(connection: Connection) -> tuple[Callable[[], int], bool]:
    """See :class:`.port.Driver`."""
    begun = connection.status == extensions.STATUS_BEGIN
    if begun:
        connection.commit()
    connection.autocommit = True
    return connection.get_transaction_status, begun


def give_back(connection: Connection, autocommit: bool) -> None:
    """See :class:`.port.Driver`."""
    if connection.status != extensions.STATUS_READY:
        connection.tpc_rollback()
    connection.autocommit = autocommit


def send(
    connection: Connection,
    text: str,
    values: dict[str, Any] | None = None,
    first: Sequence[str] = (),
) -> Cursor:
    """See :class:`.port.Driver`."""
    cursor = Cursor(connection)
    if not first:
        cursor.execute(text, values)
        return cursor
    message: bytes = cursor.mogrify(text, values) if text else b""
    cursor.execute(_joined(first, connection) + message)
    return cursor


def _joined(statements: Iterable[str], connection: Connection) -> bytes:
    """Statements as a prefix."""
    encoding = extensions.encodings.get(connection.encoding, "utf-8")
    return ";".join([*statements, ""]).encode(encoding)


def _show(connection: Connection) -> None:
    """Let psycopg2 see the transaction, as one of two phases, of which it commits no part itself.

    In autocommit mode it refuses named cursors. It sends a BEGIN of its own,
    which changes nothing (the server warns).
    """
    if connection.autocommit:
        connection.autocommit = False
        try:
            connection.tpc_begin(connection.xid(0, "flask-idempotency", ""))
        except BaseException:
            connection.autocommit = True
            raise


def question(pooled: Any) -> Any:
    """See :class:`.port.Driver`."""
    return Cursor(innermost(pooled.dbapi_connection))


def bound(cursor: Any, statement: Any, parameters: Any) -> str:
    """See :class:`.port.Driver`."""
    return str(cursor.mogrify(statement, parameters or None).decode("latin-1"))


def hear(pool: Pool, connection: Any, hear: Hear) -> None:
    """See :class:`.port.Driver`.

    The cursors are of the application's class. Those that are made with another one
    (``cursor_factory=``) are not heard.
    """
    connection = innermost(connection)
    if not hasattr(connection, "cursor_factory") or connection.closed:
        return
    if issubclass(_class_of(connection.cursor()), Cursor):
        listen(OperationCursors, pool, connection, hear)


def _class_of(cursor: Any) -> Any:
    return type(cursor)


class OperationCursors:
    """See :class:`.port.Cursors`."""

    def __init__(self, units: Any) -> None:
        self._units, self._driver = units, units.driver
        self._outer: Any = units.fairy.dbapi_connection
        self.cursor_factory: Any = self._driver.cursor_factory
        self._driver.cursor_factory = self._make

    def new(self, owner: Any, *args: Any, **kwargs: Any) -> Any:
        """See :class:`.port.Cursors`."""
        own = kwargs.pop("cursor_factory", None) if kwargs else None
        kind = _subclass(own) if own else self._kind()
        if args or (kwargs and kwargs.get("name") is not None):
            kind = _named(cast("Any", kind))
        # Made by the pool's connection: an agent for tracing puts a wrapper around the cursor, too.
        cursor: Any = self._outer.cursor(*args, cursor_factory=kind, **kwargs)
        cursor.units, cursor.owner = self._units, owner
        return cursor

    def close(self) -> None:
        """See :class:`.port.Cursors`."""
        if self._driver.cursor_factory == self._make:  # nobody has chosen another one since
            self._driver.cursor_factory = self.cursor_factory

    def _kind(self) -> type[Cursor]:
        if self.cursor_factory is not None:
            return _subclass(self.cursor_factory)
        if type(self._driver) is Connection:
            return _subclass(Cursor)
        # A class of the application's may have cursors of its own, such as LoggingConnection.
        self._driver.cursor_factory = None
        try:
            return _subclass(_class_of(self._driver.cursor()))
        finally:
            self._driver.cursor_factory = self._make

    def _make(self, *args: Any, **kwargs: Any) -> Cursor:
        """A cursor for a listener of the pool, which is given the driver's connection itself."""
        cursor: Any = self._kind()(*args, **kwargs)
        cursor.units, cursor.owner = self._units, self._units.present
        return cast("Cursor", cursor)


cursors = OperationCursors


@lru_cache(KINDS)
def _subclass(base: type[Cursor]) -> type[Cursor]:  # noqa: C901 -- a class, each method short
    """The application's cursor class, with its statements passing through the units."""
    is_own = base is not Cursor

    class OperationCursor(base):  # type: ignore[valid-type, misc]
        units: Any
        owner: Any

        @property
        def connection(self) -> Any:
            """The driver's connection; notes when somebody uses more than its state."""
            return self.units.door(self.owner)

        def execute(self, query: Any, vars: Any = None) -> Any:  # noqa: A002
            units = self.units
            with units.lock:
                text = query if type(query) is str else text_of(query, units.driver)
                if "SAVEPOINT" in text and self.name is None and units.savepoint(self.owner, text):
                    return None
                if self.name is not None:
                    self._admit(text, READS if self.withhold else CURSOR)
                    if units.is_failed():  # the server says so; psycopg2 would say another thing
                        declared = b"DECLARE failed CURSOR FOR " + self.mogrify(query, vars)
                        return sending(units, Cursor(units.driver).execute, declared)
                    if units.present is not None:
                        _show(units.driver)
                    return sending(units, super().execute, query, vars)
                message: bytes = self.mogrify(query, vars)  # bound first: this may fail
                units.admit(self.owner, text, (self, query, vars))
                if is_own:  # it may tell a trace what it is given: the view's text, and no values
                    units.flush()
                    return sending(units, super().execute, query, vars)
                sent = text, shape_of(vars)
                if units.waiting:
                    message = _prefix(units, sent, message) + message
                if sent in parsed:
                    return sending(units, super().execute, message)
                return _learning(units, super().execute, message, sent)

        def executemany(self, query: Any, vars_list: Any) -> Any:
            with self.units.lock:
                self._admit(text_of(query, self.units.driver))
                return sending(self.units, super().executemany, query, vars_list)

        def callproc(self, procname: Any, parameters: Any = None) -> Any:
            with self.units.lock:
                values = () if isinstance(parameters, dict) else parameters or ()
                marks = ", ".join(["%s"] * len(values))
                self._admit(f"SELECT {procname}({marks})", WRITES, values)
                return sending(self.units, super().callproc, procname, parameters)

        def copy_expert(self, sql: Any, *args: Any, **kwargs: Any) -> Any:
            with self.units.lock:
                self._admit(text_of(sql, self.units.driver))
                return sending(self.units, super().copy_expert, sql, *args, **kwargs)

        def copy_from(self, *args: Any, **kwargs: Any) -> Any:
            with self.units.lock:
                self._admit("copy")
                return sending(self.units, super().copy_from, *args, **kwargs)

        def copy_to(self, *args: Any, **kwargs: Any) -> Any:
            with self.units.lock:
                self._admit("select")
                return sending(self.units, super().copy_to, *args, **kwargs)

        def _admit(self, text: str, traits: int = READS, values: Any = None) -> None:
            """For calls that cannot carry a prefix."""
            self.units.admit(self.owner, text, (self, text, values))
            self.units.traits |= traits
            self.units.flush()

    return OperationCursor


def _ended(_cursor: Any) -> Exception:
    return psycopg2.ProgrammingError("named cursor isn't valid anymore")


@lru_cache(KINDS)
def _named(base: type[Cursor]) -> type[Cursor]:
    """A cursor on the server, which ends with its unit as it would with a transaction."""

    class NamedCursor(base):  # type: ignore[valid-type, misc]
        unit = 0

        def execute(self, query: Any, vars: Any = None) -> Any:  # noqa: A002
            result = super().execute(query, vars)
            self.unit = self.units.begun
            return result

        fetchone = in_its_unit(base.fetchone, _ended)
        fetchmany = in_its_unit(base.fetchmany, _ended)
        fetchall = in_its_unit(base.fetchall, _ended)
        __next__ = in_its_unit(base.__next__, _ended)

        def close(self) -> None:
            with self.units.lock:
                if not self.unit or is_open(self):
                    super().close()
            # Otherwise it ended with its unit, and psycopg2's CLOSE would fail the transaction.

    return NamedCursor


def _prefix(units: Any, text: Text, message: bytes) -> bytes:
    """Return what waits, if it may travel in front of ``message``; otherwise send it now."""
    if text in parsed and (message.isascii() or _speaks_utf8(units.driver)):
        return _joined(units.waiting, units.driver)
    units.flush()
    return b""


def _speaks_utf8(connection: Connection) -> bool:
    ask = connection.info.parameter_status
    return ask("server_encoding") == ask("client_encoding") == "UTF8"


def _learning(units: Any, call: Callable[..., Any], message: bytes, text: Text) -> Any:
    """Send something, and note whether it is a text that the server can parse."""
    try:
        result = sending(units, call, message)
    except Error as error:
        if sqlstate(error) not in _UNREAD:
            note_parsed(text)
        raise
    note_parsed(text)
    return result
