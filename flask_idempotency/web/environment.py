"""What an application stands on: its database, with driver and metadata, and the server around it."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from traceback import walk_stack
from typing import Any

from sqlalchemy import Engine, StaticPool

from flask_idempotency.core.errors import AUTOCOMMIT, ConfigurationError, shown
from flask_idempotency.core.logs import log
from flask_idempotency.session.sources import Sessions

from .settings import Settings


def bind_of(sessions: Sessions, settings: Settings) -> str | None:
    """The bind whose database has the records.

    Raises ``ConfigurationError`` if the application does not have it.
    """
    given = settings.bind_key
    key = sessions.usual if given is None else given
    if key not in sessions.engines:
        known = ", ".join(map(shown, sessions.engines)) or "none, as no engine is synchronous"
        by_default = " by default" if given is None else ""
        raise ConfigurationError(f"IDEMPOTENCY_BIND_KEY is {shown(key)}{by_default}; allowed: {known}")
    return key


def check_driver(engine: Engine, where: str, store: str, options: Mapping[str, Any]) -> None:
    """Raise ``ConfigurationError``, with the fix, for a database that the store does not support.

    ``where`` says where the engine's URL was set, and ``options`` are what it was made with.
    """
    url, kind = engine.url, engine.dialect.name
    if store == "redis":
        return
    if store == "sql" and kind == "sqlite":
        in_memory = url.database in (None, "", ":memory:") or "mode" in url.query
        if in_memory or isinstance(engine.pool, StaticPool):
            raise ConfigurationError(
                f"{where} is a SQLite database to which all requests share one connection: use a file,"
                " not one in memory, with SQLAlchemy's usual pool"
            )
        return
    if kind != "postgresql":
        raise ConfigurationError(
            f"{where} is for {kind}; the store {store!r} needs PostgreSQL:"
            " postgresql+psycopg2://user:password@host/database. For development,"
            " IDEMPOTENCY_STORE = 'sql' works on a SQLite file"
        )
    if engine.dialect.is_async:
        raise ConfigurationError(
            f"{where} begins with {url.drivername}://, which is a driver for asyncio; allowed:"
            " postgresql+psycopg2://, postgresql+psycopg://, or another one that is not"
        )
    every = {**options, **(options.get("execution_options") or {}), **engine.get_execution_options()}
    if str(every.get("isolation_level")).upper() == "AUTOCOMMIT":
        raise ConfigurationError(f"{where}: {AUTOCOMMIT}")


_VARIABLES = {
    "host": "PGHOST",
    "hostaddr": "PGHOSTADDR",
    "port": "PGPORT",
    "dbname": "PGDATABASE",
    "service": "PGSERVICE",
    "user": "PGUSER",
}
"""Where libpq looks for parameters that it is not given."""

_DECIDE = (
    *("host", "hostaddr", "port", "dbname", "service"),
    *("db", "odbc_connect", "option_files", "read_default_file", "unix_sock", "unix_socket"),
)
"""Parameters of drivers that say which database is meant. A service may give any other."""


def default_prefix(sessions: Sessions, bind_key: str | None, table: str, store: str) -> str:
    """Tells databases and tables apart, so that applications may share one Redis.

    Where host, port and database in the URL do so, it is what it has always been. Raises
    ``ConfigurationError`` where nothing says which database is meant, and where the store ``redis``
    would have another prefix than before: it would forget its records.
    """
    url, (setting, options) = sessions.engines[bind_key].url, sessions.origin_of(bind_key)
    given = {**url.query, **(options.get("connect_args") or {})}
    if "database" in given:
        given["dbname"] = given.pop("database")
    place = (url.host, url.port, url.database, table)
    written = {"host": url.host, "port": url.port, "dbname": url.database or None}
    used = {**written, "user": url.username, **given}
    if url.get_backend_name() == "postgresql":
        unset = [name for name in _VARIABLES if not used.get(name)]
        used.update({name: os.environ.get(_VARIABLES[name]) or None for name in unset})
        is_known = any(used[name] for name in ("dbname", "service", "user"))
    else:
        is_known = bool(url.host) or Path(url.database or "").is_absolute()
    if not (url.host and url.database):
        is_known = is_known and options.keys().isdisjoint({"creator", "pool"})
    more = {name: used.get(name) for name in _DECIDE if used.get(name) != written.get(name)}
    if not used["dbname"]:
        more["user"] = used["user"]  # libpq's default for the database
    if is_known and given.keys().isdisjoint({"conninfo", "dsn"}) and not (more and store == "redis"):
        return _prefix(*place, *sorted(more.items()))
    raise ConfigurationError(
        f"host, port and database in {setting} do not say alone which database is"
        " meant, so on one Redis this application could not be told from others: set"
        " IDEMPOTENCY_REDIS_PREFIX to a name that"
        f" no other has. Until now the prefix was {_prefix(*place)!r}; what is stored under it is found"
        " under no other"
    )


def _prefix(*place: object) -> str:
    text = "\n".join(map(str, place))
    return f"idempotency:{hashlib.sha256(text.encode()).hexdigest()[:12]}:"


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
