"""The records in Postgres: the truth.

Why locking the row proves that it is free: a holder locks it at the top of its transaction, before
anything else, and everything the view writes is in that same transaction, which nobody but
:meth:`PostgresHold.complete` commits. So whoever gets the lock knows that the holder's transaction has
ended: committed, then the record says so, or rolled back, then nothing of it exists. No clock, no
time-out and no heartbeat is part of the argument.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from sqlalchemy import Engine, Table

from flask_idempotency.core.errors import StoreUnavailable, TransactionConflict, sqlstate
from flask_idempotency.core.records import Claim, Record
from flask_idempotency.core.rows import claim_values
from flask_idempotency.drivers.raw_connection import RawConnection
from flask_idempotency.stores.admin import Admin

from . import lease_statements, statements
from .holds import NOT_OURS, PostgresHold, PostgresLease, record_in
from .messages import Messages
from .own_pool import OWN_CONNECTIONS, apart

# Timed out (by the application's statement_timeout, perhaps), or at a strict default isolation the
# row has changed: in either case, look again.
_WAIT_IS_OVER = NOT_OURS | {"57014"}


class PostgresRecords:
    """The table of records, reached through an engine of the application."""

    atomic = True
    takes_resumable = True
    can_observe = True

    def __init__(self, engine: Engine, table: Table, steps: Table) -> None:
        self.messages = Messages(engine, table, steps)

    def admin(self) -> Admin:
        """Return the operator's side."""
        from .admin import PostgresAdmin  # only operators need it

        return PostgresAdmin(self)

    def apart(self) -> PostgresRecords:
        """The same records for threads of ours, past the pool of the application."""
        own = copy(self)
        own.messages = self.messages.apart(apart(self.messages.engine, OWN_CONNECTIONS))
        return own

    def look(self, key: bytes) -> Record | None:
        """The record, without a lock, in one plain read."""
        row = self.messages.run(statements.LOOK, {"key": key})[0]
        return None if row is None else record_in(key, *row)

    def claim(self, claim: Claim) -> PostgresHold | PostgresLease | None:
        """Insert the record and commit it; lock the row if the operation is atomic. One round trip."""
        kind: Any = statements if claim.lease_seconds is None else lease_statements
        sql = kind.CLAIM if claim.begins_until is None else kind.CLAIM_IN_TIME
        if claim.lease_seconds is not None:
            return self._lease(sql, claim, claim_values(claim))
        return PostgresHold.open(self.messages, sql, claim, claim_values(claim))

    def look_or_claim(self, claim: Claim) -> Record | PostgresHold | PostgresLease | None:
        """The record; if there is none, a claim, on the same connection."""
        if claim.lease_seconds is not None:
            return self.look(claim.key) or self.claim(claim)
        is_absent = False

        def ask(wire: RawConnection) -> Record | PostgresHold | None:
            # If the connection breaks in the claim, the second try only claims: after a look, the first
            # try's own record would be somebody's that is in progress.
            nonlocal is_absent
            if not is_absent and (record := self._look(wire, claim.key)) is not None:
                return record
            is_absent = True
            sql = statements.CLAIM if claim.begins_until is None else statements.CLAIM_IN_TIME
            return PostgresHold.lock(self.messages, wire, sql, claim, claim_values(claim))

        return self.messages.on_a_wire(ask)

    def take_over(self, claim: Claim, as_seen: Record) -> PostgresHold | PostgresLease | None:
        """Make an unlocked row ours with the next attempt; then as in :meth:`claim`."""
        values = {**claim_values(claim), "seen": as_seen.owner}
        kind: Any = statements if claim.lease_seconds is None else lease_statements
        sql = kind.TAKE_OVER if claim.begins_until is None else kind.TAKE_OVER_IN_TIME
        if claim.lease_seconds is not None:
            return self._lease(sql, claim, values)
        return PostgresHold.open(self.messages, sql, claim, values)

    def wait(self, key: bytes, seconds: float) -> None:
        """Wait for the row's lock in the server."""
        try:
            self.messages.run(
                statements.WAIT, {"key": key, "milliseconds": max(1, int(seconds * 1000))}
            )
        except (StoreUnavailable, TransactionConflict) as error:
            if sqlstate(error.__cause__) not in _WAIT_IS_OVER:
                raise

    def _look(self, wire: RawConnection, key: bytes) -> Record | None:
        """The record. The connection stays open only if there is none."""
        row = None
        try:
            row = wire.send(self.messages.prepared(statements.LOOK, wire), {"key": key}).fetchone()
        except BaseException:
            wire.close()
            raise
        if row is None:
            return None
        wire.close()
        return record_in(key, *row)

    def _lease(self, template: str, claim: Claim, values: dict[str, Any]) -> PostgresLease | None:
        try:
            row = self.messages.run(template, values)[0]
        except (StoreUnavailable, TransactionConflict) as error:
            if sqlstate(error.__cause__) not in NOT_OURS:
                raise
            return None
        return None if row is None else PostgresLease(self.messages, claim, attempt=row[0])
