"""psycopg 3.

It begins transactions itself, but sees one that is open, so there is nothing to switch or to disguise.

Our own messages go through ``connection.pgconn`` in libpq's pipeline mode: each statement has a result
of its own, and all take one round trip. What a connection sends for the second time it prepares there.
The statements of the application stay psycopg's. What waits (a SAVEPOINT, a RELEASE) is sent in front
of one by ``connection.pipeline()``, which PostgreSQL parses one by one: a statement that cannot be
parsed takes nothing with it.

The hooks are public: ``cursor_factory`` and ``server_cursor_factory`` of the connection, with
subclasses of whatever cursors the application has chosen. Private are ``_prepared`` of a connection,
see :class:`_Book`, and ``_fetch_gen`` of a pipeline, see :class:`_Pipeline`. Seen in psycopg 3.1.8,
3.2.0 and 3.3.9; ``tests/integration/test_private_psycopg.py`` fails when a release changes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import generators, pq
from psycopg.adapt import AdaptersMap, PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.waiting import Ready, Wait
from sqlalchemy import Pool

from flask_idempotency.core.errors import sqlstate

from .cursors import in_its_unit, is_open, listen, sending, text_of
from .port import IDLE, KINDS, Hear, innermost, methods_of
from .sqltext import CURSOR, READS

Error = psycopg.Error
Connection = psycopg.Connection[Any]

_STATE = {
    *("info", "closed", "broken", "autocommit", "isolation_level", "read_only", "deferrable", "fileno"),
    *("adapters", "row_factory", "prepare_threshold", "prepared_max", "xid", "cancel", "cancel_safe"),
    *("add_notice_handler", "remove_notice_handler", "add_notify_handler", "remove_notify_handler"),
    *("notifies",),
}
REFUSED = {"pgconn", "lock"} | methods_of(psycopg.Connection) - _STATE
LEVELS: dict[Any, str] = {
    None: "",
    **{each: each.name.replace("_", " ") for each in psycopg.IsolationLevel},
}
FACTORIES = {"cursor_factory", "server_cursor_factory"}
ANSWERS_EACH = True

_OK = {pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK}
_PARTS = re.compile(
    r"""'[^']*'|"[^"]*"|\$(?P<tag>\w*)\$.*?\$(?P=tag)\$|--[^\n]*|%\((?P<name>\w+)\)s|;""", re.DOTALL
)
_DEALLOCATES = re.compile(r"\s*(?:DEALLOCATE|DISCARD)\s+ALL\b", re.IGNORECASE).match

_MOST = 100
"""Statements that are remembered of one connection; ours are about 40."""

_MOST_RENEWALS = 20
"""How often they are prepared anew. Where psycopg deallocates them again and again, it is no gain."""

_Given = tuple[dict[str, bytes | None], dict[str, int]]
"""Values by name as libpq takes them, and whether they are in its binary format."""

_NO_VALUES: _Given = {}, {}

_NOT_AS_PREPARED = {"26000", "42P05", "0A000"}
"""A statement is not there, is there already, or returns something else since a migration."""


def take(connection: Connection) -> tuple[Callable[[], int], bool]:
    """See :class:`.port.Driver`."""
    status = partial(getattr, connection.pgconn, "transaction_status")
    begun = status() != IDLE
    if begun:
        connection.commit()
    return status, begun


def give_back(connection: Connection, autocommit: bool) -> None:
    """See :class:`.port.Driver`: nothing was changed."""


def question(pooled: Any) -> Any:
    """See :class:`.port.Driver`."""
    connection = innermost(pooled.dbapi_connection)
    return psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row)


def bound(cursor: Any, statement: Any, parameters: Any) -> str:
    """See :class:`.port.Driver`."""
    return psycopg.ClientCursor(cursor.connection).mogrify(statement, parameters or None)


# Our own messages.


