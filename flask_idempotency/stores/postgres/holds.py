"""The holds of operations in PostgreSQL: the row's lock while a view or a step runs, or a lease."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from sqlalchemy import Connection

from flask_idempotency.core.errors import (
    LeaseLost,
    NotAtomic,
    RequestInProgress,
    StoreUnavailable,
    TransactionConflict,
    sqlstate,
)
from flask_idempotency.core.records import Claim, Record, StoredResponse
from flask_idempotency.core.rows import claim_values, record_of, response_values
from flask_idempotency.drivers.port import IDLE
from flask_idempotency.drivers.raw_connection import RawConnection
from flask_idempotency.drivers.sqlstates import ABORTED, NO_SAVEPOINT, is_lost
from flask_idempotency.session.postgres_units import PostgresUnits
from flask_idempotency.stores.admin import original
from flask_idempotency.stores.lease import Lease

from . import lease_statements, statements
from .failures import (
    CONFLICTS,
    DIVISION_BY_ZERO,
    LOCK_NOT_AVAILABLE,
    problem,
    store_error,
)
from .messages import KeepsConnection, Messages

NOT_OURS = CONFLICTS | {LOCK_NOT_AVAILABLE}
"""Errors that mean that somebody else has the row."""


class PostgresHold(KeepsConnection):
    """A transaction that holds the row of a record that is ours: an atomic operation's, or a step's."""

    def __init__(
        self,
        messages: Messages,
        wire: RawConnection,
        claim: Claim,
        values: dict[str, Any],
        locked: list[str],
    ) -> None:
        self._messages, self._wire, self._claim = messages, wire, claim
        found = dict(zip(statements.LOCKED, locked, strict=False))
        self.attempt = int(found["attempt"])
        self._session = {**values, **found, "xid": int(found["xid"])}
        self._open, self._committed = True, False
        self._began = time.monotonic()
        self.units = PostgresUnits(wire, messages.facts(wire), found["isolation"])

    @classmethod
    def open(cls, messages: Messages, template: str, claim: Claim, **more: Any) -> PostgresHold | None:
        """Send a message that ends by locking the row; None if it could not be locked."""
        lock = partial(cls.lock, messages=messages, template=template, claim=claim, **more)
        return messages.on_a_wire(lock)

    @classmethod
    def lock(
        cls, wire: RawConnection, messages: Messages, template: str, claim: Claim, **more: Any
    ) -> PostgresHold | None:
        """Like :meth:`open`, on a connection that is open."""
        values = {**claim_values(claim), **more}
        try:
            row = wire.send(messages.prepared(template, wire), values).fetchone()
            return None if row is None else cls(messages, wire, claim, values, row[0])
        except wire.port.Error as error:
            if sqlstate(error) not in NOT_OURS:
                raise
            return None

    @property
    def connection(self) -> Connection:
        """A connection in the transaction, and in none of the view's units of work."""
        return self.units.connection

    def complete(self, response: StoredResponse) -> None:
        """Store the response and commit, in one round trip."""
        late = time.monotonic() - self._began > statements.LATE * self._claim.ttl_seconds
        template = statements.FINISH_LATE if late else statements.FINISH
        self._finish(template, response_values(response))

    def record(self, step: str, result: bytes) -> None:
        """Record the step and commit, in one round trip."""
        values = {"step": step, "result": result, "attempt": self.attempt}
        self._finish(lease_statements.FINISH_STEP, values)

    def _finish(self, template: str, values: dict[str, Any]) -> None:
        wire = self._wire
        try:
            with self.units.lock:  # a thread that the view has left behind sends nothing in between
                self._check()
                sql = self._messages.prepared(template, wire)
                answer = wire.send(sql, {**self._session, **values}, first=self.units.waiting)
                if not wire.has_committed(answer):
                    raise NotAtomic("the transaction had failed, so nothing was committed")
                self._committed = True
        except wire.port.Error as error:
            raise self._finish_error(error) from error
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Roll back what is open and give the connection back."""
        if self._open:
            self._open = False
            self._wire.is_spoiled = not self._committed and self.units.state() == IDLE
            self.units.close()
            self._wire.close()

    def explain(self, error: BaseException | None) -> Exception | None:
        """Return what an error that left the view (or None) means for the operation as a whole."""
        if self.units.broken is not None:
            return self.units.broken
        if self._wire.lost:
            return StoreUnavailable()
        if error is None or not self.units.is_ours(original(error)):
            return None
        return problem(error, self._wire.driver)

    def _check(self) -> None:
        """Refuse to finish a transaction that is not the one we began."""
        if not self._open:  # the connection may be another request's by now
            raise NotAtomic("the operation's transaction was rolled back before it was finished")
        if found := self.explain(None):
            raise found
        if self._wire.status() == IDLE:
            raise NotAtomic(
                "the view ended the operation's transaction: inside an atomic operation use"
                " db.session.commit() and rollback(), not those of current_operation.connection"
            )

    def _finish_error(self, error: Exception) -> Exception:
        """Return what failing to complete means; asks the record when the row was not ours."""
        if is_lost(error, self._wire.driver):
            return StoreUnavailable(
                "The connection to the database was lost, and it is not known whether the operation"
                " was committed; a retry with the same key finds out."
            )
        code = sqlstate(error) or ""
        if code == ABORTED:
            return NotAtomic(
                "a statement of the view failed and its error was caught without"
                " db.session.rollback(), so the transaction cannot commit"
            )
        self.units.facts.is_stale = True  # it may be a deferred constraint that is new in the database
        if code in (DIVISION_BY_ZERO, NO_SAVEPOINT):  # a unit's savepoint ended with its transaction
            self.abandon()
            return self._successor()
        return store_error(error, self._messages.table.fullname)

    def _successor(self) -> Exception:
        """The error for a record that is no longer ours."""
        if self._messages.owner(self._claim) == self._claim.owner:
            return NotAtomic(
                "the view ended the operation's transaction and began another, or hid the record from"
                " its role, so what it wrote and the record do not commit together"
            )
        return RequestInProgress(retry_after=1)


def record_in(key: bytes, texts: list[Any], digest: bytes, body: bytes | None) -> Record:
    """A row of ``statements.COLUMNS``. Raises ``RecordBroken``."""
    fields = dict(zip(statements.FIELDS, texts, strict=True))
    return record_of(key, {**fields, "digest": digest, "body": body})


class PostgresLease(Lease):
    """A lease in PostgreSQL."""

    statements = lease_statements

    def record(self, step: str, result: bytes) -> None:
        """Record a finished step and renew the lease, in one statement."""
        self._change(lease_statements.RECORD_STEP, step=step, result=result, attempt=self.attempt)

    def open_step(self) -> PostgresHold:
        """A transaction that holds the row, for one step."""
        for _ in range(2):
            hold = PostgresHold.open(self._messages, lease_statements.BEGIN_STEP, self._claim)
            if hold is not None:
                return hold
            # Nothing is lost if only a renewal, or another step of ours, was in the way.
            if self._messages.owner(self._claim) != self._claim.owner:
                raise LeaseLost
        raise TransactionConflict
