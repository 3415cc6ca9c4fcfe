"""Notice what a view sends past its operation: on another connection, or to another bind.

Also notes what a request's statements do before its view, because the operation must know.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine, ExecutionContext, event

from flask_idempotency.core.logs import log
from flask_idempotency.drivers.sqltext import READS, SUSPECT, TRAITS, may_write

from .databases import bind_keys_of
from .operation import (
    OpenTransaction,
    innermost,
    outer_transaction,
    running_operation,
)
from .statement_log import NOTABLE, hear_driver, listen, noted, text_of
from .undone import watched
from .units import StandIn


def watch(engine: Engine) -> None:
    """Notice statements that an operation sends past its own connection.

    The events are the dialect's: a listener on the engine would cost every connection of the
    application some 200 function calls.
    """
    notices: dict[str, Callable[..., None]] = {
        "do_execute": _notice,
        "do_executemany": _notice,
        "do_execute_no_params": _notice_without_parameters,
    }
    # A listener for all engines may send statements itself. Then those for one are not asked.
    if any(getattr(engine.dialect.dispatch, name).parent_listeners for name in notices):
        listen(engine, "before_cursor_execute", _notice_before)
        return
    for name, notice in notices.items():
        listen(engine.dialect, name, notice)


def watch_cursors(engine: Engine) -> None:
    """Notice also what an operation writes to another bind with the driver's own cursors."""

    def take(driver: Any, _record: Any, _pooled: Any) -> None:
        running = innermost.get()
        if isinstance(running, OpenTransaction) and running.units.engine.pool is not engine.pool:
            hear_driver(engine, driver, partial(notice_cursor, engine))

    event.listen(engine, "checkout", take)


def notice_cursor(engine: Engine, cursor: Any, statement: Any, _parameters: Any) -> None:
    """A cursor of the driver's is about to send something on a connection of ``engine``."""
    if innermost.get() is not None:
        _refuse_escape(engine, text_of(statement, cursor))


def _notice_before(
    _connection: Connection,
    cursor: Any,
    statement: Any,
    parameters: Any,
    context: ExecutionContext,
    _many: bool,
) -> None:
    _notice(cursor, statement, parameters, context)


def _notice_without_parameters(cursor: Any, statement: Any, context: ExecutionContext) -> None:
    _notice(cursor, statement, None, context)


def _notice(cursor: Any, statement: Any, parameters: Any, context: ExecutionContext) -> None:
    if type(statement) is not str:
        statement = text_of(statement, cursor)
    traits = TRAITS[statement]
    if traits & ~SUSPECT == READS:
        return
    connection, is_running = context.root_connection, innermost.get() is not None
    if is_running and isinstance(connection.connection, StandIn):
        return
    if notable := traits & NOTABLE:
        noted(connection).note(notable, cursor, statement, parameters)
    if is_running:
        _refuse_escape(connection.engine, statement)
    elif (commits := watched.get()) is not None and may_write(statement):
        commits.note_write(connection)


def _refuse_escape(engine: Engine, statement: str) -> None:
    is_here, running = running_operation() is not None, outer_transaction()
    if running is None or not may_write(statement):
        return
    if engine.pool is running.units.engine.pool:
        # A raw connection is somebody's decision; it also serves logs that must survive a rollback.
        _warn_once(running, _OWN_CONNECTION)
    elif is_here and engine not in running.other_binds:
        keys = bind_keys_of(engine, running.engines)
        if not keys and engine.pool in running.others:
            running.refuse(_BY_SESSION.format(running.operation.name, _beginning(statement)))
        if not keys:  # an effect outside of the application, as those that nobody can see
            _warn_once(running, _OTHERS)
            return
        running.refuse(
            f"the view of {running.operation.name} wrote to another bind, which cannot commit together"
            f" with the record; nothing was committed. It is the bind {keys[0]!r} (the database"
            f" {engine.url.database}): '{_beginning(statement)}'. If a lost or doubled write there does"
            f" no harm, allow it with @idempotent(other_binds={keys})"
        )


def _beginning(statement: str) -> str:
    """Enough of a statement to recognise it, without the quoted values in it."""
    text = _LITERAL.split(statement, maxsplit=1)[0][:_SHOWN].strip()
    return text if text == statement else f"{text}…"


_SHOWN = 60
_LITERAL = re.compile("['$]")

_OWN_CONNECTION = (
    "the view of %s writes on a connection of its own (db.engine, or db.session in another request's"
    " context): that is not part of the operation, and a retry may repeat it. Use the view's db.session"
    " or current_operation.connection"
)
_OTHERS = (
    "the view of %s writes on an engine that is none of its application's (another application's, or"
    " one of your own): that is not part of the operation, and a retry may repeat it"
)
_BY_SESSION = (
    "a session of the view of {} wrote on an engine that is none of its application's, which cannot"
    " commit together with the record; nothing was committed: '{}'. Let it use db.engine, or for"
    " another database an engine of SQLALCHEMY_BINDS"
)
_warned: set[tuple[str, str]] = set()


def _warn_once(running: OpenTransaction, text: str) -> None:
    if (running.operation.name, text) not in _warned:
        _warned.add((running.operation.name, text))
        log.warning(text, running.operation.name)
