"""The connection of the request's session, while an operation or a record needs one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from sqlalchemy import Connection

from flask_idempotency.core.errors import NotAtomic, StoreUnavailable
from flask_idempotency.drivers.sqlalchemy_private import connections

from .before_view import SetAside, has_failed, has_written
from .databases import Databases, bind_keys_of
from .leftovers import (
    end_transactions,
    has_unsaved,
    is_settled_outside,
    waits_for_commit,
)
from .operation import outer_transaction
from .session_class import joining_session


def set_aside(
    databases: Databases, other_binds: Sequence[str | None] = ()
) -> AbstractContextManager[SetAside | None]:
    """Take the connection from the request's session, so that the operation needs no second one.

    Changes that are not flushed yet go along; so does what was written on ``other_binds``. Raises
    ``NotAtomic`` if something was written, locked, or chosen for its transaction: ending that would
    split the operation, or lose it. Raises ``ConfigurationError`` if a test has replaced the session.
    """
    outer, pool, others = (
        outer_transaction(),
        databases.database.pool,
        databases.engines_of(other_binds),
    )
    session = joining_session(databases.sessions)
    if outer is not None and outer.units.engine.pool is not pool:  # another application's
        outer = None
    if outer is not None and (
        outer.units.wrote
        or outer.units.has_open_work
        or (session is not None and session in outer.sessions and has_unsaved(session))
    ):
        raise NotAtomic(
            f"the view of {outer.operation.name} made a request to its own application for another"
            " operation, after it had written: that could not see what was written, nor commit with it."
            " Call the function instead, or make the request before the first write"
        )
    transaction = None if session is None else session.get_transaction()
    if session is None or transaction is None:
        return nullcontext()
    every = set(connections(session).values())
    begun = {connection for connection in every if connection.engine.pool is pool}
    for connection in every - begun:
        if connection.engine not in others and _may_commit(connection):
            keys = bind_keys_of(connection.engine, databases.engines)
            allow = f", or allow it with @idempotent(other_binds={keys})" if keys else ""
            raise NotAtomic(
                "db.session had written, locked rows or drawn from a sequence on another bind (the"
                f" database {connection.engine.url.database}), but not committed, before the idempotent"
                " view began, which cannot commit together with the record: commit before the"
                f" view{allow}"
            )
    if not begun:
        return nullcontext()
    if outer is not None and all(map(outer.units.is_joined, begun)):
        transaction.close()
        return nullcontext()
    if len(begun) > 1 or session.in_nested_transaction():
        raise NotAtomic(
            "db.session was inside begin_nested(), or used several connections, before the idempotent"
            " view began: end that before the view"
        )
    return SetAside(begun.pop())


def _may_commit(connection: Connection) -> bool:
    """Return True if there is something to commit on another bind. A lost connection is invalidated."""
    try:
        return not has_failed(connection) and has_written(connection)
    except connection.dialect.loaded_dbapi.Error as error:
        connection.invalidate(error)
        return False


def parked(databases: Databases) -> AbstractContextManager[object]:
    """Return the present session's connection to its pool meanwhile, if that loses nothing.

    So what comes in between needs no second one. What the session has only read with ends; what it
    has set is set again afterwards.
    """
    session = databases.sessions.present()
    transaction = None if session is None else session.get_transaction()
    if session is not None and transaction is not None and not session.in_nested_transaction():
        begun = {c for c in connections(session).values() if c.engine.pool is databases.database.pool}
        if len(begun) == 1:
            try:
                return SetAside(begun.pop())
            except NotAtomic as error:
                if error.__cause__ is not None:  # it has failed
                    end_transactions(session)
            except StoreUnavailable:
                end_transactions(session)
    return nullcontext()


def parked_inside(databases: Databases, name: str) -> AbstractContextManager[object]:
    """As :func:`parked`, where a view sends its own application a request for ``name``, not atomic.

    Raises ``NotAtomic`` if the view holds changes: the end of ``name`` would undo them, or a commit in
    it would be the view's.
    """
    outer, session = outer_transaction(), databases.sessions.present()
    if outer is None:
        is_settled = is_settled_outside(databases.sessions)
    else:
        is_settled = session is None or not waits_for_commit(session)
    if not is_settled:
        raise NotAtomic(
            f"a view made a request to its own application for {name} while db.session held changes"
            f" that it had not committed, and the end of {name} would undo them. Commit them before the"
            " request, or call the function instead"
        )
    return parked(databases) if outer is None else set_aside(databases)
