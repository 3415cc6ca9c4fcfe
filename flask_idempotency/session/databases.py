"""What the sessions of one application work on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flask import Flask
from sqlalchemy import Connection, Engine, QueuePool, Table

from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.core.ports import Records

from .sources import Sessions


@dataclass(eq=False, repr=False)
class Databases:
    """The databases of an application: its ``sessions``, and the engine that has the records.

    ``bind_key`` is the name of that engine, ``proved`` the class of sessions that are known to join
    operations.
    """

    app: Flask
    sessions: Sessions
    bind_key: str | None
    database: Engine
    table: Table
    records: Records
    engines: Mapping[str | None, Engine] = field(init=False)
    proved: type | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.engines = self.sessions.engines

    def engines_of(self, bind_keys: Iterable[str | None]) -> frozenset[Engine]:
        """The engines of some binds. Raises ``ConfigurationError`` for one that is not there."""
        try:
            return frozenset(map(self.engines.__getitem__, bind_keys))
        except KeyError as error:
            raise ConfigurationError(
                f"other_binds names {error.args[0]!r}; this application has {list(self.engines)}"
            ) from None


def refuse_replaced_engine(databases: Databases) -> None:
    """Raise ``ConfigurationError`` unless the engine still has the pool that the records use."""
    engine: Engine | Connection = databases.sessions.engines[databases.bind_key]
    if isinstance(engine, Connection):
        raise ConfigurationError(
            "the engine of the records was replaced by a connection, which the records do not use, so"
            " nothing would be protected"
        )
    if engine.pool is not databases.database.pool:
        raise ConfigurationError(
            "db.init_app() was called again after idempotency.init_app(), or the engine was replaced:"
            f" the records would stay in the first database ({databases.database.url.database}). Make a"
            " new application for each database, with its URL set before db.init_app()"
        )


def bind_keys_of(engine: Engine, engines: Mapping[str | None, Engine]) -> list[str | None]:
    """By what keys an application knows ``engine``: one, or none for an engine of somebody else's."""
    return [key for key, each in engines.items() if each.engine.pool is engine.pool]


def most_connections(engine: Engine) -> int | None:
    """How many connections an engine's pool keeps; None if there is no limit that it tells."""
    return (engine.pool.size() or None) if isinstance(engine.pool, QueuePool) else None