@dataclass(frozen=True, slots=True)
class _Statement:
    """One of a text, and the names of its values. ``name`` is the same for the same text everywhere.

    Behind some poolers, several clients prepare on one connection to the server.
    """

    sql: bytes
    values: tuple[str, ...] = ()
    name: bytes = b""


@lru_cache(4 * KINDS)
def _statements(text: str, *, has_values: bool, encoding: str) -> tuple[_Statement, ...]:
    """The statements of one of our texts, with ``$1`` for ``%(name)s``.

    A value that is named twice is sent twice: the server finds a type for each place.
    """
    found: list[_Statement] = []
    names: list[str] = []
    sql, place = "", 0
    for part in _PARTS.finditer(text + ";"):
        sql += text[place : part.start()]
        place = part.end()
        if part["name"] and has_values:
            names.append(part["name"])
            sql += f"${len(names)}"
        elif part.group() != ";":
            sql += part.group()
        elif sql := sql.strip():
            sent = (sql.replace("%%", "%") if has_values else sql).encode(encoding)
            name = f"idempotency_{sha256(sent).hexdigest()[:24]}".encode()
            found.append(_Statement(sent, tuple(names), name))
            sql, names = "", []
    return tuple(found)


_BEGIN, _COMMIT = _Statement(b"BEGIN"), _Statement(b"COMMIT")
_WHO = _Statement(b"SELECT pg_backend_pid()")


_editions = count()
"""No two books of a process give one name: what was believed to be deallocated may be there still."""


class _Book(dict[bytes, bytes]):
    """The statements that were sent on a connection; under which name one is prepared, or nothing."""

    is_closed = False  # preparing is no gain here
    is_direct = False  # no pooler stands in between, which may send each message to another server
    _renewals = 0
    _witness, _number, _had_names = b"", 0, False

    def __init__(self) -> None:
        super().__init__()
        self.edition = next(_editions)

    def renew(self) -> None:
        """Prepare all of them again, under other names."""
        self.clear()
        self.edition = next(_editions)
        self._renewals += 1
        self.is_closed = self._renewals >= _MOST_RENEWALS

    def watch(self, connection: Connection) -> None:
        """Notice whether psycopg has deallocated all since the last time.

        It does, and tells nobody, with a ROLLBACK, DROP or ALTER after it has prepared something. One
        of its own names shows it, or the next that it gives: that is gone then. The names are private;
        without them our next message would fail, and be sent again.
        """
        try:
            manager: Any = connection._prepared  # noqa: SLF001
            names, number = manager._names.values(), manager._prepared_idx  # noqa: SLF001
        except AttributeError:  # of another release
            return
        is_quiet = number == self._number and not self._had_names
        if self and not is_quiet and self._witness not in names:
            self.renew()
        self._had_names, self._number = bool(names), number
        self._witness = next(reversed(names)) if names else b"_pg3_%d" % number


_books: WeakKeyDictionary[Connection, _Book] = WeakKeyDictionary()


def _book(connection: Connection) -> _Book | None:
    """Return what is prepared on a connection; None if nothing may be."""
    book = _books.get(connection)
    if book is None:
        book = _books[connection] = _Book()
    if connection.prepare_threshold is None or book.is_closed:
        return None
    book.watch(connection)
    return book


class _AsItCame:
    """What our values are converted with: the connection's encoding, no adapters of an application."""

    adapters = AdaptersMap(psycopg.adapters)

    def __init__(self, connection: Connection) -> None:
        self.connection = connection


