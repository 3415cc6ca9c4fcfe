"""The holds of operations in PostgreSQL: the row's lock while a view or a step runs, or a lease."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any
from weakref import WeakMethod

from sqlalchemy import Connection, exc

from flask_idempotency.core.errors import (
    LeaseLost,
    NotAtomic,
    RequestInProgress,
    StoreUnavailable,
    TransactionConflict,
    sqlstate,
)
from flask_idempotency.core.records import Claim, Record, StoredResponse, step_values
from flask_idempotency.drivers.raw_connection import (
    IDLE,
    Answer,
    RawConnection,
    checked_out,
    give_back,
    raw_of,
)
from flask_idempotency.session.transaction import FAILED, LASTING, OperationTransaction
from flask_idempotency.session.transaction import NOT_OURS as ENDED_PAST_US
from flask_idempotency.stores.admin import original
from flask_idempotency.stores.lease import Lease

from . import statements
from .failures import (
    ABORTED,
    CONFLICTS,
    DIVISION_BY_ZERO,
    LOCK_NOT_AVAILABLE,
    READ_ONLY,
    is_lost,
    problem,
    store_error,
)
from .messages import Messages

NOT_OURS = CONFLICTS | {LOCK_NOT_AVAILABLE}
"""Errors that mean that somebody else has the row."""

_REFUSED_BY_DRIVER = re.compile("during a two-phase transaction|forbidden within a Transaction")
"""What a driver's ``commit()`` says once its connection was handed out. No driver translates that."""

LATE = 0.01
"""The part of its retention that a view may take before that begins again when it ends."""

STRICT = ("repeatable read", "serializable")
"""Levels of isolation at which a transaction keeps seeing what it saw first."""

_READ_ONLY = (
    "db.session was in a transaction that is READ ONLY when the idempotent view began: end it before"
    " the view (db.session.rollback()), or begin it inside"
)
_STRICT = (
    "db.session had read before the idempotent view began, at {}: its transaction sees nothing of what"
    " was committed since, not even the record. End that transaction before the view"
    " (db.session.rollback()), or read inside"
)


