"""The one ear for what is sent past an operation: before its view, or on another connection.

It hears SQLAlchemy's statements as they pass the dialect, and those of the driver's own cursors once
somebody asks the session for its connection. Two things depend on it:

* The operation must know what a request's statements do before its view, and nobody can ask later. A
  database does not tell which settings a transaction has changed, least of all an application's own
  (``app.tenant``). So their names are read from the statements.
* What the view writes elsewhere is refused (:mod:`.stray_writes`).

On the operation's own connection the units hear (:meth:`.postgres_units.PostgresUnits.admit`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Engine, ExecutionContext, event

from flask_idempotency.drivers import known_driver
from flask_idempotency.drivers.cursors import text_of
from flask_idempotency.drivers.sqltext import (
    CONSTRAINTS,
    CURSOR,
    LOCKS,
    READS,
    SAVEPOINT,
    SETS,
    SIGNALS,
    SUSPECT,
    TRAITS,
    UNSURE,
    chooses_isolation,
    may_write,
    savepoint_of,
    settings_of,
)

from .operation import OpenTransaction, innermost
from .stray_writes import refuse_stray_write
from .undone import watched
from .units import StandIn

_NOTABLE = SETS | LOCKS | SIGNALS | CONSTRAINTS | UNSURE | SAVEPOINT


@dataclass(eq=False)
class Noted:
    """What a connection's statements may have done besides reading and writing tables.

    Of savepoints, only whether one was rolled back to.
    """

    engine: Engine
    traits: int = READS
    for_connection: set[str] = field(default_factory=set)
    for_transaction: set[str] = field(default_factory=set)

    def hear(self, cursor: Any, statement: Any, parameters: Any = None) -> None:
        """``cursor`` is about to send a statement: keep account of it, or refuse it."""
        text = text_of(statement, cursor)
        if traits := TRAITS[text] & _NOTABLE:
            self.note(traits, text, (cursor, statement, parameters))
        if innermost.get() is not None:
            refuse_stray_write(self.engine, text)

    def note(self, traits: int, text: str, sent: tuple[Any, Any, Any]) -> None:
        """Keep account of a text with these notable ``traits``, which is about to be ``sent``."""
        if traits & SAVEPOINT:
            verb, _ = savepoint_of(text) or ("", "")
            traits &= ~SAVEPOINT if verb != "ROLLBACK" else traits
        self.traits |= traits
        if traits & SETS and (driver := known_driver(self.engine.dialect)):
            bound = driver.bound(*sent)
            for_connection, for_transaction = settings_of(bound)
            unclear = not for_connection | for_transaction and not traits & UNSURE
            if chooses_isolation(bound) or unclear or "*" in for_transaction:
                self.traits |= CURSOR  # stands for what cannot be carried
            self.for_connection |= for_connection
            self.for_transaction |= for_transaction


_noted: weakref.WeakKeyDictionary[Connection, Noted] = weakref.WeakKeyDictionary()


def noted(connection: Connection) -> Noted:
    """Return what was noted of a connection; more may come."""
    return _noted.setdefault(connection, Noted(connection.engine))


def hear_engine(engine: Engine) -> None:
    """Hear what SQLAlchemy sends on an engine.

    The events are the dialect's: a listener on the engine would cost every connection of the
    application some 200 function calls.
    """
    hearing: dict[str, Callable[..., None]] = {
        "do_execute": _hear,
        "do_executemany": _hear,
        "do_execute_no_params": _hear_without_parameters,
    }
    # A listener for all engines may send statements itself. Then those for one are not asked.
    if any(getattr(engine.dialect.dispatch, name).parent_listeners for name in hearing):
        _listen(engine, "before_cursor_execute", _hear_before)
        return
    for name, hear in hearing.items():
        _listen(engine.dialect, name, hear)


def hear_cursors(connection: Connection) -> None:
    """Hear also what the driver's own cursors send on a connection."""
    if not (connection.invalidated or isinstance(connection.connection, StandIn)):
        driver = connection.connection.dbapi_connection
        _hear_driver(connection.engine, driver, noted(connection))


def hear_cursors_of_engine(engine: Engine) -> None:
    """Hear also what operations of another database send with the driver's own cursors."""

    def take(driver: Any, _record: Any, _pooled: Any) -> None:
        running = innermost.get()
        if isinstance(running, OpenTransaction) and running.units.engine.pool is not engine.pool:
            _hear_driver(engine, driver, Noted(engine))

    event.listen(engine, "checkout", take)


def _hear_driver(engine: Engine, connection: Any, to: Noted) -> None:
    if driver := known_driver(engine.dialect):
        driver.hear(engine.pool, connection, to.hear)


def _listen(target: Any, name: str, function: Callable[..., None]) -> None:
    # Not by event.contains: that knows a target by its address, which is another one's by and by.
    if function not in getattr(target.dispatch, name):
        event.listen(target, name, function)


def _hear_before(
    _connection: Connection,
    cursor: Any,
    statement: Any,
    parameters: Any,
    context: ExecutionContext,
    _many: bool,
) -> None:
    _hear(cursor, statement, parameters, context)


def _hear_without_parameters(cursor: Any, statement: Any, context: ExecutionContext) -> None:
    _hear(cursor, statement, None, context)


def _hear(cursor: Any, statement: Any, parameters: Any, context: ExecutionContext) -> None:
    text = statement if type(statement) is str else text_of(statement, cursor)
    traits = TRAITS[text]
    if traits & ~SUSPECT == READS:
        return
    connection, is_running = context.root_connection, innermost.get() is not None
    if is_running and isinstance(connection.connection, StandIn):
        return
    if notable := traits & _NOTABLE:
        noted(connection).note(notable, text, (cursor, statement, parameters))
    if is_running:
        refuse_stray_write(connection.engine, text)
    elif (commits := watched.get()) is not None and may_write(text):
        commits.note_write(connection)