class Answer:
    """What the last statement of a message answered, and the rows of the last that returned some."""

    def __init__(self, connection: Connection, results: list[Any]) -> None:
        self._connection, self._last = connection, results[-1]
        self.rowcount: int = -1 if self._last.command_tuples is None else self._last.command_tuples
        self._rows = None
        for each in reversed(results):
            if each.nfields:
                self._rows = each
                break

    @property
    def statusmessage(self) -> str:
        """The last one's command tag."""
        return (self._last.command_status or b"").decode()

    @property
    def description(self) -> object:
        """None if there are no rows."""
        return self._rows

    def fetchall(self) -> list[tuple[Any, ...]]:
        """All rows."""
        if self._rows is None:
            return []
        transformer = Transformer(_AsItCame(self._connection))
        transformer.set_pgresult(self._rows)
        return transformer.load_rows(0, self._rows.ntuples, tuple)

    def fetchone(self) -> tuple[Any, ...] | None:
        """The first row."""
        rows = self.fetchall()
        return rows[0] if rows else None


def send(
    connection: Connection,
    text: str,
    values: dict[str, Any] | None = None,
    first: Sequence[str] = (),
) -> Answer:
    """See :class:`.port.Driver`."""
    encoding = _encoding(connection)
    message = [_Statement(each.encode(encoding)) for each in first]
    message += _statements(text, has_values=values is not None, encoding=encoding)
    given = _given(connection, values or {}, encoding)
    with connection.lock:
        is_idle = connection.pgconn.transaction_status == IDLE
        takes_no_others = b" INDEX CONCURRENTLY " in message[0].sql  # it may be in no transaction
        # As in the simple protocol, several statements are one transaction. Pgpool-II begins one for a
        # write in the extended protocol, and does not end it.
        is_alone = is_idle and not message[0].sql.startswith((b"BEGIN", b"SELECT", b"ROLLBACK"))
        is_alone = is_alone and not takes_no_others
        if is_alone:
            message = [_BEGIN, *message, _COMMIT]
        book = None if takes_no_others else _book(connection)
        asks = None if book is None or book.is_direct else book
        if asks is not None:
            message.append(_WHO)
        try:
            results = _exchange(connection, message, given, book)
        except Error as error:
            if book is None or sqlstate(error) not in _NOT_AS_PREPARED:
                raise
            book.renew()
            if not is_idle:
                raise
            if connection.pgconn.transaction_status != IDLE:
                _exchange(connection, [_Statement(b"ROLLBACK")], _NO_VALUES, None)
            results = _exchange(connection, message, given, None)
        if asks is not None:
            asks.is_direct = int(results.pop().get_value(0, 0)) == connection.pgconn.backend_pid
            asks.is_closed = not asks.is_direct
        if text == "ROLLBACK" or (not text and first[0].startswith("ROLLBACK")):
            _forget_prepared(connection)
    return Answer(connection, results[:-1] if is_alone else results)


def _forget_prepared(connection: Connection) -> None:
    """Let psycopg prepare its statements anew, as its own ``rollback()`` does.

    What a rollback has undone, or a migration changed, they would meet as it was.
    """
    with suppress(AttributeError):  # of another release
        manager: Any = connection._prepared  # noqa: SLF001
        if manager.clear():  # then all are deallocated, ours too
            _books.pop(connection, None)
            if hasattr(manager, "maintain_gen"):
                connection.wait(manager.maintain_gen(connection))
                return
            for command in manager.get_maintenance_commands():  # before 3.2
                _exchange(connection, [_Statement(command)], _NO_VALUES, None)


def _encoding(connection: Connection) -> str:
    """Python's name of the connection's encoding."""
    is_usual = connection.pgconn.parameter_status(b"client_encoding") == b"UTF8"
    return "utf-8" if is_usual else connection.info.encoding


