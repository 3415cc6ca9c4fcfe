"""What a request's statements do before its view: the operation must know, and nobody can ask later.

A database does not tell which settings a transaction has changed, least of all an application's own
(``app.tenant``). So their names are read from the statements: from SQLAlchemy's as they pass the
dialect, and from those of the driver's own cursors once somebody asks the session for its connection.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Dialect, Engine, event

from flask_idempotency.drivers import known_driver
from flask_idempotency.drivers.port import Hear
from flask_idempotency.drivers.sqltext import (
    CONSTRAINTS,
    CURSOR,
    LOCKS,
    READS,
    SAVEPOINT,
    SETS,
    SIGNALS,
    TRAITS,
    UNSURE,
    chooses_isolation,
    savepoint_of,
    settings_of,
)

from .units import StandIn

NOTABLE = SETS | LOCKS | SIGNALS | CONSTRAINTS | UNSURE | SAVEPOINT


@dataclass
class Noted:
    """What a connection's statements may have done besides reading and writing tables.

    Of savepoints, only whether one was rolled back to.
    """

    dialect: Dialect
    traits: int = READS
    for_connection: set[str] = field(default_factory=set)
    for_transaction: set[str] = field(default_factory=set)

    def hear(self, cursor: Any, statement: Any, parameters: Any = None) -> None:
        """Keep account of a statement that ``cursor`` is about to execute, if it is notable."""
        if traits := TRAITS[text_of(statement, cursor)] & NOTABLE:
            self.note(traits, cursor, statement, parameters)

    def note(self, traits: int, cursor: Any, statement: Any, parameters: Any) -> None:
        """Keep account of a statement that has these notable ``traits``."""
        if traits & SAVEPOINT:
            verb, _ = savepoint_of(text_of(statement, cursor)) or ("", "")
            traits &= ~SAVEPOINT if verb != "ROLLBACK" else traits
        self.traits |= traits
        if traits & SETS and (driver := known_driver(self.dialect)):
            sent = driver.bound(cursor, statement, parameters)
            for_connection, for_transaction = settings_of(sent)
            unclear = not for_connection | for_transaction and not traits & UNSURE
            if chooses_isolation(sent) or unclear or "*" in for_transaction:
                self.traits |= CURSOR  # stands for what cannot be carried
            self.for_connection |= for_connection
            self.for_transaction |= for_transaction


def text_of(statement: Any, cursor: Any) -> str:
    """A statement that is given to the driver: text, bytes, or SQL composed with its help."""
    if isinstance(statement, bytes):
        return statement.decode("latin-1")
    return str(statement.as_string(cursor) if hasattr(statement, "as_string") else statement)


_noted: weakref.WeakKeyDictionary[Connection, Noted] = weakref.WeakKeyDictionary()


def listen(target: Any, name: str, function: Callable[..., None]) -> None:
    """Let a function hear of an event, once.

    Not by ``event.contains``: that knows a target by its address, which is another one's by and by.
    """
    if function not in getattr(target.dispatch, name):
        event.listen(target, name, function)


def noted(connection: Connection) -> Noted:
    """Return what was noted of a connection; more may come."""
    return _noted.setdefault(connection, Noted(connection.dialect))


def note_cursors(connection: Connection) -> None:
    """Note also the statements of the driver's own cursors."""
    hear_cursors(connection, noted(connection).hear)


def hear_cursors(connection: Connection, hear: Hear) -> None:
    """Tell ``hear`` of all that the driver's own cursors are about to send on a connection."""
    if not (connection.invalidated or isinstance(connection.connection, StandIn)):
        hear_driver(connection.engine, connection.connection.dbapi_connection, hear)


def hear_driver(engine: Engine, connection: Any, hear: Hear) -> None:
    """Tell ``hear`` of all that the cursors of a driver's connection are about to send."""
    if driver := known_driver(engine.dialect):
        driver.hear(engine.pool, connection, hear)
