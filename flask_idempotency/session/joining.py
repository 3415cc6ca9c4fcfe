"""The application's own sessions, joined to an operation's transaction by SQLAlchemy's recipe.

A session that works on a connection whose transaction is somebody else's, with
``join_transaction_mode="create_savepoint"``, does each of its own transactions in a savepoint
(SQLAlchemy documentation, "Joining a Session into an External Transaction"). Flask-SQLAlchemy's
``get_bind`` looks engines up by bind key and ignores a connection that it is given. So the session's
class gets a ``get_bind`` on top, which holds for sessions that ``db.session.remove()`` makes room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from flask_idempotency.core.errors import ConfigurationError, NotAtomic
from flask_idempotency.core.process import INHERITED

from .databases import Databases
from .guard import CHOSEN
from .leftovers import has_unsaved, has_written
from .operation import OpenTransaction, outer_transaction
from .sources import Sessions
from .sqlalchemy_private import connections, continue_nested
from .transaction import FAILED, LASTING, innermost

NESTED = (
    "db.session was inside begin_nested() when the idempotent view began, whose savepoint would be"
    " around the record's lock: end that before the view"
)

_parents: dict[Any, Any] = {}
"""In a child that was forked in a view: the sessions there, each with its transaction at that time."""


class JoiningSession:
    """Put before the application's session class: works on a running operation's connection."""

    def get_bind(self, *args: Any, **kwargs: Any) -> Engine | Connection:
        """The operation's connection in place of its engine; another database's engine as it is.

        Raises ``NotAtomic`` if the session would escape the operation, or is in the middle of what a
        forked child's parent does.
        """
        session: Any = self
        if _parents and _parents.get(session, session) is session.get_transaction():
            raise NotAtomic(INHERITED)
        bind: Engine | Connection = super().get_bind(*args, **kwargs)  # type: ignore[misc]
        running = innermost.get()
        joined = None if running is None else running.transaction_of(self)
        return bind if joined is None else _joined_bind(session, bind, joined, kwargs.get("bind"))

    def connection(self, *args: Any, **kwargs: Any) -> Connection:
        """The session's connection, by which a view reaches the driver's."""
        joined = _joined(self)
        if joined is not None and LASTING.intersection(kwargs.get("execution_options") or ()):
            joined.transaction.refuse(CHOSEN)
        if joined is not None and (given := args[0] if args else kwargs.get("bind_arguments")):
            args, kwargs["bind_arguments"] = (), {"bind": self.get_bind(**given)}
        connection: Connection = super().connection(*args, **kwargs)  # type: ignore[misc]
        if joined is not None and joined.transaction.connection is connection:
            joined.transaction.show()
        return connection

    def flush(self, *args: Any, **kwargs: Any) -> None:
        """Meanwhile nothing waits: a mapper's listener may write by the driver's own cursors."""
        flush = super().flush  # type: ignore[misc]
        if innermost.get() is None or (joined := _joined(self)) is None:
            flush(*args, **kwargs)
        else:
            joined.transaction.flushes(self, partial(flush, *args, **kwargs))


def _joined(session: Any) -> OpenTransaction | None:
    running = innermost.get()
    return None if running is None else running.transaction_of(session)


def _joined_bind(
    session: Session, bind: Engine | Connection, joined: OpenTransaction, given: Any
) -> Engine | Connection:
    transaction = joined.transaction
    if given is not None and isinstance(bind, Connection):  # bind_arguments={"bind": connection}
        return bind
    if bind.engine.pool is not transaction.connection.engine.pool:
        if joined.is_in_context() and bind.engine not in joined.other_binds:
            joined.refuse_other(bind.engine)
        return bind
    if isinstance(bind, Connection) and bind is not transaction.connection:
        transaction.refuse(
            f"a session of the view of {joined.operation.name} uses a connection of its own, so its"
            " writes cannot commit together with the record: do not hand it a bind"
        )
    if session not in joined.sessions:
        joined.sessions[session] = session.join_transaction_mode
        session.join_transaction_mode = "create_savepoint"
    pool = transaction.connection.engine.pool
    begun = [each for each in connections(session).values() if each.engine.pool is pool]
    if not begun:
        options = bind.get_execution_options()
        transaction.begins(session, options, at_once=bool(session.dispatch.after_begin))
    elif transaction.connection not in begun:
        transaction.refuse(
            f"a session of the view of {joined.operation.name} was in the middle of a transaction of"
            " its own, begun before the view: end that before the view, or use db.session"
        )
    else:
        transaction.turn(session)
    return transaction.connection


def install(sessions: Sessions) -> None:
    """Let sessions join operations, those that are made from now on."""
    factory = sessions.factory
    if not issubclass(factory.class_, JoiningSession):
        factory.class_ = type(factory.class_.__name__, (JoiningSession, factory.class_), {})


def follow(sessions: Sessions) -> None:
    """In a test, let the session join that it has put in the place of ``db.session``."""
    sessions.follow()
    install(sessions)
    session: Any = sessions.present()
    if session is not None and not isinstance(session, JoiningSession):
        session.__class__ = sessions.factory.class_


def connection_of_test(databases: Databases) -> Connection | None:
    """The connection to which a test of the application has bound ``db.session``, or None.

    Its transaction is the test's, which rolls it back: only with ``app.testing`` may an operation be
    part of that.
    """
    if not databases.app.testing:
        return None
    sessions = databases.sessions
    if sessions.is_replaced():
        follow(sessions)
    bind: Any = sessions.engines[databases.bind_key]
    if isinstance(bind, Engine):
        bind = sessions.current().bind
    return bind if isinstance(bind, Connection) else None


def leave_to_parent(every: Sequence[Sessions]) -> None:
    """In a forked child, remember which sessions are in the middle of what the parent does."""
    running, sessions = innermost.get(), []
    while running is not None:
        if isinstance(running, OpenTransaction):
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
            if bind is running.transaction.connection or is_elsewhere:
                databases.proved = factory.class_
        running.sessions.pop(session, None)
        running.transaction.broken = None
    if factory.class_ is not databases.proved:
        raise ConfigurationError(
            "db.session does not join the operation's transaction, so a view's writes would not be"
            " protected: something replaced its class, it is bound to a connection of its own, or its"
            " get_bind() chooses another engine than"
            f" that of the bind {databases.bind_key!r}, which has the record. A get_bind() of your own,"
            " such as one that sends reads to a replica, must return what super().get_bind() returns"
            " while current_operation is there"
        )


def present_session(sessions: Sessions) -> Session | None:
    """The present session, if it has been used.

    Raises ``ConfigurationError`` if it would not join: something else took the place of ``db.session``.
    """
    if sessions.is_replaced():
        raise ConfigurationError(
            "db.session was replaced after idempotency.init_app(), so a view's writes would not be"
            " protected: make it before"
        )
    session = sessions.present()
    if session is not None and not isinstance(session, JoiningSession):
        raise ConfigurationError(
            "db.session was used before idempotency.init_app() in this application context, so a view's"
            " writes would not be protected: set the extension up first"
        )
    return session


def to_continue(  # noqa: C901 -- one question after the other
    databases: Databases, other_binds: Sequence[str | None] = ()
) -> Connection | None:
    """The connection of the request's session, if the operation is to continue its transaction.

    None if the session is idle. Raises ``NotAtomic`` for what the operation cannot be a part of.
    """
    session, outer = present_session(databases.sessions), outer_transaction()
    pool, transaction = databases.database.pool, session and session.get_transaction()
    begun = set() if session is None else set(connections(session).values())
    if outer is not None and outer.transaction.connection.engine.pool is pool:
        is_joined = session in outer.sessions
        wrote = outer.transaction.wrote or outer.transaction.has_written()
        if wrote or (is_joined and has_unsaved(session)):
            raise NotAtomic(
                f"the view of {outer.operation.name} made a request to its own application for another"
                " operation, after it had written: that could not see what was written, nor commit with"
                " it. Call the function instead, or make the request before the first write"
            )
        if transaction is not None and outer.transaction.connection in begun:
            transaction.close()
            return None
    if session is None or transaction is None:
        return None
    if not transaction.is_active:
        if all(each.closed for each in begun):
            return None  # an operation has left it so: it waits for a rollback, as without us
        raise NotAtomic(FAILED)
    if session.in_nested_transaction():
        raise NotAtomic(NESTED)
    others = databases.engines_of(other_binds)
    for each in begun:
        if each.engine.pool is not pool and each.engine not in others and has_written(each):
            raise NotAtomic(
                "db.session had written to another bind, the database"
                f" {each.engine.url.database}, but not committed, before the idempotent view began,"
                " which cannot commit together with the record: commit before the view, or allow it"
                " with @idempotent(other_binds=[...])"
            )
    found = next((each for each in begun if each.engine.pool is pool), None)
    if found is not None and found.in_nested_transaction():
        raise NotAtomic(NESTED)
    return found


def join(running: OpenTransaction, session: Session | None) -> None:
    """Let the session's own transaction, if the operation continues it, go on as its first unit."""
    connection = running.transaction.connection
    if session is not None and connection in connections(session).values():
        running.sessions[session] = session.join_transaction_mode
        session.join_transaction_mode = "create_savepoint"
        running.transaction.begins(session, connection.engine.get_execution_options(), at_once=False)
        continue_nested(session, connection)
