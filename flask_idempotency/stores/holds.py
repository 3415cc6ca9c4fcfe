"""An operation that is ours, in PostgreSQL and in SQLite: a transaction, or a lease in its record.

Both are for the table of records in general. What the databases say in different words is in their
``messages``, which send statements on connections of the extension's own.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from copy import copy
from threading import Lock
from typing import Any

from sqlalchemy import Connection, Engine, Table, exc

from flask_idempotency.core.errors import (
    IdempotencyError,
    LeaseLost,
    NotAtomic,
    RecordBroken,
    StoreUnavailable,
    TransactionConflict,
    sqlstate,
)
from flask_idempotency.core.records import (
    Claim,
    Record,
    State,
    StoredResponse,
    legible,
    step_values,
    steps_of,
)
from flask_idempotency.session.transaction import NOT_OURS, OperationTransaction

from .admin import original

CONFLICTS = frozenset({"40001", "40P01"})  # a serialization failure and a deadlock

LATE = 0.01
"""A view that takes a longer part of its record's retention lets that begin again when it ends."""

_REFUSED_BY_DRIVER = re.compile("during a two-phase transaction|forbidden within a Transaction")
"""What a driver's ``commit()`` says once its connection was handed out. No driver translates that."""

ECHO = "SELECT CAST(%(name)s AS text)"


class Hold:
    """A transaction that holds the row of a record that is ours: an atomic operation's, or a step's."""

    def __init__(
        self, messages: Any, claim: Claim, transaction: OperationTransaction, held: dict[str, Any]
    ) -> None:
        self._messages, self._claim, self.transaction = messages, claim, transaction
        self.attempt, self._values = int(held["attempt"]), held
        self._began, self._open = time.monotonic(), True

    def complete(self, response: StoredResponse) -> None:
        """Store the response and commit, in one round trip."""
        late = time.monotonic() - self._began > LATE * self._claim.ttl_seconds
        self._finish(self._messages.finish, response.values(late=late))

    def record(self, step: str, result: bytes | None) -> None:
        """Record the step and commit, in one round trip."""
        self._finish(self._messages.record_step, step_values(step, self.attempt, result))

    def abandon(self) -> None:
        """Roll back what is open and give the connection back."""
        if self._open:
            self._open = False
            self.transaction.end()

    def explain(self, error: BaseException | None) -> Exception | None:
        """Return what an error that left the view (or None) means for the operation as a whole."""
        transaction = self.transaction
        if transaction.broken is not None:
            return transaction.broken
        if not self._open:
            return None  # it has ended, and whoever ended it knows why
        if isinstance(error, transaction.raw.Error) and _REFUSED_BY_DRIVER.search(str(error)):
            return NotAtomic(NOT_OURS)
        if transaction.is_lost():
            return StoreUnavailable()
        is_ours = error is not None and original(error) is transaction.error
        return TransactionConflict() if is_ours and sqlstate(transaction.error) in CONFLICTS else None

    def _finish(self, template: str, values: dict[str, Any]) -> None:
        transaction = self.transaction
        try:
            if not self._open:  # the connection may be another request's by now
                raise NotAtomic("the operation's transaction was rolled back before it was finished")
            if transaction.broken is not None:
                raise transaction.broken
            transaction.commit(self._messages.prepared(template), {**self._values, **values})
        except (exc.SQLAlchemyError, transaction.raw.Error) as error:
            is_lost = transaction.is_lost()
            self.abandon()
            raise self._messages.end_error(error, self._claim, is_lost) from error
        finally:
            self.abandon()


