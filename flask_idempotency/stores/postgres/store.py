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
from flask_idempotency.stores.own_pool import apart

from . import lease_statements, statements
from .failures import QUERY_CANCELED
from .holds import NOT_OURS, PostgresHold, PostgresLease, record_in
from .messages import Messages

# Timed out (by the application's statement_timeout, perhaps), or at a strict default isolation the
# row has changed: in either case, look again.
_WAIT_IS_OVER = NOT_OURS | {QUERY_CANCELED}


class PostgresRecords:
    """The table of records, reached through an engine of the application."""

    atomic = True
    one_writer = False

    def __init__(self, engine: Engine, table: Table, steps: Table) -> None:
        self.messages = Messages(engine, table, steps)

    def admin(self) -> Admin:
        """Return the operator's side."""
        from .admin import PostgresAdmin  # only operators need it

        return PostgresAdmin(self)

    def apart(self) -> PostgresRecords:
        """The same records on connections of our own, past the pool of the application."""
        own = copy(self)
        own.messages = self.messages.apart(apart(self.messages.engine))
        return own

    def briefly(self) -> PostgresRecords:
        """The same for what is only observed: see :meth:`Messages.briefly`."""
        own = copy(self)
        own.messages = self.messages.briefly()
        return own

    def look(self, key: bytes) -> Record | None:
        """The record, without a lock, in one plain read."""
        row = self.messages.first(statements.LOOK, {"key": key})
        return None if row is None else record_in(key, *row)

    def claim(self, claim: Claim) -> PostgresHold | PostgresLease | None:
        """Insert the record and commit it; lock the row if the operation is atomic. One round trip."""
        return self._begin("CLAIM", claim)

    def look_or_claim(self, claim: Claim) -> Record | PostgresHold | PostgresLease | None:
        """The record; if there is none, a claim, on the same connection."""
        if claim.lease_seconds is not None:
            return self.look(claim.key) or self.claim(claim)
        is_absent = False

        def ask(wire: RawConnection) -> Record | PostgresHold | None:
            # If the connection breaks in the claim, the second try only claims: after a look, the first
            # try's own record would be somebody's that is in progress.
            nonlocal is_absent
            if not is_absent:
                look = self.messages.prepared(statements.LOOK, wire)
                if (row := wire.send(look, {"key": claim.key}).fetchone()) is not None:
                    return record_in(claim.key, *row)
            is_absent = True
            return PostgresHold.lock(wire, self.messages, _message("CLAIM", claim), claim)

        return self.messages.on_a_wire(ask)

    def take_over(self, claim: Claim, as_seen: Record) -> PostgresHold | PostgresLease | None:
        """Make an unlocked row ours with the next attempt; then as in :meth:`claim`."""
        return self._begin("TAKE_OVER", claim, seen=as_seen.owner)

    def wait(self, key: bytes, seconds: float) -> None:
        """Wait for the row's lock in the server."""
        milliseconds = max(1, int(seconds * 1000))
        self._rows(_WAIT_IS_OVER, statements.WAIT, {"key": key, "milliseconds": milliseconds})

    def _begin(self, verb: str, claim: Claim, **more: Any) -> PostgresHold | PostgresLease | None:
        template = _message(verb, claim)
        if claim.lease_seconds is None:
            return PostgresHold.open(self.messages, template, claim, **more)
        rows = self._rows(NOT_OURS, template, {**claim_values(claim), **more})
        return PostgresLease(self.messages, claim, attempt=rows[0][0]) if rows else None

    def _rows(self, none: frozenset[str], template: str, values: dict[str, Any]) -> list[Any]:
        """The rows of a statement; none if it fails with one of these SQLSTATEs."""
        try:
            return self.messages.fetch(template, values)
        except (StoreUnavailable, TransactionConflict) as error:
            if sqlstate(error.__cause__) not in none:
                raise
            return []


def _message(verb: str, claim: Claim) -> str:
    """The message of a verb for a lease or none."""
    message: str = getattr(statements if claim.lease_seconds is None else lease_statements, verb)
    return message
