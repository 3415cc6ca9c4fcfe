"""What the sessions of one application work on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flask import Flask
from sqlalchemy import Connection, Engine, QueuePool, Table

from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.core.ports import Records

from .leftovers import holds_changes
from .sources import Sessions


@dataclass(eq=False, repr=False)
class Databases:
    """The databases of an application: its ``sessions``, and the engine that has the records.

    ``bind_key`` is the name of that engine.
    """

    app: Flask
    sessions: Sessions
    bind_key: str | None
    database: Engine
    table: Table
    records: Records
    engines: Mapping[str | None, Engine] = field(init=False)

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

    def blocks_records(self) -> bool:
        """Return True if ``db.session`` keeps the records from being written: SQLite has one writer."""
        return self.records.one_writer and holds_changes(self.sessions.present(), self.database.pool)

    def refuse_replaced(self) -> None:
        """Raise ``ConfigurationError`` unless the engine still has the pool that the records use."""
        bind: Engine | Connection = self.sessions.engines[self.bind_key]
        if isinstance(bind, Connection) or bind.pool is not self.database.pool:
            raise ConfigurationError(
                "the engine was replaced after idempotency.init_app(), by a connection or because"
                " db.init_app() was called again: the records would stay in the first database"
                f" ({self.database.url.database}), and nothing would be protected. Make a new"
                " application for each database, with its URL set before db.init_app()"
            )


def most_connections(engine: Engine) -> int | None:
    """How many connections an engine's pool keeps; None if there is no limit that it tells."""
    return (engine.pool.size() or None) if isinstance(engine.pool, QueuePool) else None
