"""psycopg 3.

It sees a transaction that is open, whoever has begun it, so there is nothing to switch.

Our messages go through ``connection.pgconn`` in libpq's pipeline mode: each statement has a result of
its own, and all take one round trip. What a connection sends for the second time is prepared there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import pq
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result
from psycopg.waiting import Ready, Wait

from flask_idempotency.core.errors import sqlstate

from .port import Values

SEES_TEXTS = True
LEVELS: dict[Any, str] = {
    None: "",
    **{each: each.name.replace("_", " ") for each in psycopg.IsolationLevel},
}

_IDLE = pq.TransactionStatus.IDLE
_OK = {pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK}
_PARTS = re.compile(
    r"""'[^']*'|"[^"]*"|\$(?P<tag>\w*)\$.*?\$(?P=tag)\$|--[^\n]*|%\((?P<name>\w+)\)s|;""", re.DOTALL
)
_NOT_AS_PREPARED = {"26000", "42P05", "0A000"}
"""A statement is not there, is there already, or returns something else since a migration."""


def is_idle(connection: Any) -> bool:
    """See :class:`.port.Driver`."""
    return bool(connection.pgconn.transaction_status == _IDLE)


has_ended = is_idle


def is_failed(connection: Any) -> bool:
    """See :class:`.port.Driver`."""
    return bool(connection.pgconn.transaction_status == pq.TransactionStatus.INERROR)


def take(connection: Any) -> Any:
    """See :class:`.port.Driver`."""


def give_back(connection: Any, found: Any) -> None:
    """See :class:`.port.Driver`."""


def show(connection: Any) -> Callable[[bool], object]:
    """See :class:`.port.Driver`: in ``transaction()`` it refuses ``commit()`` and ``rollback()``."""
    block = connection.transaction()
    block.__enter__()

    def hide(failed: bool) -> None:
        error = psycopg.Rollback(block) if failed else None
        block.__exit__(error and psycopg.Rollback, error, None)

    return hide


@dataclass(frozen=True, slots=True)
class _Statement:
    """One of a text, the names of its values, and the same name for the same text everywhere."""

    sql: bytes
    values: tuple[str, ...] = ()
    name: bytes = b""


_BEGIN, _COMMIT = _Statement(b"BEGIN"), _Statement(b"COMMIT")


@lru_cache(128)
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
            name = f"idempotency_{sha256(sent).hexdigest()[:24]}_".encode()
            found.append(_Statement(sent, tuple(names), name))
            sql, names = "", []
    return tuple(found)


_editions = count()
"""No two of a process give one name: what is believed to be gone may be there still."""


class _Prepared(dict[bytes, bytes]):
    """What was sent on a connection once (nothing), or is prepared there (its name)."""

    def __init__(self) -> None:
        super().__init__()
        self.edition = b"%d" % next(_editions)


_prepared: WeakKeyDictionary[Any, _Prepared] = WeakKeyDictionary()


class Answer:
    """What the last statement of a message answered, and the rows of the last that returned some."""

    def __init__(self, results: list[Any], connection: Any) -> None:
        self.rowcount: int = -1 if results[-1].command_tuples is None else results[-1].command_tuples
        self._result = next((each for each in reversed(results) if each.nfields), None)
        self._encoding = connection.info.encoding

    def fetchall(self) -> list[tuple[Any, ...]]:
        """See :class:`.port.Answer`. Values are as psycopg has them: no adapters of an application."""
        if self._result is None:
            return []
        transformer = Transformer()
        transformer.set_pgresult(self._result)
        return transformer.load_rows(0, self._result.ntuples, tuple)


