"""The kinds of sessions that a test's application may have: ``--sessions lite``, or ``plain``.

What tests use of Flask-SQLAlchemy is there for the others under the same names, so that one suite runs
on each of them.
"""

from __future__ import annotations

import importlib
from typing import Any

import sqlalchemy as sa
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import orm
from sqlalchemy.util import ThreadLocalRegistry
from werkzeug.local import LocalProxy

import flask_idempotency

KINDS = ("flask-sqlalchemy", "lite", "plain")

usual = KINDS[0]
"""The kind that :func:`make_db` makes."""


class _Models:
    """A declarative base and its metadata, as Flask-SQLAlchemy gives them."""

    def __init__(self) -> None:
        self.made: dict[Any, sa.Engine] = {}
        self.binds: dict[Any, Any] = {}
        """For sessions: the engine of each model with a ``__bind_key__``, or its name before that."""
        binds, engines = self.binds, self.made

        class Base(orm.DeclarativeBase):
            def __init_subclass__(cls) -> None:
                super().__init_subclass__()
                if name := vars(cls).get("__bind_key__"):
                    binds[cls] = engines.get(name, name)

            @orm.declared_attr.directive
            def __tablename__(cls) -> str:  # noqa: N805
                return cls.__name__.lower()

        self.Model = Base
        self.metadata = Base.metadata

    @property
    def metadatas(self) -> dict[Any, sa.MetaData]:
        return dict.fromkeys(self.made, self.metadata)

    def create_all(self, only: str | None = None) -> None:
        for name, engine in self.made.items():
            if only in {None, name}:
                self.metadata.create_all(engine)


class Plain(_Models):
    """A ``scoped_session`` over one engine, as applications without any such extension write it."""

    def __init__(self, session_options: dict[str, Any] | None = None, **_: Any) -> None:
        super().__init__()
        self.session = orm.scoped_session(orm.sessionmaker(**(session_options or {})))

    def init_app(self, app: Flask) -> None:
        app.teardown_appcontext(lambda _error: self.session.remove())
        if self.made:
            return
        options = dict(app.config.get("SQLALCHEMY_ENGINE_OPTIONS") or {})
        url = app.config["SQLALCHEMY_DATABASE_URI"]
        if sa.make_url(url).database in {
            None,
            ":memory:",
        }:  # one for all, as the others make it
            options |= {"poolclass": sa.StaticPool, "connect_args": {"check_same_thread": False}}
        self.engine = sa.create_engine(url, **options)
        self.engines = self.made = {None: self.engine}
        self.session.configure(bind=self.engine)

    @property
    def given(self) -> dict[str, Any]:
        return {"session": self.session, "metadata": self.metadata}


class _Removable:
    """A session with the verbs of a ``scoped_session``."""

    def __call__(self) -> Any:
        return self

    def remove(self) -> None:
        self.close()  # type: ignore[attr-defined]


def _lite(session_options: dict[str, Any] | None = None, **options: Any) -> Any:
    made = importlib.import_module("flask_sqlalchemy_lite").SQLAlchemy
    session_options = {"class_": orm.Session, **(session_options or {})}
    session_options["class_"] = type("Session", (_Removable, session_options["class_"]), {})

    class Lite(_Models, made):  # type: ignore[misc]
        def __init__(self) -> None:
            _Models.__init__(self)
            self.session_class = session_options["class_"]
            made.__init__(self, session_options={**session_options, "binds": self.binds}, **options)

        def init_app(self, app: Flask) -> None:
            usual = {
                "url": app.config["SQLALCHEMY_DATABASE_URI"],
                **(app.config.get("SQLALCHEMY_ENGINE_OPTIONS") or {}),
            }
            binds = app.config.get("SQLALCHEMY_BINDS") or {}
            app.config["SQLALCHEMY_ENGINES"] = {"default": usual, **binds}
            super().init_app(app)
            with app.app_context():
                self.made.update(self.engines)

        @property
        def given(self) -> dict[str, Any]:
            return {"db": self, "metadata": self.metadata}

    return Lite()


def make_db(**options: Any) -> Any:
    """What an application has its sessions from. Options: those of ``SQLAlchemy(...)``."""
    if usual == "lite":
        return _lite(**options)
    return Plain(**options) if usual == "plain" else SQLAlchemy(**options)


def protect(app: Flask, db: Any, **options: Any) -> flask_idempotency.Idempotency:
    """The extension on an application, with what its kind of session needs."""
    idempotency = flask_idempotency.Idempotency()
    if usual == "plain" and app.config["SQLALCHEMY_DATABASE_URI"].startswith("sqlite"):
        app.config.setdefault("IDEMPOTENCY_REDIS_PREFIX", app.config["SQLALCHEMY_DATABASE_URI"])
    idempotency.init_app(app, **getattr(db, "given", {"db": db}), **options)
    return idempotency


def proxy_of(db: Any) -> Any:
    """What stands for the session of each context, and is there outside of them."""
    return LocalProxy(lambda: db.session) if usual == "lite" else db.session


def heard(db: Any) -> Any:
    """What listeners of an application's sessions are given, also before its ``init_app()``."""
    return db.session_class if usual == "lite" else db.session


def present_session(db: Any) -> orm.Session:
    """The session that ``db.session`` stands for, or is."""
    session: orm.Session = getattr(db.session, "registry", lambda: db.session)()
    return session


def factory_of(app: Flask, db: Any) -> Any:
    """What makes the sessions."""
    if usual != "lite":
        return db.session.session_factory  # the end of a context would remove a plain session
    with app.app_context():
        return db.sessionmaker


def left_behind(db: Any) -> bool:
    """Whether a session was not removed with its context: then it is now."""
    if usual == "lite":
        return False  # it goes with flask.g
    registry = db.session.registry
    if isinstance(registry, ThreadLocalRegistry):
        was_there = registry.has()
        registry.clear()
        return was_there
    was_there = bool(registry.registry)
    registry.registry.clear()  # a later context may have the same identity
    return was_there
