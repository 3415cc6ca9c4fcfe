"""The records in SQLite, for development: PostgreSQL's guarantees on one machine, one writer at a time.

SQLite has one lock for all writers. The transaction in which a view runs holds it, so whoever gets it
knows that no view is running, and that nobody works on a record in progress. Whoever does not get it
knows only that somebody writes: then a duplicate is rejected as in progress, and the first request of
another key waits, for five seconds at most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Engine, Table, event

from flask_idempotency.core.errors import NotAtomic, StoreUnavailable
from flask_idempotency.core.records import Claim, Record, State
from flask_idempotency.core.rows import claim_values
from flask_idempotency.stores.admin import Admin
from flask_idempotency.stores.own_pool import BRIEF_SECONDS, apart

from . import statements
from .holds import SqliteHold, SqliteLease, seen
from .messages import Messages
from .transaction import Writing

POLL_SECONDS = 0.01
"""How often a waiting request looks: SQLite does not announce that its lock is free."""

LINE_SECONDS = 5.0
"""How long the first request of a key waits for other writers; as long as the driver would."""


class SqliteRecords:
    """The table of records in a SQLite file, reached through an engine of the application."""

    atomic = True
    one_writer = True

    def __init__(self, engine: Engine, table: Table, steps: Table) -> None:
        self.messages = Messages(engine, table, steps)
        self._line_seconds = LINE_SECONDS

    def briefly(self) -> SqliteRecords:
        """The same for what is only observed: on connections of our own, which hardly wait."""
        there, milliseconds = self.messages, round(BRIEF_SECONDS * 1000)
        own = SqliteRecords(apart(there.engine), there.table, there.steps)
        own._line_seconds = BRIEF_SECONDS

        def connected(driver: Any, _record: Any) -> None:
            driver.execute(f"PRAGMA busy_timeout = {milliseconds}")

        event.listen(own.messages.engine.pool, "connect", connected)
        return own

    def admin(self) -> Admin:
        """Return the operator's side."""
        from .admin import SqliteAdmin  # only operators need it

        return SqliteAdmin(self)

    def can_hold(self, _name: str) -> bool:
        """Return True: all text there is UTF-8."""
        return True

    def look(self, key: bytes) -> Record | None:
        """The record, in one plain read."""
        rows = self.messages.fetch(statements.LOOK, {"key": key})
        return seen(rows[0]) if rows else None

    def claim(self, claim: Claim) -> SqliteHold | SqliteLease | None:
        """Insert the record and commit that; then hold it."""
        transaction = self._begin_in_line(claim)
        if transaction is None:
            return None
        with self.messages.writing(transaction) as run:
            inserted = run(statements.INSERT, claim_values(claim)).rowcount
        return self._hold(claim) if inserted else None

    def look_or_claim(self, claim: Claim) -> Record | SqliteHold | SqliteLease | None:
        """The record, or a claim if there is none."""
        return self.look(claim.key) or self.claim(claim)

    def take_over(self, claim: Claim, as_seen: Record) -> SqliteHold | SqliteLease | None:
        """Make a record that nobody holds ours, as its next attempt, and commit that; then hold it."""
        values = {**claim_values(claim), "seen": as_seen.owner}
        try:
            transaction = self.messages.begin(_place(claim), waits=False)
        except StoreUnavailable:
            return None  # somebody writes: its holder, perhaps
        with self.messages.writing(transaction) as run:
            run(statements.FORGET_STEPS, values)
            taken = run(statements.TAKE_OVER, values).rowcount
        return self._hold(claim) if taken else None

    def wait(self, key: bytes, seconds: float) -> None:
        """Return when nobody writes, or the record is finished."""
        for _ in _rounds(seconds):
            with suppress(StoreUnavailable):
                self.messages.begin(waits=False).abandon()
                return
            record = self.look(key)
            if record is None or record.state is not State.IN_PROGRESS:
                return

    def _begin_in_line(self, claim: Claim) -> Writing | None:
        """The transaction that writes, when it is free; None if the record is there by then."""
        for _ in _rounds(self._line_seconds):
            with suppress(StoreUnavailable):
                return self.messages.begin(_place(claim), waits=False)
            if self.look(claim.key) is not None:
                return None
        return self.messages.begin(_place(claim), waits=False)

    def _hold(self, claim: Claim) -> SqliteHold | SqliteLease | None:
        if claim.lease_seconds is None:
            return SqliteHold.open(self.messages, claim, _place(claim))
        rows = self.messages.fetch(statements.ATTEMPT, claim_values(claim))
        return SqliteLease(self.messages, claim, attempt=rows[0][0]) if rows else None


def _rounds(seconds: float) -> Iterator[None]:
    """Pause between rounds until ``seconds`` are over: by the clock, or by count if that stands."""
    deadline = time.monotonic() + seconds
    for _ in range(math.ceil(seconds / POLL_SECONDS)):
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_SECONDS)


def _place(claim: Claim) -> Connection | None:
    """The session's connection. Raises ``NotAtomic`` if it has written: then nobody else can."""
    connection: Connection | None = claim.connection
    if connection is not None and connection.connection.driver_connection.in_transaction:  # type: ignore[union-attr]
        raise NotAtomic(
            "db.session had written, but not committed, before the idempotent view began. Until that is"
            " committed, SQLite lets nobody else write, not even the record: commit before the view, or"
            " do it inside"
        )
    return connection
