"""The application's own session, in the operation's transaction.

While an operation runs, every session of its view works on the operation's connection, each of its
transactions in a savepoint of its own: ``commit()`` releases a savepoint,
``rollback()`` goes back to one, and nothing but the extension ends the transaction.

Handing a connection to a session does not do it: Flask-SQLAlchemy's ``get_bind`` looks engines up by
bind key and ignores it. So the session's class gets a ``get_bind`` on top, in the private class that
each ``SQLAlchemy()`` object's ``sessionmaker`` has of its own. That needs no change by the user and
holds for sessions that ``db.session.remove()`` makes room for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Connection, Engine
from sqlalchemy.orm import sessionmaker

from flask_idempotency.core.errors import ConfigurationError, NotAtomic, StoreUnavailable
from flask_idempotency.core.process import INHERITED
from flask_idempotency.web.operation import OpenTransaction, innermost, outer_transaction
from flask_idempotency.web.setup.state import AppState

from .earlier import SetAside, connection_to, connections, has_written
from .ends import (
    end_transactions,
    has_unsaved,
    is_settled_outside,
    present_session,
    waits_for_commit,
)
from .escapes import notice_cursor
from .noted import hear_cursors, note_cursors

_parents: dict[Any, Any] = {}
"""In a child that was forked in a view: the sessions there, each with its transaction at that time."""


class JoiningSession:
    """Put before the application's session class: works on a running operation's connection."""

    def get_bind(self, *args: Any, **kwargs: Any) -> Engine | Connection:
        """The operation's engine in place of the application's; another database's as it is.

        Raises ``NotAtomic`` if the session would escape the operation, or is in the middle of what a
        forked child's parent does.
        """
        session: Any = self
        if _parents and _parents.get(session, session) is session.get_transaction():
            raise NotAtomic(INHERITED)
        bind: Engine | Connection = super().get_bind(*args, **kwargs)  # type: ignore[misc]
        running = innermost.get()
        joined = None if running is None else running.transaction_of(self)
        if joined is None:
            return bind
        engine = bind.engine
        if engine.pool is not joined.units.engine.pool:
            return bind
        joined.sessions[session] = None
        begun = connection_to(session, bind)
        if begun is not None and joined.units.is_joined(begun):
            return bind
        if begun is not None or engine is not bind:  # a connection
            joined.refuse(
                f"a session of the view of {joined.operation.name} uses a connection of its own, so"
                " its writes cannot commit together with the record: do not hand it a bind, nor one"
                " that it began to use before the view"
            )
        bound: Engine = joined.units.bind(engine)
        return bound

    def connection(self, *args: Any, **kwargs: Any) -> Connection:
        """The session's connection. What the driver's own cursors do on it is noticed, too."""
        connection: Connection = super().connection(*args, **kwargs)  # type: ignore[misc]
        running = innermost.get()
        if running is None or not isinstance(running, OpenTransaction):
            note_cursors(connection)
        else:
            hear_cursors(connection, partial(notice_cursor, connection.engine))
        return connection


def install(db: SQLAlchemy) -> None:
    """Let the sessions of ``db`` join operations. Raises ``ConfigurationError`` if they cannot."""
    factory = getattr(db.session, "session_factory", None)
    if not isinstance(factory, sessionmaker):
        raise ConfigurationError(
            "db.session is not the scoped session that Flask-SQLAlchemy makes, so the writes of a view"
            " cannot be joined to the operation's transaction"
        )
    if not is_joining(db):
        factory.class_ = type(factory.class_.__name__, (JoiningSession, factory.class_), {})


def is_joining(db: SQLAlchemy) -> bool:
    """Whether the sessions of ``db`` are of the class that :func:`install` made."""
    session_class: type = db.session.session_factory.class_
    return issubclass(session_class, JoiningSession)


def leave_to_parent(databases: Iterable[SQLAlchemy]) -> None:
    """In a forked child: what a session has begun in the view, sent or not, the parent commits."""
    running, sessions = innermost.get(), list[Any]()
    while running is not None:
        if running.is_open and isinstance(running, OpenTransaction):
            sessions += [*running.sessions, *map(present_session, databases)]
        running = running.outer
    for session in sessions:
        if session is not None and session.in_transaction():
            _parents[session] = session.get_transaction()


def prove(state: AppState, running: OpenTransaction) -> None:
    """Show, before the first view runs, that sessions work inside the operation's transaction.

    Nothing is sent, and no listener of the application hears of it. Raises ``ConfigurationError`` if
    not: then nothing would be protected.
    """
    factory = state.db.session.session_factory
    if factory.class_ is state.proved:
        return
    if any(each.__name__ == "ShardedSession" for each in factory.class_.__mro__):
        raise ConfigurationError(
            "db.session is a ShardedSession: it writes to several databases, which cannot commit"
            " together with the record. Use @idempotent(atomic=False), or a session of one database for"
            " this view"
        )
    if is_joining(state.db):
        session = factory()
        with suppress(NotAtomic):
            if running.units.is_bound(session.get_bind(clause=state.table)):
                state.proved = factory.class_
        running.sessions.pop(session, None)
    if factory.class_ is not state.proved:
        raise ConfigurationError(
            "db.session does not join the operation's transaction, so a view's writes would not be"
            " protected: something replaced its class, or its get_bind() chooses another engine. A"
            " get_bind() of your own, such as one that sends reads to a replica, must return what"
            " super().get_bind() returns while current_operation is there"
        )


def engines_of(state: AppState, bind_keys: Sequence[str | None]) -> frozenset[Engine]:
    """The engines of some binds. Raises ``ConfigurationError`` for one that is not there."""
    try:
        return frozenset(map(state.engines.__getitem__, bind_keys))
    except KeyError as error:
        raise ConfigurationError(
            f"other_binds names {error.args[0]!r}; this application has {list(state.engines)}"
        ) from None


def set_aside(
    state: AppState, other_binds: Sequence[str | None] = ()
) -> AbstractContextManager[SetAside | None]:
    """Take the connection from the request's session, so that the operation needs no second one.

    Changes that are not flushed yet go along; so does what was written on ``other_binds``. Raises
    ``NotAtomic`` if something was written, locked, or chosen for its transaction: ending that would
    split the operation, or lose it.
    """
    outer, pool, others = outer_transaction(), state.database.pool, engines_of(state, other_binds)
    session = present_session(state.db)
    if outer is not None and outer.units.engine.pool is not pool:
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
        if connection.engine not in others and has_written(connection):
            raise NotAtomic(
                "db.session had written on another bind, but not committed, before the idempotent view"
                " began, which cannot commit together with the record: commit before the view, or allow"
                ' it with @idempotent(other_binds=["..."])'
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


def parked(state: AppState) -> AbstractContextManager[object]:
    """Return the present session's connection to its pool meanwhile, if that loses nothing.

    So what comes in between needs no second one. What the session has only read with ends; what it
    has set is set again afterwards.
    """
    session = present_session(state.db)
    transaction = None if session is None else session.get_transaction()
    if session is not None and transaction is not None and not session.in_nested_transaction():
        begun = {c for c in connections(session).values() if c.engine.pool is state.database.pool}
        if len(begun) == 1:
            try:
                return SetAside(begun.pop())
            except NotAtomic as error:
                if error.__cause__ is not None:  # it has failed
                    end_transactions(session)
            except StoreUnavailable:
                end_transactions(session)
    return nullcontext()


def parked_inside(state: AppState, name: str) -> AbstractContextManager[object]:
    """As :func:`parked`, where a view sends its own application a request for ``name``, not atomic.

    Raises ``NotAtomic`` if the view holds changes: the end of ``name`` would undo them, or a commit in
    it would be the view's.
    """
    outer, session = outer_transaction(), present_session(state.db)
    if outer is None:
        is_settled = is_settled_outside(state.db)
    else:
        is_settled = session is None or not waits_for_commit(session)
    if not is_settled:
        raise NotAtomic(
            f"a view made a request to its own application for {name} while db.session held changes"
            f" that it had not committed, and the end of {name} would undo them. Commit them before the"
            " request, or call the function instead"
        )
    return parked(state) if outer is None else set_aside(state)