def _exchange(
    connection: Connection, message: Sequence[_Statement], given: _Given, book: _Book | None
) -> list[Any]:
    """Send statements in one round trip; the result of each. Raises the error of the first that fails.

    A message that was interrupted leaves the connection closed: nobody knows what has arrived.
    """
    pgconn = connection.pgconn
    try:
        pgconn.enter_pipeline_mode()
        prepared = _queue(pgconn, message, given, book)
        pgconn.pipeline_sync()
        results = connection.wait(_answers(pgconn))
        if pgconn.status == pq.ConnStatus.OK:
            pgconn.exit_pipeline_mode()
    except BaseException:
        connection.close()
        raise
    if prepared and book is not None:  # what was prepared in front of an error is there as well
        done = {place for place, result in enumerate(results) if result.status in _OK}
        book.update(each for place, each in prepared.items() if place in done)
    for result in results:
        if result.status not in _OK:
            raise error_from_result(result, connection.info.encoding)
    if not prepared:
        return results
    return [result for place, result in enumerate(results) if place not in prepared]


def _queue(
    pgconn: Any, message: Sequence[_Statement], given: _Given, book: _Book | None
) -> dict[int, tuple[bytes, bytes]]:
    """Give libpq the statements. Returns those that it prepares, by the places of their results."""
    prepared: dict[int, tuple[bytes, bytes]] = {}
    values, formats = given
    for place, each in enumerate(message):
        name = book.get(each.name) if book is not None and each.name else None
        sent = kinds = None
        if each.values:
            sent, kinds = [values[of] for of in each.values], [formats[of] for of in each.values]
        if name:
            pgconn.send_query_prepared(name, sent, kinds)
        elif name is None:
            pgconn.send_query_params(each.sql, sent, None, kinds)
            if book is not None and each.name and len(book) < _MOST:
                book[each.name] = b""
        else:
            name = b"%b_%d" % (each.name, book.edition)  # type: ignore[union-attr]
            pgconn.send_prepare(name, each.sql)
            pgconn.send_query_prepared(name, sent, kinds)
            prepared[place + len(prepared)] = each.name, name
    return prepared


def _answers(pgconn: Any) -> Generator[Any, Any, list[Any]]:
    """Send what waits in libpq, and read all results up to the end of the pipeline.

    Nothing is asked of libpq that would wait in it: it keeps the interpreter's lock.
    """
    while pgconn.flush():
        if (yield Wait.RW) & Ready.R:
            pgconn.consume_input()
    results: list[Any] = []
    while True:
        while pgconn.is_busy():
            if (yield Wait.R):
                try:
                    pgconn.consume_input()
                except Error:
                    if any(result.status == pq.ExecStatus.FATAL_ERROR for result in results):
                        return results  # the server's last words say why
                    raise
        result = pgconn.get_result()
        if result is not None and result.status != pq.ExecStatus.PIPELINE_SYNC:
            results.append(result)
        elif result is not None or pgconn.status != pq.ConnStatus.OK:
            return results


def _given(connection: Connection, values: dict[str, Any], encoding: str) -> _Given:
    sent: dict[str, Any] = {}
    formats: dict[str, int] = {}
    for name, value in values.items():
        kind = type(value)
        formats[name] = int(kind is bytes)
        if value is None or kind is bytes:
            sent[name] = value
        elif kind is int:
            sent[name] = b"%d" % value
        elif kind is str and "\0" not in value:
            sent[name] = value.encode(encoding)
        else:  # what may be told off, too
            transformer = Transformer(_AsItCame(connection))
            given = [*value] if kind is tuple else value
            sent[name] = transformer.dump_sequence([given], [PyFormat.TEXT])[0]
    return sent, formats


# The application's statements.


