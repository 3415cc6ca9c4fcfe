"""What a request's statements do before its view: the operation must know, and nobody can ask later.

A database does not tell which settings a transaction has changed, least of all an application's own
(``app.tenant``). So their names are read from the statements: from SQLAlchemy's as they pass the
dialect, and from those of the driver's own cursors once somebody asks the session for its connection.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from psycopg2 import extensions
from sqlalchemy import Connection, Pool, event

from flask_idempotency.core.ports import InOperation
from flask_idempotency.core.sqltext import (
    CONSTRAINTS,
    CURSOR,
    LOCKS,
    READS,
    SETS,
    SIGNALS,
    UNSURE,
    chooses_isolation,
    settings_of,
    traits_of,
)

Hear = Callable[[Any, Any, Any], None]
"""Is given a cursor, a statement and its parameters, as the driver is."""

LONG = 10_000
"""Characters of a text that is not worth remembering: it holds its values, so it comes but once."""


NOTABLE = SETS | LOCKS | SIGNALS | CONSTRAINTS | UNSURE


@dataclass
class Noted:
    """What a connection's statements may have done besides reading and writing tables."""

    traits: int = READS
    for_connection: set[str] = field(default_factory=set)
    for_transaction: set[str] = field(default_factory=set)

    def hear(self, cursor: Any, statement: Any, parameters: Any = None) -> None:
        """Keep account of a statement that ``cursor`` is about to execute, if it is notable."""
        text = text_of(statement, cursor)
        read = traits_of if len(text) < LONG else traits_of.__wrapped__
        if traits := read(text) & NOTABLE:
            self.note(traits, cursor, statement, parameters)

    def note(self, traits: int, cursor: Any, statement: Any, parameters: Any) -> None:
        """Keep account of a statement that has these notable ``traits``."""
        self.traits |= traits
        if traits & SETS and hasattr(cursor, "mogrify"):
            sent = cursor.mogrify(statement, parameters or None).decode("latin-1")
            for_connection, for_transaction = settings_of(sent)
            unclear = not for_connection | for_transaction and not traits & UNSURE
            if chooses_isolation(sent) or unclear:
                self.traits |= CURSOR  # stands for what cannot be carried
            self.for_connection |= for_connection
            self.for_transaction |= for_transaction


def text_of(statement: Any, cursor: Any) -> str:
    """A statement that is given to the driver: text, bytes, or SQL composed by psycopg2."""
    if isinstance(statement, bytes):
        return statement.decode("latin-1")
    return str(statement.as_string(cursor) if hasattr(statement, "as_string") else statement)


_noted: weakref.WeakKeyDictionary[Connection, Noted] = weakref.WeakKeyDictionary()


def listen(target: Any, name: str, function: Callable[..., None]) -> None:
    """Let a function hear of an event, once."""
    if not event.contains(target, name, function):
        event.listen(target, name, function)


def noted(connection: Connection) -> Noted:
    """What was noted of a connection; more may come."""
    return _noted.setdefault(connection, Noted())


def note_cursors(connection: Connection) -> None:
    """Note also the statements of the driver's own cursors."""
    hear_cursors(connection, noted(connection).hear)


def hear_cursors(connection: Connection, hear: Hear) -> None:
    """Tell ``hear`` of all that the driver's own cursors are about to send on a connection."""
    if not (connection.invalidated or isinstance(connection.connection, InOperation)):
        hear_driver(connection.engine.pool, connection.connection.dbapi_connection, hear)


def hear_driver(pool: Pool, driver: Any, hear: Hear) -> None:
    """Tell ``hear`` of all that its cursors are about to send, until it is back in its ``pool``.

    They are of the application's class. Those that are made with another one (``cursor_factory=``), or
    of another driver than psycopg2, are not heard.
    """
    if not isinstance(driver, extensions.connection) or driver.closed:
        return
    present: Any = driver.cursor_factory
    if type(present) is _Cursors:
        driver.cursor_factory = replace(present, hear=hear)
        return
    listen(pool, "checkin", _give_back)
    driver.cursor_factory = _Cursors(present, _hearing(type(driver.cursor())), hear)


def _give_back(driver: Any, _record: Any) -> None:
    if type(present := getattr(driver, "cursor_factory", None)) is _Cursors:
        driver.cursor_factory = present.own


@dataclass(frozen=True, eq=False)
class _Cursors:
    """A ``cursor_factory`` in the place of the application's ``own``."""

    own: Any
    kind: type[extensions.cursor]
    hear: Hear

    def __call__(self, *args: Any, **kwargs: Any) -> extensions.cursor:
        cursor: Any = self.kind(*args, **kwargs)
        cursor.hear = self.hear
        return cursor  # type: ignore[no-any-return]


_kinds: dict[type[extensions.cursor], type[extensions.cursor]] = {}


def _hearing(base: type[extensions.cursor]) -> type[extensions.cursor]:
    if base in _kinds:
        return _kinds[base]

    class HeardCursor(base):  # type: ignore[valid-type, misc]
        hear: Hear

        def execute(self, query: Any, vars: Any = None) -> Any:  # noqa: A002
            self.hear(self, query, vars)
            return super().execute(query, vars)

        def executemany(self, query: Any, vars_list: Any) -> Any:
            vars_list = list(vars_list)
            for values in vars_list:
                self.hear(self, query, values)
            return super().executemany(query, vars_list)

        def callproc(self, procname: Any, parameters: Any = None) -> Any:
            if not isinstance(parameters, dict):
                marks = ", ".join(["%s"] * len(parameters or ()))
                self.hear(self, f"SELECT {procname}({marks})", parameters)
            return super().callproc(procname, parameters)

        def copy_expert(self, sql: Any, *args: Any, **kwargs: Any) -> Any:
            self.hear(self, sql, None)
            return super().copy_expert(sql, *args, **kwargs)

        def copy_from(self, *args: Any, **kwargs: Any) -> Any:
            self.hear(self, "COPY", None)
            return super().copy_from(*args, **kwargs)

    return _kinds.setdefault(base, HeardCursor)
