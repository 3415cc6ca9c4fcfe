"""Refuse what a view writes past its operation: on another connection, or to another bind."""

from __future__ import annotations

import re

from sqlalchemy import Engine

from flask_idempotency.core.logs import log
from flask_idempotency.drivers.sqltext import may_write

from .databases import bind_keys_of
from .operation import OpenTransaction, outer_transaction, running_operation


def refuse_stray_write(engine: Engine, statement: str) -> None:
    """Refuse what may write on a connection that is not the operation's, or warn of it."""
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
