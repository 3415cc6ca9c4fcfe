"""The application's own sessions, joined to an operation's transaction by SQLAlchemy's recipe.

A session that works on a connection whose transaction is somebody else's, with
``join_transaction_mode="create_savepoint"``, does each of its own transactions in a savepoint
(SQLAlchemy documentation, "Joining a Session into an External Transaction"). Flask-SQLAlchemy's
``get_bind`` looks engines up by bind key and ignores a connection that it is given. So the session's
class gets a ``get_bind`` on top, which holds for sessions that ``db.session.remove()`` makes room for.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from flask_idempotency.core.errors import ConfigurationError, NotAtomic

from .databases import Databases
from .guard import REFUSED
from .operation import outer_transaction
from .sources import Sessions
from .sqlalchemy_private import connections
from .transaction import FAILED, LASTING, innermost

NESTED = (
    "db.session was inside begin_nested() when the idempotent view began, whose savepoint would be"
    " around the record's lock: end that before the view"
)


class JoiningSession:
    """Put before the application's session class: works on a running operation's connection."""

    def get_bind(self, *args: Any, **kwargs: Any) -> Engine | Connection:
        """The operation's connection in place of its engine: see :meth:`OpenTransaction.bind_of`."""
        bind: Any = super().get_bind(*args, **kwargs)  # type: ignore[misc]
        running = innermost.get()
        if running is not None and running.has_joined(self):
            bind = running.bind_of(self, bind, kwargs)
        return bind  # type: ignore[no-any-return]

    def connection(self, *args: Any, **kwargs: Any) -> Connection:
        """The session's connection, by which a view reaches the driver's."""
        running = innermost.get()
        if running is None or not running.has_joined(self):
            return super().connection(*args, **kwargs)  # type: ignore[misc, no-any-return]
        if LASTING.intersection(kwargs.get("execution_options") or ()):
            running.transaction.refuse(REFUSED)
        if given := args[0] if args else kwargs.get("bind_arguments"):
            args, kwargs["bind_arguments"] = (), {"bind": self.get_bind(**given)}
        connection: Connection = super().connection(*args, **kwargs)  # type: ignore[misc]
        if running.transaction.connection is connection:
            running.transaction.show()
        return connection


def install(sessions: Sessions) -> None:
    """Let sessions join operations, those that are made from now on."""
    factory = sessions.factory
    if factory.class_.get_bind is not JoiningSession.get_bind:
        factory.class_ = _joining(factory.class_)


def joining_session(sessions: Sessions) -> Session | None:
    """The present session, if it has been used. From now on it joins operations.

    Asked for each operation: something else, such as a test's double, may make the sessions by now.
    Raises ``ConfigurationError`` if they would not join.
    """
    install(sessions)
    session: Any = sessions.present()
    if session is not None:
        session.__class__ = _joining(type(session))
    return session  # type: ignore[no-any-return]


def _joining(kind: type[Any]) -> type[Any]:
    if kind.get_bind is JoiningSession.get_bind:
        return kind
    if issubclass(kind, JoiningSession):
        raise ConfigurationError(
            "db.session does not join the operation's transaction, so a view's writes would not be"
            f" protected: something has put {kind.__qualname__} in the place of its class. Give the"
            " object that makes the sessions your own class before idempotency.init_app()"
        )
    return type(kind.__name__, (JoiningSession, kind), {})


def refuse_inside(databases: Databases) -> None:
    """Raise ``NotAtomic``, in both, if an atomic view makes the present request to its application."""
    outer = outer_transaction()
    if outer is not None and outer.transaction.connection.engine.pool is databases.database.pool:
        outer.transaction.refuse(
            f"the view of {outer.operation.name} made a request to its own application for another"
            " operation, which could not commit with it: call that view's function, or make the first"
            " view not atomic"
        )


def to_continue(databases: Databases) -> Connection | None:
    """The connection of the request's session, if the operation is to continue its transaction.

    None if the session is idle. Raises ``NotAtomic`` for what the operation cannot be a part of.
    """
    refuse_inside(databases)
    session = joining_session(databases.sessions)
    transaction = None if session is None else session.get_transaction()
    if session is None or transaction is None:
        return None
    if not transaction.is_active:
        raise NotAtomic(FAILED)
    pool = databases.database.pool
    found = next((each for each in connections(session) if each.engine.pool is pool), None)
    if session.in_nested_transaction() or (found is not None and found.in_nested_transaction()):
        raise NotAtomic(NESTED)
    return found
