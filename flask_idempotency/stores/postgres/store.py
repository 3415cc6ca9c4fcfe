"""The records in Postgres: the truth.

Why locking the row proves that it is free: a holder locks it at the top of its transaction, before
anything else, and everything the view writes is in that same transaction, which nobody but
:meth:`PostgresHold.complete` commits. So whoever gets the lock knows that the holder's transaction has
ended: committed, then the record says so, or rolled back, then nothing of it exists. No clock, no
time-out and no heartbeat is part of the argument.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from sqlalchemy import Engine, Table

from flask_idempotency.core.errors import RecordBroken, StoreUnavailable, TransactionConflict, sqlstate
from flask_idempotency.core.records import Claim, Record
from flask_idempotency.drivers.raw_connection import Answer

from . import statements
from .failures import QUERY_CANCELED, READ_ONLY
from .holds import NOT_OURS, PostgresHold, PostgresLease, record_in
from .messages import Messages

# Timed out (by the application's statement_timeout, perhaps), or at a strict default isolation the
# row has changed: in either case, look again.
_WAIT_IS_OVER = NOT_OURS | {QUERY_CANCELED}


class PostgresRecords:
    """The table of records, reached through an engine of the application."""

    atomic = True
    one_writer = False

    def __init__(self, engine: Engine, table: Table) -> None:
        messages = Messages(engine, table)
        self._find: Callable[[], Messages] = lambda: messages

    @cached_property
    def messages(self) -> Messages:
        """What sends the statements. One of our own is made when it is first needed."""
        return self._find()

    def admin(self) -> Any:
        """Return the operator's side."""
        from flask_idempotency.stores.sql_admin import PostgresAdmin  # only operators need it

        return PostgresAdmin(self)

    def apart(self) -> PostgresRecords:
        """The same records on connections of our own, past the pool of the application."""
        return self._by(lambda: self.messages.own)

    def briefly(self) -> PostgresRecords:
        """The same for what is only observed: see :meth:`Messages.briefly`."""
        return self._by(lambda: self.messages.own.briefly())  # noqa: PLW0108 -- made when it is needed

    def _by(self, find: Callable[[], Messages]) -> PostgresRecords:
        records = PostgresRecords.__new__(PostgresRecords)
        records._find = find  # noqa: SLF001 -- of this class
        return records

    def can_hold(self, name: str) -> bool:
        """Return True if the database gives ``name`` back as it was sent."""
        try:
            return self.messages.own.fetch(statements.ECHO, {"name": name}) == [(name,)]
        except (UnicodeError, RecordBroken):
            return False

    def look(self, key: bytes) -> Record | None:
        """The record, without a lock, in one plain read, on a connection of our own."""
        return record_in(key, self.messages.own.send(statements.LOOK, {"key": key}))

    def claim(self, claim: Claim) -> PostgresHold | PostgresLease | Record | None:
        """Insert the record and commit it; lock the row if the operation is atomic. One round trip.

        Where there is a record, an atomic operation reads it in a second one. A database that takes no
        writes has answers that can be replayed, too.
        """
        try:
            if claim.lease_seconds is None:
                return PostgresHold.begin(self.messages, claim, statements.CLAIM)
            return self._lease(claim, statements.CLAIM_LEASE)
        except StoreUnavailable as error:
            is_read_only = sqlstate(error.__cause__) == READ_ONLY
            if is_read_only and (record := self.look(claim.key)) is not None:
                return record
            raise

    def take_over(self, claim: Claim, as_seen: Record) -> PostgresHold | PostgresLease | Record | None:
        """Make an unlocked row ours with the next attempt; then as in :meth:`claim`."""
        if claim.lease_seconds is None:
            take, seen = statements.TAKE_OVER, as_seen.owner
            return PostgresHold.begin(self.messages, claim, take, seen=seen)
        return self._lease(claim, statements.TAKE_LEASE, seen=as_seen.owner)

    def wait(self, key: bytes, seconds: float) -> None:
        """Wait for the row's lock in the server."""
        milliseconds = max(1, int(seconds * 1000))
        self._ask(_WAIT_IS_OVER, statements.WAIT, {"key": key, "milliseconds": milliseconds})

    def _lease(self, claim: Claim, first: str, **more: Any) -> PostgresLease | Record | None:
        values = {**claim.values(), **more}
        record = record_in(claim.key, self._ask(NOT_OURS, first + statements.LOOK, values))
        is_ours = record is not None and record.owner == claim.owner
        return self.lease_of(claim, record.attempt) if record and is_ours else record

    def lease_of(self, claim: Claim, attempt: int) -> PostgresLease:
        """The hold of a claim whose lease is in the record."""
        return PostgresLease(self.messages, claim, attempt=attempt)

    def _ask(self, none: frozenset[str], template: str, values: dict[str, Any]) -> Answer:
        """The answer to a message; no rows if it fails with one of these SQLSTATEs."""
        try:
            return self.messages.own.send(template, values)
        except (StoreUnavailable, TransactionConflict) as error:
            if sqlstate(error.__cause__) not in none:
                raise
            return [], 0
