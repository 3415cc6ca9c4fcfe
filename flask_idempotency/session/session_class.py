"""The application's own session, in the operation's transaction.

While an operation runs, every session of its view works on the operation's connection, each of its
transactions in a savepoint of its own: ``commit()`` releases a savepoint,
``rollback()`` goes back to one, and nothing but the extension ends the transaction.

Handing a connection to a session does not do it: Flask-SQLAlchemy's ``get_bind`` looks engines up by
bind key and ignores it. So the session's class gets a ``get_bind`` on top, in the private class that
each ``sessionmaker`` has of its own. That needs no change by the user and holds for sessions that
``db.session.remove()`` makes room for.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from flask_idempotency.core.errors import ConfigurationError, NotAtomic
from flask_idempotency.core.process import INHERITED
from flask_idempotency.drivers.sqlalchemy_private import connection_to

from .databases import IN_A_TEST, Databases, bind_keys_of
from .ear import hear_cursors, hear_engine
from .operation import OpenTransaction, innermost
from .sources import Sessions

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
            if joined.is_in_context() and not bind_keys_of(engine, joined.engines):
                hear_engine(engine)
                joined.others.add(engine.pool)
            return bind
        joined.sessions[session] = None
        begun = connection_to(session, bind)
        if begun is not None and joined.units.is_joined(begun):
            return bind
        if begun is not None or engine is not bind:  # a connection
            joined.refuse(
                f"a session of the view of {joined.operation.name} uses a connection of its own, so"
                " its writes cannot commit together with the record: do not hand it a bind, nor one"
                f" that it began to use before the view. {IN_A_TEST}"
            )
        bound: Engine = joined.units.bind(engine)
        return bound

    def connection(self, *args: Any, **kwargs: Any) -> Connection:
        """The session's connection. What the driver's own cursors do on it is noticed, too."""
        connection: Connection = super().connection(*args, **kwargs)  # type: ignore[misc]
        hear_cursors(connection)
        return connection


def install(sessions: Sessions) -> None:
    """Let sessions join operations, those that are made from now on."""
    factory = sessions.factory
    if not issubclass(factory.class_, JoiningSession):
        factory.class_ = type(factory.class_.__name__, (JoiningSession, factory.class_), {})


def joining_session(sessions: Sessions) -> Session | None:
    """The present session, if it has been used.

    Raises ``ConfigurationError`` if it would not join: a test put something else in the place of
    ``db.session``, or it was made before :func:`install`.
    """
    if sessions.is_replaced():
        raise ConfigurationError(
            "db.session was replaced after idempotency.init_app(), so a view's writes would not be"
            f" protected. {IN_A_TEST}"
        )
    session = sessions.present()
    if session is not None and not isinstance(session, JoiningSession):
        raise ConfigurationError(
            "the present session was made before idempotency.init_app(), so a view's writes would not"
            " be protected: call db.session.remove() when the application is set up"
        )
    return session


def leave_to_parent(every: Iterable[Sessions]) -> None:
    """In a forked child: what a session has begun in the view, sent or not, the parent commits."""
    running, sessions = innermost.get(), list[Any]()
    while running is not None:
        if running.is_open and isinstance(running, OpenTransaction):
            sessions += [*running.sessions, *(sessions.present() for sessions in every)]
        running = running.outer
    for session in sessions:
        if session is not None and session.in_transaction():
            _parents[session] = session.get_transaction()


def prove(databases: Databases, running: OpenTransaction) -> None:
    """Show, before the first view runs, that sessions work inside the operation's transaction.

    Nothing is sent, and no listener of the application hears of it. Raises ``ConfigurationError`` if
    not: then nothing would be protected.
    """
    factory, engine = databases.sessions.factory, databases.database
    if factory.class_ is databases.proved:
        return
    if any(each.__name__ == "ShardedSession" for each in factory.class_.__mro__):
        raise ConfigurationError(
            "db.session is a ShardedSession: it writes to several databases, which cannot commit"
            " together with the record. Use @idempotent(atomic=False), or a session of one database for"
            " this view"
        )
    if issubclass(factory.class_, JoiningSession):
        session = factory()
        with suppress(NotAtomic):
            bind = session.get_bind(clause=databases.table)
            # Which engine a table is on, only a metadata of its own says.
            is_elsewhere = databases.sessions.one_metadata and bind.engine.pool is not engine.pool
            if running.units.is_bound(bind) or (is_elsewhere and bind_keys_of(bind, databases.engines)):
                databases.proved = factory.class_
        running.sessions.pop(session, None)
    if factory.class_ is not databases.proved:
        raise ConfigurationError(
            "db.session does not join the operation's transaction, so a view's writes would not be"
            " protected: something replaced its class, or its get_bind() chooses another engine than"
            f" that of the bind {databases.bind_key!r}, which has the record. A get_bind() of your own,"
            " such as one that sends reads to a replica, must return what super().get_bind() returns"
            f" while current_operation is there. {IN_A_TEST}"
        )