def send(
    connection: Any,
    text: str,
    values: Values | None = None,
    first: Sequence[str] = (),
    *,
    inside: bool = False,
    prepared: bool = False,
) -> Answer:
    """See :class:`.port.Driver`."""
    encoding = connection.info.encoding
    message = [_Statement(each.encode(encoding)) for each in first]
    message += _statements(text, has_values=values is not None, encoding=encoding)
    given = {name: _as_libpq(value, encoding) for name, value in (values or {}).items()}
    if inside and is_idle(connection):
        connection.execute("SELECT 1")  # it begins as it was told to
    with connection.lock:
        was_idle = is_idle(connection)
        # As in the simple protocol, several statements are one transaction.
        is_alone = was_idle and len(message) > 1 and not message[0].sql.startswith(b"BEGIN")
        if is_alone:
            message = [_BEGIN, *message, _COMMIT]
        known = None
        if prepared and connection.prepare_threshold is not None:
            known = _prepared.setdefault(connection, _Prepared())
        try:
            results = _exchange(connection, message, given, known)
        except psycopg.Error as error:
            _prepared.pop(connection, None)  # what was prepared in front of an error is there as well
            if known is None or not was_idle or sqlstate(error) not in _NOT_AS_PREPARED:
                raise
            if not is_idle(connection):
                _exchange(connection, [_Statement(b"ROLLBACK")], {}, None)
            results = _exchange(connection, message, given, None)
    return Answer(results[:-1] if is_alone else results, connection)


def _as_libpq(value: Any, encoding: str) -> tuple[bytes | None, int]:
    """A value, and whether it is in its binary format."""
    if value is None or isinstance(value, bytes):
        return value, 1
    if isinstance(value, list):
        value = "{" + ",".join(rf'"\\x{each.hex()}"' for each in value) + "}"
    elif isinstance(value, bool):
        value = "true" if value else "false"
    text = str(value)
    if "\0" in text:
        raise psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
    return text.encode(encoding), 0


def _exchange(
    connection: Any,
    message: Sequence[_Statement],
    given: dict[str, tuple[bytes | None, int]],
    known: _Prepared | None,
) -> list[Any]:
    """Send statements in one round trip; the result of each. Raises the error of the first that fails.

    A message that was interrupted leaves the connection closed: nobody knows what has arrived.
    """
    pgconn, results = connection.pgconn, []
    try:
        pgconn.enter_pipeline_mode()
        new = _queue(pgconn, message, given, known)
        pgconn.pipeline_sync()
        results = connection.wait(_answers(pgconn))
        if pgconn.status == pq.ConnStatus.OK:
            pgconn.exit_pipeline_mode()
    except BaseException:
        connection.close()
        raise
    for result in results:
        if result.status not in _OK:
            raise error_from_result(result, connection.info.encoding)
    if known is not None:
        known.update(new.values())
    return [result for place, result in enumerate(results) if place not in new]


def _queue(
    pgconn: Any,
    message: Sequence[_Statement],
    given: dict[str, tuple[bytes | None, int]],
    known: _Prepared | None,
) -> dict[int, tuple[bytes, bytes]]:
    """Give libpq the statements. Returns those that it prepares, by the places of their results."""
    new: dict[int, tuple[bytes, bytes]] = {}
    for place, each in enumerate(message):
        sent = [given[name][0] for name in each.values]
        formats = [given[name][1] for name in each.values]
        name = known.get(each.name) if known is not None and each.name else None
        if name is None:
            pgconn.send_query_params(each.sql, sent, None, formats)
            if known is not None and each.name:
                known[each.name] = b""
            continue
        if not name:
            name = each.name + known.edition  # type: ignore[union-attr]
            pgconn.send_prepare(name, each.sql)
            new[place + len(new)] = each.name, name
        pgconn.send_query_prepared(name, sent, formats)
    return new


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
                except psycopg.Error:
                    if any(result.status == pq.ExecStatus.FATAL_ERROR for result in results):
                        return results  # the server's last words say why
                    raise
        result = pgconn.get_result()
        if result is not None and result.status != pq.ExecStatus.PIPELINE_SYNC:
            results.append(result)
        elif result is not None or pgconn.status != pq.ConnStatus.OK:
            return results
