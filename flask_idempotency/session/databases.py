"""What the sessions of one application work on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Engine, QueuePool, Table

from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.core.ports import Records


@dataclass(eq=False, repr=False)
class Databases:
    """The databases of an application: its ``engines`` by bind key, and the one with the records.

    ``proved`` is the class of sessions that are known to join operations.
    """

    app: Flask
    db: SQLAlchemy
    engines: Mapping[str | None, Engine]
    database: Engine
    table: Table
    records: Records
    proved: type | None = field(default=None, init=False)

    def engines_of(self, bind_keys: Iterable[str | None]) -> frozenset[Engine]:
        """The engines of some binds. Raises ``ConfigurationError`` for one that is not there."""
        try:
            return frozenset(map(self.engines.__getitem__, bind_keys))
        except KeyError as error:
            raise ConfigurationError(
                f"other_binds names {error.args[0]!r}; this application has {list(self.engines)}"
            ) from None


def bind_keys_of(engine: Engine, engines: Mapping[str | None, Engine]) -> list[str | None]:
    """By what keys an application knows ``engine``: one, or none for an engine of somebody else's."""
    return [key for key, each in engines.items() if each.engine.pool is engine.pool]


def most_connections(engine: Engine) -> int | None:
    """How many connections an engine's pool may open; None if there is no limit that it tells."""
    pool = engine.pool
    if not isinstance(pool, QueuePool) or pool._max_overflow < 0:  # noqa: SLF001
        return None
    return pool.size() + pool._max_overflow  # noqa: SLF001
