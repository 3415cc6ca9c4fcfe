"""What the sessions of one application work on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flask import Flask
from sqlalchemy import Connection, Engine, QueuePool, Table

from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.core.ports import Records
from flask_idempotency.private import connections

from .leftovers import has_written, of_tests
from .sessions import Sessions


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

    def engines_of(self, bind_keys: Iterable[str | None]) -> frozenset[Engine]:
        """The engines of some binds. Raises ``ConfigurationError`` for one that is not there."""
        engines = self.sessions.engines
        try:
            return frozenset(map(engines.__getitem__, bind_keys))
        except KeyError as error:
            raise ConfigurationError(
                f"other_binds names {error.args[0]!r}; this application has {list(engines)}"
            ) from None

    def connection_of_test(self) -> Connection | None:
        """The connection to which a test of the application has bound ``db.session``, or None.

        Its transaction is the test's, which rolls it back: only with ``app.testing`` may an operation
        be part of that.
        """
        if not self.app.testing:
            return None
        bind: Any = self.sessions.engines[self.bind_key]
        if isinstance(bind, Engine):
            bind = self.sessions.current().bind
        if not isinstance(bind, Connection):
            return None
        of_tests.add(bind)
        return bind

    def blocks_records(self) -> bool:
        """Return True if ``db.session`` keeps the records from being written: SQLite has one writer."""
        session = self.sessions.present() if self.records.one_writer else None
        return session is not None and any(map(has_written, connections(session)))


def most_connections(engine: Engine) -> int | None:
    """How many connections an engine's pool keeps; None if there is no limit that it tells."""
    return (engine.pool.size() or None) if isinstance(engine.pool, QueuePool) else None