class PostgresHold:
    """A transaction that holds the row of a record that is ours: an atomic operation's, or a step's."""

    def __init__(
        self,
        messages: Messages,
        claim: Claim,
        connection: Connection,
        raw: RawConnection,
        row: dict[str, str],
        values: dict[str, Any],
    ) -> None:
        self._messages, self._claim, self._values = messages, claim, values
        self._began, self._open = time.monotonic(), True
        facts = messages.facts()
        self.transaction = OperationTransaction(
            connection,
            raw,
            deferred=facts.deferred,
            reads_may_write=facts.reads_may_write,
            is_strict=row["isolation"] in STRICT,
            had_written=raw.continues and row["had_written"] == "true",
            again=WeakMethod(self._again) if raw.continues else None,
        )
        self._values.update(xid=int(row["xid"]), synchronous_commit=row["synchronous_commit"])
        self.attempt = int(row["attempt"])

    @classmethod
    def begin(
        cls,
        messages: Messages,
        claim: Claim,
        first: str,
        lock: str = statements.LOCK,
        **more: Any,
    ) -> PostgresHold | Record | None:
        """Send ``first`` and begin the transaction that locks the row.

        If that is somebody else's, this returns the record, or None where it was not read. Where the
        claim names a connection, or a listener of the pool has begun a transaction, that is continued.
        """
        if claim.connection is not None:
            return cls.inside(messages, claim, claim.connection, first, lock, **more)
        values = {**claim.values(), **more}

        def use() -> PostgresHold | Record | None:
            engine, raw, held, ours = messages.engine, None, None, None
            pooled = checked_out(engine)
            try:
                if LASTING.intersection(engine.get_execution_options()):
                    held = Connection(engine, pooled)  # SQLAlchemy sets them here, before BEGIN
                raw = raw_of(pooled, engine.dialect)
                if raw.status() != IDLE:
                    held = held or Connection(engine, pooled)
                    held.begin()
                    found = cls.inside(messages, claim, held, first, lock, **more)
                    ours = found if isinstance(found, PostgresHold) else None
                    return found
                raw.take()
                text = f"{first}BEGIN {{begin}};\n{lock}"
                row = _read(raw.send(messages.prepared(text, raw.level), values))
                if row["owner"] == claim.owner:
                    held = held or Connection(engine, pooled)
                    ours = cls(messages, claim, held, raw, row, values)
                    return ours
                look = messages.prepared(statements.LOOK)
                return record_in(claim.key, raw.send(look, values, ["ROLLBACK"]))
            except messages.Error as error:
                if sqlstate(error) not in NOT_OURS:
                    raise
                return None
            finally:
                if ours is None:
                    give_back(held or pooled, raw)

        return messages.twice(use)

    @classmethod
    def inside(
        cls,
        messages: Messages,
        claim: Claim,
        connection: Connection,
        first: str,
        lock: str = statements.LOCK,
        **more: Any,
    ) -> PostgresHold | Record | None:
        """The same in the transaction of a connection, which goes on if the row cannot be locked.

        ``first`` is sent on a connection of our own, and the record read there. Raises ``NotAtomic`` if
        the transaction has failed, may not write, or cannot see the record.
        """
        values, row, found = {**claim.values(), **more}, None, None
        if first and (record := _others(messages, claim, first, values)) is not None:
            return record
        raw = raw_of(connection.connection, connection.dialect)
        raw.take(continues=True)
        try:
            row = _read(raw.send(messages.prepared(statements.INSIDE[lock]), values))
            if row["owner"] == claim.owner:
                found = cls(messages, claim, connection, raw, row, values)
            else:
                raw.send(statements.NOT_LOCKED)
        except messages.Error as error:
            if sqlstate(error) == ABORTED:
                raise NotAtomic(FAILED) from error
            if is_lost(error, messages.Error, raw):
                connection.invalidate(error)  # so that nobody above the view meets it again
            else:
                raw.send(statements.LOCK_FAILED)
            if sqlstate(error) == READ_ONLY:
                raise NotAtomic(_READ_ONLY) from error
            if sqlstate(error) not in NOT_OURS:
                raise store_error(error, messages.table.fullname, messages.Error) from error
        finally:
            if found is None:
                raw.leave()
        if found is None and row is not None and row["isolation"] in STRICT:
            raise NotAtomic(_STRICT.format(row["isolation"].upper()))
        return found

    def _again(self) -> None:
        """Roll back what was before the view, too; begin again, and lock the row."""
        raw = self.transaction.raw
        text = self._messages.prepared(f"BEGIN {{begin}};\n{statements.LOCK}", raw.level)
        raw.begin_again()
        row = _read(raw.send(text, self._values))
        if row["owner"] != self._claim.owner:
            self.transaction.broken = RequestInProgress(retry_after=1)
            raise self.transaction.broken
        self._values.update(xid=int(row["xid"]), synchronous_commit=row["synchronous_commit"])

    @property
    def connection(self) -> Connection:
        """The connection whose transaction holds the row, for whatever is to be done on it."""
        self.transaction.show()
        return self.transaction.connection

    def complete(self, response: StoredResponse) -> None:
        """Store the response and commit, in one round trip."""
        late = time.monotonic() - self._began > LATE * self._claim.ttl_seconds
        self._finish(statements.FINISH, response.values(late=late))

    def record(self, step: str, result: bytes | None) -> None:
        """Record the step and commit, in one round trip."""
        self._finish(statements.FINISH_STEP, step_values(step, self.attempt, result))

    def _finish(self, template: str, values: dict[str, Any]) -> None:
        try:
            if not self._open:  # the connection may be another request's by now
                raise NotAtomic("the operation's transaction was rolled back before it was finished")
            if self.transaction.broken is not None:
                raise self.transaction.broken
            text = self._messages.prepared(template)
            self.transaction.commit(text, {**self._values, **values})
        except (exc.SQLAlchemyError, self._messages.Error) as error:
            raise self._finish_error(original(error) or error) from error
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Roll back what is open and give the connection back."""
        if self._open:
            self._open = False
            self.transaction.end()

    def explain(self, error: BaseException | None) -> Exception | None:
        """Return what an error that left the view (or None) means for the operation as a whole."""
        if self.transaction.broken is not None:
            return self.transaction.broken
        if not self._open:
            return None  # it has ended, and whoever ended it knows why
        if isinstance(error, self._messages.Error) and _REFUSED_BY_DRIVER.search(str(error)):
            return NotAtomic(ENDED_PAST_US)
        if self.transaction.is_lost():
            return StoreUnavailable()
        if error is None or original(error) is not self.transaction.error:
            return None
        return problem(error, self._messages.Error, self.transaction.raw)

    def _finish_error(self, error: BaseException) -> Exception:
        """Return what failing to complete means; asks the record when the row was not ours."""
        if is_lost(error, self._messages.Error, self.transaction.raw):
            return StoreUnavailable(
                "The connection to the database was lost, and it is not known whether the operation"
                " was committed; a retry with the same key finds out."
            )
        code = sqlstate(error) or ""
        if code == ABORTED:
            return NotAtomic(FAILED)
        if code in (DIVISION_BY_ZERO, "3B001"):  # a unit's savepoint ended with its transaction
            self.abandon()
            return self._successor()
        self._messages.forget_facts()  # it may be a deferred constraint that is new in the database
        assert isinstance(error, Exception)  # noqa: S101 -- SQLAlchemy's, or the driver's
        return store_error(error, self._messages.table.fullname, self._messages.Error)

    def _successor(self) -> Exception:
        """The error for a record that is no longer ours."""
        if self._messages.own.owner(self._claim) == self._claim.owner:
            return NotAtomic(
                "the view ended the operation's transaction and began another, or hid the record from"
                " its role, so what it wrote and the record do not commit together"
            )
        return RequestInProgress(retry_after=1)


def _read(answer: Any) -> dict[str, str]:
    """What the lock's message holds, by the names in ``statements.LOCKED``."""
    return dict(zip(statements.LOCKED, answer[0][0][0].split(" ", 5), strict=True))