class Lease:
    """An operation that is not atomic and ours while its lease runs. No transaction is open."""

    def __init__(self, records: Any, claim: Claim, attempt: int) -> None:
        self.attempt, self._records, self._messages = attempt, records, records.messages
        self._claim, self._values = claim, claim.values()
        self._lock, self._open = Lock(), True

    def complete(self, response: StoredResponse, *, waits: bool = False) -> None:
        """Store the response; as failed if its status is 500 or more."""
        state = State.FAILED if response.status >= 500 else State.COMPLETED
        self._change(self._messages.sql.finish, **response.values(state=state, waits=waits))
        self._open = False

    def abandon(self) -> None:
        """End the lease now: nobody would learn more by waiting for its end."""
        if self._open:
            self._open = False
            with suppress(IdempotencyError):
                self._change(self._messages.sql.end)

    def release(self) -> None:
        """Give the operation back."""
        self._change(self._messages.sql.release)
        self._open = False

    def extend(self, seconds: float) -> None:
        """Renew the lease."""
        self._change(self._messages.sql.extend, lease=seconds)

    def steps(self) -> dict[str, bytes | None]:
        """The results of the finished steps."""
        rows = self._messages.fetch(self._messages.sql.steps, self._values)
        return {name: step.result for name, step in steps_of(rows[0][0] if rows else None).items()}

    def record(self, step: str, result: bytes | None) -> None:
        """Record a finished step and renew the lease, in one statement."""
        self._change(self._messages.sql.record_step, **step_values(step, self.attempt, result))

    def open_step(self, connection: Connection | None = None) -> Hold:
        """A transaction that holds the row, for one step: that of a connection, or a new one."""
        for _ in range(2):
            hold: Hold | None = self._records.open_step(self._claim, connection)
            if hold is not None:
                return hold
            # Nothing is lost if only a renewal, or another step of ours, was in the way.
            if not self._messages.fetch(self._messages.sql.attempt, self._values):
                raise LeaseLost
        raise TransactionConflict

    def _change(self, template: str, **values: Any) -> None:
        """Send a statement that changes the record if it is ours. Raises ``LeaseLost`` if not.

        One after the other, as steps of several threads would wait for the row's lock in the server,
        and give up soon.
        """
        with self._lock:
            try:
                changed = self._messages.change(template, {**self._values, **values})
            except TransactionConflict as error:  # nothing else of the operation was rolled back
                raise StoreUnavailable from error
        if changed == 0:
            raise LeaseLost


class SqlRecords:
    """The table of records. A subclass says how one is held, and how a step of a lease is opened."""

    atomic = True
    one_writer = False

    kind: Any  # of the messages

    def __init__(self, engine: Engine, table: Table) -> None:
        self.messages = self.kind(engine, table)

    def briefly(self) -> SqlRecords:
        """The same for what is only observed: nobody waits long for it, and a crash may lose it."""
        records = copy(self)
        records.messages = copy(self.messages)
        records.messages.is_brief = True
        return records

    def can_hold(self, name: str) -> bool:
        """Return True if the database gives ``name`` back as it was sent."""
        try:
            return self.messages.fetch(ECHO, {"name": name}) == [(name,)]  # type: ignore[no-any-return]
        except (UnicodeError, RecordBroken):
            return False

    def look(self, key: bytes) -> Record | None:
        """The record, without a lock, in one plain read."""
        return self._record(key, self.messages.fetch(self.messages.sql.look, {"key": key}))

    def claim(self, claim: Claim) -> Any:
        """Insert the record and commit that; then hold it. Or the record there is, if it was read."""
        return self._hold(claim, self.messages.sql.insert, claim.values())

    def take_over(self, claim: Claim, as_seen: Record) -> Any:
        """Make a record that nobody holds ours, as its next attempt, and commit that; then hold it."""
        values = {**claim.values(), "seen": as_seen.owner}
        return self._hold(claim, self.messages.sql.take_over, values)

    def _hold(self, claim: Claim, first: Any, values: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _record(self, key: bytes, rows: Any) -> Record | None:
        """The record in the rows of ``sql.look``, if there is one. Raises ``RecordBroken``."""
        if not rows:
            return None
        texts, digest, body = rows[0]
        if isinstance(texts, str):  # SQLite has no arrays
            with legible():
                texts = json.loads(texts)
        fields = dict(zip(self.messages.sql.fields, texts, strict=True))
        return Record.read(key, {**fields, "digest": digest, "body": body})
