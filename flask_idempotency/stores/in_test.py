"""The records in a transaction of somebody else's: of a test of the application, which rolls it back.

PostgreSQL or SQLite: all is sent on one connection, and nothing is committed. An operation is
a savepoint. Nothing locks against itself there, so it is noted which atomic operation runs, or step.
"""

from __future__ import annotations

import time
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection

from flask_idempotency.core.errors import LeaseLost, NotAtomic
from flask_idempotency.core.records import Claim, Record
from flask_idempotency.drivers.raw_connection import IDLE, RawConnection, raw_of
from flask_idempotency.session.transaction import OperationTransaction

from .lease import Lease
from .sqlite import SqliteHold

_SAVEPOINT = "idempotency_operation"

_ONE_AT_A_TIME = (
    "two operations at once, and the test has bound db.session to one connection: test them without"
    " the fixture that rolls back"
)

_running: WeakKeyDictionary[Connection, bytes] = WeakKeyDictionary()
"""The key of the operation whose savepoint is open on a test's connection."""


class _Messages:
    """Sends statements of our own on a test's connection, one at a time."""

    alone = ""

    def __init__(self, usual: Any, connection: Connection) -> None:
        self.sql, self.prepared, self.error = usual.sql, usual.prepared, usual.error
        self.connection = connection

    def raw(self) -> RawConnection:
        """The driver's connection, which another operation may have taken."""
        raw = raw_of(self.connection.connection, self.connection.dialect)
        raw.continues = raw.is_unsure = True
        if self.connection.dialect.name == "sqlite" and raw.status() == IDLE:
            raw.send("BEGIN")  # the driver begins late, and the RELEASE of a lone SAVEPOINT commits
        return raw

    def fetch(self, template: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
        """The rows of a statement."""
        return self._send(template, values)[0]

    def change(self, template: str, values: dict[str, Any]) -> int:
        """How many rows a statement changed."""
        return self._send(template, values)[1]

    def _send(self, template: str, values: dict[str, Any]) -> tuple[list[tuple[Any, ...]], int]:
        raw = self.raw()
        try:
            return raw.send(self.prepared(template), values)
        except raw.Error as error:
            raise self.error(error) from error


class _Hold(SqliteHold):
    """An operation, or a step, as a savepoint. That stays when it ends: others may be open in it."""

    def __init__(self, messages: _Messages, claim: Claim, attempt: int) -> None:
        connection, raw = messages.connection, messages.raw()
        raw.take(continues=True)
        raw.send(f"SAVEPOINT {_SAVEPOINT}")
        has_constraints = connection.dialect.name == "postgresql"
        transaction = OperationTransaction(connection, raw, deferred=has_constraints, first=None)
        super().__init__(messages, claim, transaction, attempt)
        _running[connection] = claim.key

    def _commit(self) -> None:
        """Leave the connection to the test."""
        self._open = False
        self.transaction.leave()
        self.transaction.raw.leave()
        _running.pop(self.transaction.connection, None)

    def abandon(self) -> None:
        """Undo what the view did, unless it is done."""
        if self._open:
            self._commit()
            raw = self.transaction.raw
            if not (self.transaction.is_lost() or raw.status() == IDLE):
                raw.send(f"ROLLBACK TO {_SAVEPOINT}")


class _Lease(Lease):
    def open_step(self, connection: Connection | None = None) -> _Hold:  # noqa: ARG002
        """See :class:`Lease`."""
        if not self._messages.fetch(self._messages.sql.attempt, self._values):
            raise LeaseLost
        return _Hold(self._messages, self._claim, self.attempt)


class RecordsInTest:
    """The records of an application whose session is bound to a test's connection."""

    def __init__(self, records: Any, connection: Connection) -> None:
        self._messages = _Messages(records.messages, connection)

    def look(self, key: bytes) -> Record | None:
        """The record."""
        sql = self._messages.sql
        rows = self._messages.fetch(sql.look, {"key": key})
        return Record.read(key, dict(zip(sql.looked, rows[0], strict=True))) if rows else None

    def claim(self, claim: Claim) -> _Hold | _Lease | None:
        """Insert the record and hold it."""
        return self._hold(claim, self._messages.sql.insert)

    def take_over(self, claim: Claim, as_seen: Record) -> _Hold | _Lease | None:
        """Make a record that nobody holds ours, as its next attempt."""
        return self._hold(claim, self._messages.sql.take_over, seen=as_seen.owner)

    def wait(self, _key: bytes, seconds: float) -> None:
        """Pause: whoever works on the same connection cannot be waited for."""
        time.sleep(min(seconds, 0.01))

    def _hold(self, claim: Claim, first: str, **more: Any) -> _Hold | _Lease | None:
        messages, values = self._messages, claim.values()
        running = _running.get(messages.connection, claim.key)
        if running != claim.key:
            raise NotAtomic(_ONE_AT_A_TIME)
        if messages.connection in _running or not messages.change(first, {**values, **more}):
            return None
        ((attempt,),) = messages.fetch(messages.sql.attempt, values)
        if claim.lease_seconds is None:
            return _Hold(messages, claim, attempt)
        return _Lease(messages, claim, attempt=attempt)