class OperationCursors:
    """See :class:`.port.Cursors`."""

    def __init__(self, units: Any) -> None:
        self._units, self._driver = units, units.driver
        self._outer: Any = units.fairy.dbapi_connection
        self.cursor_factory: Any = self._driver.cursor_factory
        self.server_cursor_factory: Any = self._driver.server_cursor_factory
        self._made: dict[str, Any] = {
            name: partial(self._make, kind, name) for name, kind in _KINDS.items()
        }
        # Also for a listener of the pool, which is given the driver's connection itself.
        for name, made in self._made.items():
            setattr(self._driver, name, made)
        # psycopg's cursors know the connection itself, which must end no more than a unit.
        self._in_front: dict[str, Any] = {name: partial(units.end, name) for name in units.ends}
        for name in ("transaction", "pipeline") if units.ends else ():
            what = f"the view called {name}() of the driver's connection"
            self._in_front[name] = partial(units.refuse, what)
        self._in_front["cursor"] = self._cursor
        self._usual_cursor = partial(type(self._driver).cursor, self._driver)  # past what is in front
        vars(self._driver).update(self._in_front)

    def new(self, owner: Any, *args: Any, **kwargs: Any) -> Any:
        """See :class:`.port.Cursors`."""
        # Made by the pool's connection: an agent for tracing puts a wrapper around the cursor, too.
        cursor = self._outer.cursor(*args, **kwargs)
        cursor.owner = owner
        return cursor

    def _cursor(self, *args: Any, **kwargs: Any) -> Any:
        """The connection's ``cursor()``, of the classes that the view has chosen there by now."""
        driver, made = self._driver, self._made
        if (
            driver.cursor_factory is not made["cursor_factory"]
            or driver.server_cursor_factory is not made["server_cursor_factory"]
        ):
            self._adopt()
        return self._usual_cursor(*args, **kwargs)

    def _adopt(self) -> None:
        for name, made in self._made.items():
            if (chosen := getattr(self._driver, name)) is not made:
                setattr(self, name, chosen)
                setattr(self._driver, name, made)

    def execute(
        self, owner: Any, query: Any, params: Any = None, *, prepare: Any = None, binary: bool = False
    ) -> Any:
        """Do what the connection's own ``execute()`` does."""
        return self.new(owner, binary=binary).execute(query, params, prepare=prepare)

    def close(self) -> None:
        """See :class:`.port.Cursors`."""
        for name, made in self._made.items():
            if getattr(self._driver, name) is made:  # nobody has chosen another one since
                setattr(self._driver, name, getattr(self, name))
        shadowed = vars(self._driver)
        for name, ours in self._in_front.items():
            if shadowed.get(name) is ours:  # not that of whoever came later
                del shadowed[name]
        self._in_front = {}

    def _make(self, kind: Any, factory: str, *args: Any, **kwargs: Any) -> Any:
        base = getattr(self, factory)
        if not isinstance(base, type):
            base = type(base(*args, **kwargs))
        cursor = kind(base)(*args, **kwargs)
        cursor.units, cursor.owner = self._units, self._units.present
        return cursor


cursors = OperationCursors
DOORS = {"execute"}


@lru_cache(KINDS)
def _subclass(base: Any) -> Any:  # noqa: C901 -- a class, each method short
    """The application's cursor class, with its statements passing through the units."""

    class OperationCursor(base):  # type: ignore[misc]
        units: Any
        owner: Any

        def execute(self, query: Any, params: Any = None, **how: Any) -> Any:
            units = self.units
            with units.lock:
                text = query if type(query) is str else _text(query, units.driver)
                if "SAVEPOINT" in text and units.savepoint(self.owner, text):
                    return self
                units.admit(self.owner, text, (self, query, params))
                if _DEALLOCATES(text):
                    _books.pop(units.driver, None)
                if not units.waiting:
                    return sending(units, super().execute, query, params, **how)
                if ";" in text or units.is_failed():  # several statements cannot be pipelined
                    units.flush()
                    return sending(units, super().execute, query, params, **how)
                return sending(units, _behind, units, partial(super().execute, query, params, **how))

        def executemany(self, query: Any, params_seq: Any, **how: Any) -> Any:
            with self.units.lock:
                self._admit(query)
                in_front = vars(self.units.driver)
                refusal = in_front.pop("pipeline", None)  # before 3.3 psycopg itself calls it here
                try:
                    return sending(self.units, super().executemany, query, params_seq, **how)
                finally:
                    if refusal is not None:
                        in_front["pipeline"] = refusal

        def stream(self, query: Any, params: Any = None, **how: Any) -> Iterator[Any]:
            with self.units.lock:
                self._admit(query, params)
                if self.units.present is not None:  # libpq would read our next rows one by one, too
                    self.units.refuse(
                        "the view called stream() of psycopg's cursor: use yield_per, or a named cursor"
                    )
            yield from super().stream(query, params, **how)

        @contextmanager
        def copy(self, statement: Any, params: Any = None, **how: Any) -> Iterator[Any]:
            with self.units.lock:
                self._admit(statement, params)
                try:
                    with super().copy(statement, params, **how) as copy:
                        yield copy
                except Error as error:
                    self.units.note(error)
                    raise

        def _admit(self, query: Any, params: Any = None, traits: int = READS) -> None:
            """For calls that cannot be pipelined."""
            text = _text(query, self.units.driver)
            self.units.admit(self.owner, text, (self, query, params))
            self.units.traits |= traits
            self.units.flush()

    return OperationCursor


