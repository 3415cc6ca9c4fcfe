"""The records in a transaction of somebody else's: of a test of the application, which rolls it back.

PostgreSQL or SQLite: all is sent on one connection, and nothing is committed. An operation is
a savepoint. Nothing locks against itself there, so one operation at a time may be atomic, or a step.
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection

from flask_idempotency.core.errors import LeaseLost, NotAtomic
from flask_idempotency.core.records import Claim, Record
from flask_idempotency.drivers.raw_connection import IDLE, Answer, RawConnection, raw_of
from flask_idempotency.session.transaction import OperationTransaction, transaction_of

from .holds import Hold, Lease, SqlRecords

_SAVEPOINT = "idempotency_operation"

_ONE_AT_A_TIME = (
    "two operations at once, and the test has bound db.session to one connection: test them without"
    " the fixture that rolls back"
)


class _Messages:
    """Sends statements of our own on a test's connection, one at a time."""

    def __init__(self, usual: Any, connection: Connection) -> None:
        self._usual, self.connection = usual, connection
        self.finish, self.record_step = usual.sql.finish, usual.sql.record_step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)

    def raw(self) -> RawConnection:
        """The driver's connection, which another operation may have taken."""
        raw = raw_of(self.connection.connection, self.connection.dialect)
        raw.continues = raw.is_unsure = raw.is_shown = True
        if self.connection.dialect.name == "sqlite" and raw.status() == IDLE:
            raw.send("BEGIN")  # the driver begins late, and the RELEASE of a lone SAVEPOINT commits
        return raw

    def fetch(self, template: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
        """The rows of a statement."""
        return self._send(template, values)[0]

    def change(self, template: str, values: dict[str, Any]) -> int:
        """How many rows a statement changed."""
        return self._send(template, values)[1]

    def _send(self, template: str, values: dict[str, Any]) -> Answer:
        raw = self.raw()
        try:
            return raw.send(self.prepared(template), values)
        except raw.Error as error:
            raise self.error(error) from error


class _SavepointTransaction(OperationTransaction):
    """An operation, or a step, as a savepoint. That stays when it ends: others may be open in it."""

    def commit(self, text: str, values: dict[str, Any]) -> None:
        """Leave the connection to the test."""
        self.flush()
        if self.raw.send(text, values)[1] == 0:
            raise LeaseLost
        self.leave()
        self.raw.leave()

    def end(self) -> None:
        """Undo what the view did, unless it is done."""
        if not self.is_over:
            self.leave()
            self.raw.leave()
            if not (self.is_lost() or self.raw.status() == IDLE):
                self.raw.send(f"ROLLBACK TO {_SAVEPOINT}")


class RecordsInTest(SqlRecords):
    """The records of an application whose session is bound to a test's connection."""

    messages: _Messages

    def __init__(self, records: SqlRecords, connection: Connection) -> None:
        self.messages = _Messages(records.messages, connection)

    def wait(self, _key: bytes, seconds: float) -> None:
        """Pause: whoever works on the same connection cannot be waited for."""
        time.sleep(min(seconds, 0.01))

    def open_step(self, claim: Claim, _connection: Connection | None) -> Hold | None:
        """A savepoint for one step, if the record is still this claim's."""
        messages, connection = self.messages, self.messages.connection
        rows = messages.fetch(messages.sql.attempt, claim.values())
        if not rows:
            return None
        raw = messages.raw()
        raw.take(continues=True)
        raw.send(f"SAVEPOINT {_SAVEPOINT}")
        has_constraints = connection.dialect.name == "postgresql"
        transaction = _SavepointTransaction(connection, raw, deferred=has_constraints, first=None)
        return Hold(messages, claim, transaction, {**claim.values(), "attempt": rows[0][0]})

    def _hold(self, claim: Claim, first: str, values: dict[str, Any]) -> Hold | Lease | Record | None:
        messages = self.messages
        if transaction_of(messages.connection) is not None:
            if (record := self.look(claim.key)) is not None:
                return record  # of a duplicate: what runs is the first request
            raise NotAtomic(_ONE_AT_A_TIME)
        if not messages.change(first, values):
            return None
        if claim.lease_seconds is None:
            return self.open_step(claim, None)
        return Lease(self, claim, messages.fetch(messages.sql.attempt, values)[0][0])
