"""Where an application's sessions and engines come from, whatever made them.

The extension asks no other file about Flask-SQLAlchemy, Flask-SQLAlchemy-Lite or a ``scoped_session``
of SQLAlchemy's own. Names of engines are bind keys in the first, the names in ``SQLALCHEMY_ENGINES`` in
the second; the last has one engine.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from flask import Flask, current_app, has_app_context
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Engine, MetaData
from sqlalchemy.orm import Session, sessionmaker

from flask_idempotency.core.errors import ConfigurationError, shown


class Sessions:
    """An application's sessions, the engines that they work on, and the metadata of its tables.

    These are of a ``scoped_session``, which ``holder.session`` is; the others differ in parts.
    ``usual`` is the name of the engine that has the records where no setting says otherwise.
    """

    usual: str | None = None

    def __init__(
        self, holder: Any, engines: Mapping[str | None, Engine], metadata: MetaData | None
    ) -> None:
        self._holder, self._engines, self._metadata = holder, engines, metadata

    @property
    def engines(self) -> Mapping[str | None, Engine]:
        """The engines by name."""
        return self._engines

    @property
    def factory(self) -> sessionmaker[Any]:
        """What makes the sessions, of its own class. Raises ``ConfigurationError`` if nothing does."""
        factory = getattr(self._holder.session, "session_factory", None)
        if not isinstance(factory, sessionmaker):
            raise ConfigurationError(
                "the session is not a scoped_session over a sessionmaker, so the writes of a view"
                " cannot be joined to the operation's transaction; allowed:"
                " scoped_session(sessionmaker(engine)), or the db of Flask-SQLAlchemy as it makes it"
            )
        return factory

    def present(self) -> Session | None:
        """The session of the present application context, if it has been used."""
        registry = self._holder.session.registry
        return registry() if registry.has() else None

    def current(self) -> Session:
        """The same, made if need be."""
        session: Session = self._holder.session()
        return session

    def metadata_of(self, _name: str | None) -> MetaData:
        """The metadata of the tables that one engine has."""
        metadata: Any = self._metadata
        return metadata  # type: ignore[no-any-return]


class FlaskSQLAlchemySessions(Sessions):
    """Those of Flask-SQLAlchemy 3: ``db.session``, with a metadata for each bind key."""

    def __init__(self, app: Flask, db: SQLAlchemy):
        with app.app_context():
            super().__init__(db, db.engines, None)

    def metadata_of(self, name: str | None) -> MetaData:
        """See :class:`Sessions`. It is made as for the bind's first model."""
        metadatas, usual = self._holder.metadatas, self._holder.metadata
        made = MetaData(naming_convention=usual.naming_convention, info={"bind_key": name})
        return metadatas.setdefault(name, made)  # type: ignore[no-any-return]


class LiteSessions(Sessions):
    """Those of Flask-SQLAlchemy-Lite: ``db.session`` in ``flask.g``, and others by name."""

    usual: str | None = "default"

    def __init__(self, app: Flask, db: Any, metadata: MetaData):
        with app.app_context():
            super().__init__(db, db.engines, metadata)
            self._factory: sessionmaker[Any] = db.sessionmaker
        self._app = app

    @property
    def engines(self) -> Mapping[str | None, Engine]:
        """See :class:`Sessions`: of the last ``db.init_app()``, which makes them anew, in a request."""
        is_here = has_app_context() and current_app == self._app
        return self._holder.engines if is_here else self._engines

    @property
    def factory(self) -> sessionmaker[Any]:
        """See :class:`Sessions`."""
        return self._factory

    def current(self) -> Session:
        """See :class:`Sessions`."""
        session: Session = self._holder.session
        return session

    present = current  # made if it was not there: nothing public tells


def sessions_of(app: Flask, db: Any, session: Any, metadata: Any) -> Sessions:
    """The adapter for what ``Idempotency(app, db, session=..., metadata=...)`` was given.

    Raises ``ConfigurationError``, with what is allowed, for anything else.
    """
    if session is not None and db is not None:
        raise ConfigurationError("both db and session were given; allowed: one of them")
    if session is not None:
        holder = SimpleNamespace(session=session)
        engine = _bind_of(Sessions(holder, {}, None).factory)
        return Sessions(holder, {None: engine}, _checked(metadata, "session=session"))
    registered = app.extensions.get("sqlalchemy")
    db = db or registered
    lite = getattr(sys.modules.get("flask_sqlalchemy_lite"), "SQLAlchemy", ())
    if db is not None and not isinstance(db, SQLAlchemy) and not isinstance(db, lite):
        raise ConfigurationError(
            f"db is {shown(db)}; allowed: a SQLAlchemy object of flask_sqlalchemy or of"
            " flask_sqlalchemy_lite. For a scoped_session write Idempotency(app, session=session,"
            " metadata=Base.metadata)"
        )
    if db is None or registered is not db:
        raise ConfigurationError(
            "this application has no Flask-SQLAlchemy yet: call db.init_app(app) before"
            " idempotency.init_app(app, db, ...)"
        )
    if not isinstance(db, SQLAlchemy):
        return LiteSessions(app, db, _checked(metadata, "db"))
    if metadata is not None:
        raise ConfigurationError("metadata was given; allowed only where Flask-SQLAlchemy has none")
    return FlaskSQLAlchemySessions(app, db)


def sessions_here() -> Sessions | None:
    """Those of the present application, if any: also where the extension was not set up."""
    if not has_app_context():
        return None
    state = current_app.extensions.get("idempotency")
    if state is not None:
        return state.sessions  # type: ignore[no-any-return]
    db = current_app.extensions.get("sqlalchemy")
    return FlaskSQLAlchemySessions(current_app, db) if isinstance(db, SQLAlchemy) else None


def _checked(metadata: Any, given: str) -> MetaData:
    if not isinstance(metadata, MetaData):
        raise ConfigurationError(
            f"metadata is {shown(metadata)}; allowed: that of your models, which the tables of the"
            f" records become part of: Idempotency(app, {given}, metadata=Base.metadata)"
        )
    return metadata


def _bind_of(factory: sessionmaker[Any]) -> Engine:
    bind = factory.kw.get("bind")
    if not isinstance(bind, Engine):
        raise ConfigurationError(
            f"the session's bind is {shown(bind)}; allowed: an engine, given before"
            " idempotency.init_app(): scoped_session(sessionmaker(engine)). For Flask-SQLAlchemy write"
            " Idempotency(app, db)"
        )
    return bind
