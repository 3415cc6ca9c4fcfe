"""The application's own sessions, whatever made them, and how they join an operation's transaction.

No other file asks about Flask-SQLAlchemy, Flask-SQLAlchemy-Lite or a ``scoped_session`` of SQLAlchemy's
own. Names of engines are bind keys in the first, the names in ``SQLALCHEMY_ENGINES`` in the second; the
last has one engine.

Sessions join by SQLAlchemy's recipe. One that works on a connection whose transaction is somebody
else's, with ``join_transaction_mode="create_savepoint"``, does each of its own transactions in a
savepoint (SQLAlchemy documentation, "Joining a Session into an External Transaction").
Flask-SQLAlchemy's ``get_bind`` looks engines up by bind key and ignores a connection that it is given.
So the session's class gets a ``get_bind`` on top, which holds for sessions that ``db.session.remove()``
makes room for.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

from flask import Flask, current_app, has_app_context
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Connection, Engine, MetaData
from sqlalchemy.orm import Session, sessionmaker

from flask_idempotency.core.errors import ConfigurationError, shown

from .guard import REFUSED
from .transaction import LASTING, innermost


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


class Sessions:
    """An application's sessions, the engines that they work on, and the metadata of its tables.

    ``holder.session`` is a ``scoped_session``, or the session itself. ``metadata`` is that of all
    tables, or None where each bind has its own, as in Flask-SQLAlchemy. ``factory`` makes the sessions
    where the ``scoped_session`` does not say what does. ``usual`` is the name of the engine that has
    the records where no setting says otherwise.
    """

    def __init__(
        self,
        holder: Any,
        engines: Mapping[str | None, Engine],
        metadata: MetaData | None,
        factory: Any = None,
        usual: str | None = None,
    ) -> None:
        self._holder, self.engines, self._metadata = holder, engines, metadata
        self._factory, self.usual = factory, usual

    def let_join(self) -> sessionmaker[Any]:
        """Let sessions join operations, those that are made from now on; what makes them.

        Raises ``ConfigurationError`` if nothing does, of a class of its own.
        """
        factory = self._factory or getattr(self._holder.session, "session_factory", None)
        if not isinstance(factory, sessionmaker):
            _refuse("the session is not a scoped_session over a sessionmaker, so it cannot be joined")
        if factory.class_.get_bind is not JoiningSession.get_bind:
            factory.class_ = _joining(factory.class_)
        return factory

    def joining(self) -> Session | None:
        """The present session, if it has been used. From now on it joins operations.

        Asked for each operation: something else, such as a test's double, may make the sessions by now.
        Raises ``ConfigurationError`` if they would not join.
        """
        self.let_join()
        session = self.present()
        if session is not None:
            session.__class__ = _joining(type(session))
        return session

    def present(self) -> Session | None:
        """The session of the present application context, if it has been used.

        Flask-SQLAlchemy-Lite makes it if it was not there: nothing public tells.
        """
        found: Any = self._holder.session
        if isinstance(found, Session):
            return found
        return found.registry() if found.registry.has() else None

    def current(self) -> Session:
        """The same, made if need be."""
        found: Any = self._holder.session
        session: Session = found if isinstance(found, Session) else found()
        return session

    def metadata_of(self, name: str | None) -> MetaData:
        """The metadata of the tables that one engine has, made as for the bind's first model."""
        if self._metadata is not None:
            return self._metadata
        metadatas, usual = self._holder.metadatas, self._holder.metadata
        made = MetaData(naming_convention=usual.naming_convention, info={"bind_key": name})
        return metadatas.setdefault(name, made)  # type: ignore[no-any-return]


def sessions_of(app: Flask, db: Any, session: Any, metadata: Any) -> Sessions:
    """The sessions that ``Idempotency(app, db, session=..., metadata=...)`` was given.

    Raises ``ConfigurationError``, with what is allowed, for anything else.
    """
    if session is not None and db is not None:
        _refuse("both db and session were given")
    if session is not None:
        holder = SimpleNamespace(session=session)
        bind = Sessions(holder, {}, None).let_join().kw.get("bind")
        if not isinstance(bind, Engine):
            _refuse(f"the session's bind is {shown(bind)}")
        return Sessions(holder, {None: bind}, _checked(metadata))
    registered: Any = app.extensions.get("sqlalchemy")
    db = db or registered
    lite = getattr(sys.modules.get("flask_sqlalchemy_lite"), "SQLAlchemy", ())
    if not isinstance(db, (SQLAlchemy, lite)) or db is not registered:
        _refuse(f"db is {shown(db)}: call db.init_app(app) before idempotency.init_app(app, db)")
    with app.app_context():
        if not isinstance(db, SQLAlchemy):
            return Sessions(db, db.engines, _checked(metadata), db.sessionmaker, "default")
        if metadata is not None:
            _refuse("metadata was given beside Flask-SQLAlchemy, which has its own")
        return Sessions(db, db.engines, None)


def sessions_here() -> Sessions | None:
    """Those of the present application, if any: also where the extension was not set up."""
    if not has_app_context():
        return None
    state = current_app.extensions.get("idempotency")
    if state is not None:
        return state.sessions  # type: ignore[no-any-return]
    db = current_app.extensions.get("sqlalchemy")
    return Sessions(db, db.engines, None) if isinstance(db, SQLAlchemy) else None


def _checked(metadata: Any) -> MetaData:
    if not isinstance(metadata, MetaData):
        _refuse(f"metadata is {shown(metadata)}, and the tables of the records are to be part of it")
    return metadata


def _refuse(what: str) -> NoReturn:
    raise ConfigurationError(
        f"{what}; allowed: Idempotency(app, db) with the db of Flask-SQLAlchemy;"
        " Idempotency(app, db, metadata=Base.metadata) with that of Flask-SQLAlchemy-Lite;"
        " Idempotency(app, session=scoped_session(sessionmaker(engine)), metadata=Base.metadata)"
        " with neither"
    )
