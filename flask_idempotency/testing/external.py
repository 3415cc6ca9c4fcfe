"""An application on one connection, in a transaction that the test rolls back.

Where the application would begin and end a transaction, there are savepoints: those of its sessions
are the units that an operation has, too, and each transaction of ours is one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from flask import Flask
from sqlalchemy import Connection, Engine

from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.drivers.port import FAILED, IDLE, Answer, innermost
from flask_idempotency.drivers.raw_connection import RawConnection
from flask_idempotency.session.questions import literal
from flask_idempotency.session.sources import FlaskSQLAlchemySessions
from flask_idempotency.session.units import StandIn, Units
from flask_idempotency.stores.postgres.messages import Messages
from flask_idempotency.web.setup.app_state import app_state

_SAVEPOINT = "idempotency_external"
_SET = "lock_timeout", "synchronous_commit", "enable_sort"
"""What our statements set until the end of their transaction. A RELEASE does not undo that."""

_ENDS = re.compile(r"\b(?:BEGIN|SET TRANSACTION)\b[^;]*;|\b(?:COMMIT|ROLLBACK)\b")


_ONE = (
    "external_transaction() has one connection, which is the operation's while its view runs: send one"
    " request after the other, and in a view use db.session"
)


@contextmanager
def external_transaction(app: Flask, connection: Connection) -> Iterator[None]:
    """Let an application work on one connection only, in a transaction that is yours to roll back.

    Records, the view's writes and all that ``db.session`` commits are in savepoints there. For
    Flask-SQLAlchemy 3 and the stores ``hybrid`` and ``postgres``; ``connection`` is one to the database
    of the records, and has begun its transaction. Raises ``ConfigurationError`` otherwise.
    """
    state = app_state(app)
    engine, usual = state.database, Messages.connect
    is_begun = connection.engine.url == engine.url and connection.in_transaction()
    is_for = state.settings.store in ("hybrid", "postgres") and isinstance(
        state.sessions, FlaskSQLAlchemySessions
    )
    if not (is_for and is_begun):
        raise ConfigurationError(
            "external_transaction() is for Flask-SQLAlchemy 3 and the stores hybrid and postgres, and"
            " needs a connection that has begun a transaction (begin()): of db.engine, or of an engine"
            " with the same URL"
        )
    outside = _Outside(engine, connection)

    def connect(messages: Messages) -> RawConnection:
        return _Savepoint(outside, messages) if messages.is_like(engine) else usual(messages)

    engines = {key: each.engine for key, each in state.engines.items()}
    here = {key: outside.bind(each) for key, each in engines.items() if each.pool is engine.pool}
    with patch.dict(state.engines, here), patch.object(Messages, "connect", connect):
        try:
            yield
        finally:
            outside.close()


class _Outside(Units):
    """What the application does outside of any operation, which borrows the connection."""

    is_lent = False

    def __init__(self, engine: Engine, connection: Connection) -> None:
        super().__init__(engine, connection.connection)
        values = {name: connection.exec_driver_sql(f"SHOW {name}").scalar_one() for name in _SET}
        calls = (f"set_config('{name}', {literal(value)}, true)" for name, value in values.items())
        self.settings_back = f"SELECT {', '.join(calls)};"

    def lend(self) -> None:
        """Let nobody else use the connection for a while."""
        with self.lock:
            if self.is_lent:
                raise ConfigurationError(_ONE)
            if self._open is not None:
                self._give_way(self.top)
                self._open = None
            self.is_lent = True

    def enter(self, owner: StandIn, text: str) -> None:
        """Refuse what would be part of an operation without belonging to it."""
        if self.is_lent:
            raise ConfigurationError(_ONE)
        super().enter(owner, text)


class _Savepoint(RawConnection):
    """A connection of the store's whose transactions are savepoints: there is always one open."""

    def __init__(self, outside: _Outside, messages: Messages) -> None:
        self.engine, self.port, self.fairy = outside.engine, messages.port, outside.fairy
        self.driver = innermost(self.fairy.dbapi_connection)
        self.is_spoiled = self.has_listener = self._autocommit = self._is_begun = False
        self.status, self._outside = self._state, outside
        outside.lend()
        self.closed = False
        super().send(f"SAVEPOINT {_SAVEPOINT}")

    def _state(self) -> int:
        begun = 2 if self._is_begun else IDLE
        return FAILED if self._outside.is_failed() else begun

    def send(
        self, text: str, values: dict[str, Any] | None = None, first: Sequence[str] = ()
    ) -> Answer:
        """See :class:`RawConnection`."""
        for word in _ENDS.findall(text):
            self._is_begun = word.startswith("BEGIN")
        return super().send(self._translated(text), values, first)

    def has_committed(self, answer: Answer) -> bool:  # noqa: ARG002
        """In a transaction that had failed, RELEASE fails."""
        return True

    def close(self) -> None:
        """Undo what is open, and give the connection back."""
        if self.closed:
            return
        self.closed = True
        if not self.lost:
            undo = "" if self.status() == IDLE else f"ROLLBACK TO {_SAVEPOINT};"
            super().send(f"{undo} {self._outside.settings_back} RELEASE {_SAVEPOINT}")
        self._outside.is_lent = False

    __del__ = close

    def _translated(self, sql: str) -> str:
        commit = f"{self._outside.settings_back} RELEASE {_SAVEPOINT}; SAVEPOINT {_SAVEPOINT}"
        ends = {"COMMIT": commit, "ROLLBACK": f"ROLLBACK TO {_SAVEPOINT}"}
        return _ENDS.sub(lambda found: ends.get(found[0], ""), sql)