def _ended(cursor: Any) -> Exception:
    if cursor.units.is_failed():
        return psycopg.errors.InFailedSqlTransaction("current transaction is aborted")
    return psycopg.errors.InvalidCursorName(f'cursor "{cursor.name}" does not exist')


@lru_cache(KINDS)
def _named(base: Any) -> Any:
    """A cursor on the server, which ends with its unit as it would with a transaction."""

    class NamedCursor(_subclass(base)):  # type: ignore[misc]
        unit = 0

        def execute(self, query: Any, params: Any = None, **how: Any) -> Any:
            units = self.units
            with units.lock:
                self._admit(query, params, READS if self.withhold else CURSOR)
                result = sending(units, partial(base.execute, self), query, params, **how)
                self.unit = units.begun
                return result

        def close(self) -> None:
            with self.units.lock:
                if not self.unit or is_open(self):
                    super().close()
                else:  # it ended with its unit, and psycopg's CLOSE would fail the transaction
                    psycopg.Cursor.close(self)

    for name in ("fetchone", "fetchmany", "fetchall", "__next__", "scroll"):
        if hasattr(base, name):  # before 3.3 it has no __next__
            setattr(NamedCursor, name, in_its_unit(getattr(base, name), _ended))
    return NamedCursor


_KINDS = {"cursor_factory": _subclass, "server_cursor_factory": _named}


class _Pipeline(psycopg.Pipeline):
    """Sends no Flush behind its last Sync, which needs none, but all that libpq still holds.

    After a Flush the server does not count how long the transaction is idle
    (``idle_in_transaction_session_timeout``): a view that hangs would keep its key.
    """

    def _fetch_gen(self, *, flush: bool) -> Any:
        if flush:
            yield from generators.send(self.pgconn)
        yield from super()._fetch_gen(flush=False)


def _behind(units: Any, execute: Callable[[], Any]) -> Any:
    """Execute a statement of the application's behind what waits, in one round trip."""
    pgconn, encoding = units.driver.pgconn, _encoding(units.driver)
    with psycopg.Connection.pipeline(units.driver) as pipeline:
        pipeline.__class__ = _Pipeline
        for statement in units.waiting:  # as psycopg does with commands of its own
            send = partial(pgconn.send_query_params, statement.encode(encoding), None)
            pipeline.command_queue.append(send)
            pipeline.result_queue.append(None)
        return execute()


def _text(query: Any, connection: Connection) -> str:
    """As :func:`text_of`, also of a template string, with its values."""
    if type(query).__name__ == "Template":
        return str(psycopg.sql.as_string(query, connection))
    return text_of(query, connection)


# Before the view.


def hear(pool: Pool, connection: Any, hear: Hear) -> None:
    """See :class:`.port.Driver`."""
    connection = innermost(connection)
    if hasattr(connection, "server_cursor_factory") and not connection.closed:
        listen(OperationCursors, pool, connection, hear)
