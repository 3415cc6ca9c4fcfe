"""The records in Postgres: the truth.

Why locking the row proves that it is free: a holder locks it at the top of its transaction, before
anything else, and everything the view writes is in that same transaction, which nobody but
:meth:`Hold.complete` commits. So whoever gets the lock knows that the holder's transaction has
ended: committed, then the record says so, or rolled back, then nothing of it exists. No clock, no
time-out and no heartbeat is part of the argument.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import Connection

from flask_idempotency.core.errors import (
    NotAtomic,
    RequestInProgress,
    StoreUnavailable,
    TransactionConflict,
    sqlstate,
)
from flask_idempotency.core.records import Claim, Record
from flask_idempotency.drivers.raw_connection import (
    IDLE,
    RawConnection,
    checked_out,
    give_back,
    raw_of,
)
from flask_idempotency.session.transaction import FAILED, LASTING, OperationTransaction
from flask_idempotency.stores.holds import CONFLICTS, Hold, Lease, SqlRecords

from . import statements
from .messages import ABORTED, LOCK_NOT_AVAILABLE, READ_ONLY, Messages, is_lost

NOT_OURS = CONFLICTS | {LOCK_NOT_AVAILABLE}
"""Errors that mean that somebody else has the row."""

STRICT = ("repeatable read", "serializable")
"""Levels of isolation at which a transaction keeps seeing what it saw first."""

_REFUSED = {
    ABORTED: FAILED,
    READ_ONLY: (
        "db.session was in a transaction that is READ ONLY when the idempotent view began: end it"
        " before the view (db.session.rollback()), or begin it inside"
    ),
}
"""By SQLSTATE, why no operation can continue a transaction."""

_STRICT = (
    "db.session had read before the idempotent view began, at {}: its transaction sees nothing of what"
    " was committed since, not even the record. End that transaction before the view"
    " (db.session.rollback()), or read inside"
)


class PostgresRecords(SqlRecords):
    """The table of records, reached through an engine of the application."""

    messages: Messages
    kind = Messages

    def admin(self) -> Any:
        """Return the operator's side."""
        from flask_idempotency.stores.sql_admin import PostgresAdmin  # only operators need it

        return PostgresAdmin(self)

    def wait(self, key: bytes, seconds: float) -> None:
        """Wait for the row's lock in the server; until something goes wrong: then look again."""
        milliseconds = max(1, int(seconds * 1000))
        with suppress(StoreUnavailable, TransactionConflict):
            self.messages.fetch(statements.WAIT, {"key": key, "milliseconds": milliseconds})

    def open_step(self, claim: Claim, connection: Connection | None) -> Hold | None:
        """A transaction that holds a lease's row: that of a connection, or a new one."""
        step = replace(claim, lease_seconds=None, connection=connection)
        found = self._hold(step, "", claim.values())
        return found if isinstance(found, Hold) else None

    def _hold(self, claim: Claim, first: str, values: dict[str, Any]) -> Hold | Lease | Record | None:
        """Commit a statement, ``first``, and hold the record: or return it, if it is somebody else's.

        None where it was not read. An atomic operation locks the row, in the same round trip; in
        another, if it continues a transaction, and so on connections of our own before. Without a
        ``first`` the row is a lease's: others change it, and are waited for.
        """
        messages, lock = self.messages, statements.LOCK if first else statements.WAIT_AND_LOCK
        if claim.lease_seconds is None and claim.connection is None:
            begin = partial(self._begin, claim, first, lock, values)
            return messages.twice(messages.application, begin, NOT_OURS)  # type: ignore[no-any-return]
        if first:
            first = f"{first};\n{messages.sql.look}"
            before = statements.HASTILY if claim.lease_seconds is None else statements.DURABLY
            record = self._record(claim.key, messages.send(first, values, NOT_OURS, before)[0])
            if record is None or record.owner != claim.owner:
                return record
            if claim.lease_seconds is not None:
                return Lease(self, claim, record.attempt)
        return self._continue(claim, lock, values)

    def _begin(self, claim: Claim, first: str, lock: str, values: dict[str, Any]) -> Any:
        """Begin the transaction, on a connection of the application's pool."""
        messages, engine = self.messages, self.messages.application
        pooled = checked_out(engine)
        held = raw = hold = None
        try:
            if LASTING.intersection(engine.get_execution_options()):
                held = Connection(engine, pooled)  # SQLAlchemy sets them here, before BEGIN
            raw = raw_of(pooled, engine.dialect)
            if raw.status() != IDLE:  # a listener of the pool has begun a transaction: continue that
                held = held or Connection(engine, pooled)
                held.begin()
                found = self._hold(replace(claim, connection=held), first, values)
                hold = found if isinstance(found, Hold) else None
                return found
            raw.take()
            text = statements.CLAIM % first if first else ""
            row = self._lock(raw, text + statements.BEGIN + lock, values)
            if row["owner"] == claim.owner:
                held = held or Connection(engine, pooled)
                hold = self._held(claim, held, raw, row)
                return hold
            look = messages.prepared(statements.BRIEFLY + messages.sql.look)
            return self._record(claim.key, raw.send(look, values, ["ROLLBACK"])[0])
        finally:
            if hold is None:
                give_back(held or pooled, raw)

    def _continue(self, claim: Claim, lock: str, values: dict[str, Any]) -> Hold | None:
        """Lock the row in the transaction of a connection.

        Raises ``NotAtomic`` if that has failed, may not write, or cannot see the record.
        """
        connection, hold = claim.connection, None
        raw = raw_of(connection.connection, connection.dialect)
        raw.take(continues=True)
        try:
            row = self._lock(raw, statements.INSIDE[lock], values)
            if row["owner"] == claim.owner:
                hold = self._held(claim, connection, raw, row)
                return hold
            raw.send(statements.NOT_LOCKED)
        except self.messages.Error as error:
            if is_lost(error):
                connection.invalidate(error)  # so that nobody above the view meets it again
            with suppress(self.messages.Error):  # it may have failed before
                raw.send(statements.LOCK_FAILED)
            if (code := sqlstate(error)) in _REFUSED:
                raise NotAtomic(_REFUSED[code]) from error
            raise self.messages.error(error) from error
        finally:
            if hold is None:
                raw.leave()
        if row["isolation"] in STRICT:
            raise NotAtomic(_STRICT.format(row["isolation"].upper()))
        return None

    def _held(self, claim: Claim, held: Connection, raw: RawConnection, row: dict[str, Any]) -> Hold:
        """The hold of a transaction in which the row is locked."""

        def again() -> None:
            """Roll back what was before the view, too; begin again, and lock the row."""
            raw.begin_again()
            now = self._lock(raw, statements.BEGIN + statements.LOCK, claim.values())
            if now["owner"] != claim.owner:
                raise RequestInProgress(retry_after=1)
            row["xid"] = now["xid"]

        facts = self.messages.facts()
        transaction = OperationTransaction(
            held,
            raw,
            deferred=facts.deferred,
            reads_may_write=facts.reads_may_write,
            is_strict=row["isolation"] in STRICT,
            had_written=raw.continues and row["had_written"] == "true",
            again=again if raw.continues else None,
        )
        return Hold(self.messages, claim, transaction, int(row["attempt"]), row)

    def _lock(self, raw: RawConnection, text: str, values: dict[str, Any]) -> dict[str, Any]:
        """Send a message that locks the row; the values, and what is in ``statements.LOCKED``."""
        ((held,),), _ = raw.send(self.messages.prepared(text, raw.level), values)
        row = {**values, **dict(zip(statements.LOCKED, held.split(" ", 4), strict=True))}
        row["xid"] = int(row["xid"])
        return row
