"""The records in a transaction of somebody else's: of a test of the application, which rolls it back.

PostgreSQL or SQLite: all is sent on one connection, and nothing is committed. An operation is
a savepoint. Nothing locks against itself there, so it is noted which atomic operation runs, or step.
"""

from __future__ import annotations

import time
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection

from flask_idempotency.core.errors import LeaseLost, NotAtomic, StoreUnavailable
from flask_idempotency.core.records import Claim, Record, StoredResponse
from flask_idempotency.core.rows import claim_values, record_of, response_values, step_values
from flask_idempotency.drivers.raw_connection import IDLE, RawConnection, raw_of
from flask_idempotency.session.transaction import FAILED_INSIDE, NOT_OURS, OperationTransaction

from .lease import Lease

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
        self._usual, self.sql, self.connection = usual, usual.sql, connection

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
            return raw.send(self._usual.prepared(template), values)
        except raw.Error as error:
            raise self._usual.error(error) from error


class _Hold:
    """An atomic operation that is ours, or a step, as a savepoint of a test's transaction."""

    def __init__(self, messages: _Messages, claim: Claim, attempt: int) -> None:
        self._messages, self._claim, self.attempt = messages, claim, attempt
        self._open, self._is_done = True, False
        self.connection, raw = messages.connection, messages.raw()
        raw.take(continues=True)
        raw.send(f"SAVEPOINT {_SAVEPOINT}")
        has_constraints = self.connection.dialect.name == "postgresql"
        self.transaction = OperationTransaction(
            self.connection, raw, deferred=has_constraints, first=None
        )
        _running[self.connection] = claim.key

    def explain(self, error: BaseException | None) -> Exception | None:  # noqa: ARG002
        """Return what makes the operation void, whatever the error says."""
        transaction = self.transaction
        if transaction.broken is not None or not self._open:
            return transaction.broken
        if transaction.is_lost():
            return StoreUnavailable()
        return NotAtomic(NOT_OURS) if transaction.raw.status() == IDLE else None

    def complete(self, response: StoredResponse) -> None:
        """Store the response."""
        self._finish(self._messages.sql.finish, response_values(response))

    def record(self, step: str, result: bytes | None) -> None:
        """Record the step."""
        self._finish(self._messages.sql.record_step, step_values(step, self.attempt, result))

    def _finish(self, template: str, values: dict[str, Any]) -> None:
        try:
            if found := self.explain(None):
                raise found
            if self.transaction.is_failed():
                raise NotAtomic(FAILED_INSIDE)
            self.transaction.flush()
            if not self._messages.change(template, {**claim_values(self._claim), **values}):
                raise LeaseLost
            self._is_done = True
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Undo what the view did, unless it is done. Its savepoint stays: others may be open in it."""
        if self._open:
            self._open = False
            self.transaction.leave()
            raw = self.transaction.raw
            if not (self._is_done or self.transaction.is_lost() or raw.status() == IDLE):
                raw.send(f"ROLLBACK TO {_SAVEPOINT}")
            raw.leave()
            _running.pop(self.connection, None)


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
        fields = self._messages.sql.fields
        texts = ", ".join(f"CAST({field} AS text)" for field in fields.values())
        look = f"SELECT {texts}, fingerprint, body FROM {{table}} WHERE key = %(key)s"
        rows = self._messages.fetch(look, {"key": key})
        names = (*fields, "digest", "body")
        return record_of(key, dict(zip(names, rows[0], strict=True))) if rows else None

    def claim(self, claim: Claim) -> _Hold | _Lease | None:
        """Insert the record and hold it."""
        return self._hold(claim, self._messages.sql.insert)

    def look_or_claim(self, claim: Claim) -> Record | _Hold | _Lease | None:
        """The record, or a claim if there is none."""
        return self.look(claim.key) or self.claim(claim)

    def take_over(self, claim: Claim, as_seen: Record) -> _Hold | _Lease | None:
        """Make a record that nobody holds ours, as its next attempt."""
        return self._hold(claim, self._messages.sql.take_over, seen=as_seen.owner)

    def wait(self, _key: bytes, seconds: float) -> None:
        """Pause: whoever works on the same connection cannot be waited for."""
        time.sleep(min(seconds, 0.01))

    def _hold(self, claim: Claim, first: str, **more: Any) -> _Hold | _Lease | None:
        messages, values = self._messages, claim_values(claim)
        running = _running.get(messages.connection, claim.key)
        if running != claim.key:
            raise NotAtomic(_ONE_AT_A_TIME)
        if messages.connection in _running or not messages.change(first, {**values, **more}):
            return None
        ((attempt,),) = messages.fetch(messages.sql.attempt, values)
        if claim.lease_seconds is None:
            return _Hold(messages, claim, attempt)
        return _Lease(messages, claim, attempt=attempt)