def _others(messages: Messages, claim: Claim, first: str, values: dict[str, Any]) -> Record | None:
    """Send ``first`` on a connection of our own; the record, if it is not this claim's."""
    record = record_in(claim.key, messages.own.send(first + statements.LOOK, values))
    return None if record is None or record.owner == claim.owner else record


def record_in(key: bytes, answer: Answer) -> Record | None:
    """The record in the answer to ``statements.LOOK``, if there is one. Raises ``RecordBroken``."""
    if not answer[0]:
        return None
    texts, digest, body = answer[0][0]
    fields = dict(zip(statements.SQL.fields, texts, strict=True))
    return Record.read(key, {**fields, "digest": digest, "body": body})


class PostgresLease(Lease):
    """A lease in PostgreSQL, by connections of our own: the view may have the application's."""

    def __init__(self, messages: Messages, claim: Claim, *, attempt: int) -> None:
        super().__init__(messages.own, claim, attempt=attempt)
        self._for_steps = messages

    def open_step(self, connection: Connection | None = None) -> PostgresHold:
        """A transaction that holds the row, for one step: that of a connection, or a new one."""
        claim = replace(self._claim, connection=connection)
        for _ in range(2):
            hold = PostgresHold.begin(self._for_steps, claim, "", statements.WAIT_AND_LOCK)
            if isinstance(hold, PostgresHold):
                return hold
            # Nothing is lost if only a renewal, or another step of ours, was in the way.
            if self._messages.owner(self._claim) != self._claim.owner:
                raise LeaseLost
        raise TransactionConflict
