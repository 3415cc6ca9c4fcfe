"""What an application stands on: its database, with driver and metadata, and the server around it."""

from __future__ import annotations

import hashlib
import inspect
import logging
from traceback import walk_stack
from typing import Any

from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import URL, MetaData, make_url
from sqlalchemy.exc import ArgumentError

from flask_idempotency.core.errors import ConfigurationError, shown

log = logging.getLogger("flask_idempotency")


def database_uri(app: Flask, bind_key: str | None) -> tuple[Any, str]:
    """The configured URL of a bind, and the setting that has it."""
    if bind_key is None:
        return app.config.get("SQLALCHEMY_DATABASE_URI"), "SQLALCHEMY_DATABASE_URI"
    binds = app.config.get("SQLALCHEMY_BINDS") or {}
    uri = binds.get(bind_key)
    return (uri.get("url") if isinstance(uri, dict) else uri), f"SQLALCHEMY_BINDS[{bind_key!r}]"


def _configured(app: Flask, bind_key: str | None) -> tuple[URL, str]:
    """Like :func:`database_uri`, parsed. Raises ``ConfigurationError`` if there is none or no URL."""
    uri, where = database_uri(app, bind_key)
    if uri is None and bind_key is not None:
        known = [*(app.config.get("SQLALCHEMY_BINDS") or {}), None]
        raise ConfigurationError(
            f"IDEMPOTENCY_BIND_KEY is {shown(bind_key)}; allowed: {', '.join(map(shown, known))}"
            " (the keys of SQLALCHEMY_BINDS)"
        )
    if uri is None:
        raise ConfigurationError(f"{where} is not set, so there is no database for the records")
    try:
        return make_url(uri), where
    except ArgumentError:
        raise ConfigurationError(f"{where} is not a database URL") from None


def check_driver(app: Flask, bind_key: str | None, store: Any) -> None:
    """Raise ``ConfigurationError``, with the fix, for a database that the store does not support."""
    url, where = _configured(app, bind_key)
    kind = url.get_backend_name()
    if store in ("memory", "redis") or not isinstance(store, str):
        return
    if store == "sql" and kind == "sqlite":
        if url.database in (None, "", ":memory:") or "mode" in url.query:
            raise ConfigurationError(
                f"{where} is a SQLite database in memory, to which all requests share one connection:"
                " use a file, or IDEMPOTENCY_STORE = 'memory'"
            )
        return
    if kind != "postgresql":
        raise ConfigurationError(
            f"{where} is for {kind}; the store {store!r} needs PostgreSQL:"
            " postgresql+psycopg2://user:password@host/database. For development,"
            " IDEMPOTENCY_STORE = 'sql' works on a SQLite file"
        )
    try:
        driver = url.get_dialect().driver  # SQLAlchemy 2.1 reads postgresql:// as psycopg 3
    except ModuleNotFoundError:
        driver = url.drivername
    if driver != "psycopg2":
        raise ConfigurationError(
            f"{where} begins with {url.drivername}://, which means the driver {driver}; only psycopg2"
            " is supported: write postgresql+psycopg2://user:password@host/database"
        )


def metadata_of(db: SQLAlchemy, bind_key: str | None) -> MetaData:
    """The metadata of a bind, made as Flask-SQLAlchemy would for its first model."""
    if bind_key not in db.metadatas:
        convention = db.metadata.naming_convention
        info = {"bind_key": bind_key}
        db.metadatas[bind_key] = MetaData(naming_convention=convention, info=info)
    return db.metadatas[bind_key]


def default_prefix(app: Flask, bind_key: str | None, table: str) -> str:
    """Tells databases and tables apart, so that applications may share one Redis."""
    url = make_url(database_uri(app, bind_key)[0])
    place = "\n".join(str(part) for part in (url.host, url.port, url.database, table))
    return f"idempotency:{hashlib.sha256(place.encode()).hexdigest()[:12]}:"


def worker_timeout() -> float:
    """After how many seconds gunicorn kills a stuck worker; 0 if it does not, or is not known.

    gunicorn tells applications nothing of its configuration, and reading that again would run its file
    twice. But gunicorn calls the application, so its own objects are further up the stack.
    """
    for frame, _ in walk_stack(inspect.currentframe()):
        if str(frame.f_globals.get("__name__")).startswith("gunicorn."):
            cfg = getattr(frame.f_locals.get("self"), "cfg", None)
            if cfg is not None:
                return float(getattr(cfg, "timeout", 0))
    return 0.0


def warn_if_short(lease_seconds: float, timeout_seconds: float, what: str) -> None:
    """Log that a lease ends before gunicorn kills its worker."""
    if lease_seconds < timeout_seconds:
        log.warning(
            "%s is %g s, shorter than gunicorn's timeout of %g s: a slow request may count"
            " as interrupted although it is alive",
            what,
            lease_seconds,
            timeout_seconds,
        )
