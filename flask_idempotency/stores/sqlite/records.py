"""The records in SQLite, for development: PostgreSQL's promises on one machine, writers in line.

SQLite has one lock for all who write. The transaction in which a view runs holds it, so whoever gets
it knows that no view runs at all, and a record in progress is nobody's any more. Whoever does not get
it knows only that somebody writes: a duplicate is then told that its request is in progress, and the
first request of another key waits, for five seconds at most.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, Table, exc

from flask_idempotency.core.errors import ConfigurationError, LeaseLost, StoreUnavailable
from flask_idempotency.core.records import Claim, Record, State, StoredResponse
from flask_idempotency.stores.borrowed import BorrowedTransaction
from flask_idempotency.stores.lease import Lease
from flask_idempotency.stores.rows import claim_values, record_of, response_values

from . import statements as sqlite_statements

if TYPE_CHECKING:
    from .admin import SqliteAdmin

POLL_SECONDS = 0.01
"""How often a request that waits looks: SQLite tells nobody of a lock that is free again."""

LINE_SECONDS = 5.0
"""How long the first request of a key waits for others that write; as long as the driver would."""


class SqliteRecords:
    """The table of records in a SQLite file, reached through an engine of the application."""

    atomic = True
    takes_resumable = True
    one_writer = True

    def __init__(self, engine: Engine, table: Table, steps: Table) -> None:
        self.engine, self.table, self.steps = engine, table, steps

    def admin(self) -> SqliteAdmin:
        """What the commands need."""
        from .admin import SqliteAdmin

        return SqliteAdmin(self)

    def look(self, key: bytes) -> Record | None:
        """The record, in one plain read."""
        rows = self.fetch(sqlite_statements.LOOK, {"key": key})
        return record_of(rows[0]) if rows else None

    def claim(self, claim: Claim) -> SqliteHold | SqliteLease | None:
        """Insert the record and commit that; then hold it."""
        transaction = self._begin_in_line(claim.key)
        if transaction is None:
            return None
        try:
            inserted = self.execute(transaction, sqlite_statements.INSERT, claim_values(claim)).rowcount
            self.commit(transaction)
        finally:
            transaction.abandon()
        return self._hold(claim) if inserted else None

    def take_over(self, claim: Claim, as_seen: Record) -> SqliteHold | SqliteLease | None:
        """Make a record that nobody holds ours, as its next attempt, and commit that; then hold it."""
        values = {**claim_values(claim), "seen": as_seen.owner}
        try:
            transaction = self.begin(waits=False)
        except StoreUnavailable:
            return None  # somebody writes: its holder, perhaps
        try:
            self.execute(transaction, sqlite_statements.FORGET_STEPS, values)
            taken = self.execute(transaction, sqlite_statements.TAKE_OVER, values).rowcount
            self.commit(transaction)
        finally:
            transaction.abandon()
        return self._hold(claim) if taken else None

    def wait(self, key: bytes, seconds: float) -> None:
        """Return when nobody writes any more, or the record is finished."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with suppress(StoreUnavailable):
                self.begin(waits=False).abandon()
                return
            record = self.look(key)
            if record is None or record.state is not State.IN_PROGRESS:
                return
            time.sleep(POLL_SECONDS)

    def purge(self, batch: int) -> int:
        """Delete at most ``batch`` expired records with their steps; how many."""
        transaction = self.begin()
        try:
            self.execute(transaction, sqlite_statements.PURGE_STEPS, {"batch": batch})
            deleted = self.execute(transaction, sqlite_statements.PURGE, {"batch": batch}).rowcount
            self.commit(transaction)
        finally:
            transaction.abandon()
        return int(deleted)

    def _begin_in_line(self, key: bytes) -> BorrowedTransaction | None:
        """The transaction that writes, when it is free; None if the record is there by then."""
        deadline = time.monotonic() + LINE_SECONDS
        while True:
            try:
                return self.begin(waits=False)
            except StoreUnavailable:
                if time.monotonic() > deadline:
                    raise
            if self.look(key) is not None:
                return None
            time.sleep(POLL_SECONDS)

    def begin(self, *, waits: bool = True) -> BorrowedTransaction:
        """The one transaction that writes. Raises ``StoreUnavailable``."""
        return BorrowedTransaction(self.engine, waits=waits)

    def fetch(self, template: str, values: dict[str, Any]) -> list[Any]:
        """The rows of a statement that only reads."""
        try:
            with self.engine.connect() as connection:
                return list(connection.exec_driver_sql(self._prepared(template), values))
        except exc.SQLAlchemyError as error:
            raise self.error(error) from error

    def execute(self, transaction: BorrowedTransaction, template: str, values: dict[str, Any]) -> Any:
        """Run one of our statements in a transaction; the driver's cursor."""
        try:
            return transaction.execute(self._prepared(template), values)
        except sqlite3.Error as error:
            raise self.error(error) from error

    def commit(self, transaction: BorrowedTransaction) -> None:
        """Commit what is ours alone."""
        try:
            transaction.commit()
        except (sqlite3.Error, exc.SQLAlchemyError) as error:
            raise self.error(error) from error

    def _hold(self, claim: Claim) -> SqliteHold | SqliteLease | None:
        if claim.lease_seconds is not None:
            rows = self.fetch(sqlite_statements.ATTEMPT, claim_values(claim))
            return SqliteLease(self, claim, attempt=rows[0][0]) if rows else None
        return self.hold(claim)

    def hold(self, claim: Claim) -> SqliteHold | None:
        """The transaction in which a view or a step runs, if the record is still this claim's."""
        transaction = self.begin()
        try:
            row = self.execute(transaction, sqlite_statements.ATTEMPT, claim_values(claim)).fetchone()
            if row is not None:
                transaction.guard()
                return SqliteHold(self, claim, transaction, attempt=row[0])
        except BaseException:
            transaction.abandon()
            raise
        transaction.abandon()
        return None

    def _prepared(self, template: str) -> str:
        name = self.engine.dialect.identifier_preparer.format_table
        return template.replace("{table}", name(self.table)).replace("{steps}", name(self.steps))

    def error(self, error: Exception) -> Exception:
        """What an error of the database, or of its driver, means."""
        if "no such table" in str(error) or "no such column" in str(error):
            return ConfigurationError(
                f"the table {self.table.fullname} is missing or not up to date: run `flask"
                " idempotency create-table`, call db.create_all(), or make a migration (the table is"
                " part of db.metadata)"
            )
        return StoreUnavailable()


class SqliteHold:
    """An atomic operation that is ours, or a step: the one transaction that writes."""

    def __init__(
        self, records: SqliteRecords, claim: Claim, transaction: BorrowedTransaction, *, attempt: int
    ) -> None:
        self.attempt = attempt
        self._records, self._claim, self._transaction = records, claim, transaction

    @property
    def connection(self) -> Connection:
        """The transaction's."""
        return self._transaction.connection

    def explain(self, error: BaseException | None) -> Exception | None:  # noqa: ARG002
        """No error means more than it says."""
        return None

    def complete(self, response: StoredResponse) -> None:
        """Store the answer and commit."""
        self._finish((sqlite_statements.FINISH, response_values(response)))

    def record(self, step: str, result: bytes) -> None:
        """Record the step and commit."""
        values = {"step": step, "attempt": self.attempt, "result": result}
        self._finish((sqlite_statements.EXTEND, {}), (sqlite_statements.RECORD_STEP, values))

    def abandon(self) -> None:
        """Roll back."""
        self._transaction.abandon()

    def _finish(self, *statements: tuple[str, dict[str, Any]]) -> None:
        try:
            self._transaction.raise_if_ended()
            for template, values in statements:
                given = {**claim_values(self._claim), **values}
                if self._records.execute(self._transaction, template, given).rowcount == 0:
                    raise LeaseLost
            self._transaction.commit()
        finally:
            self.abandon()


class SqliteLease(Lease):
    """A lease in SQLite."""

    statements = sqlite_statements

    def __init__(self, records: SqliteRecords, claim: Claim, *, attempt: int) -> None:
        super().__init__(claim, attempt=attempt)
        self._records = records

    def steps(self) -> dict[str, bytes]:
        """The results of the finished steps."""
        rows = self._records.fetch(sqlite_statements.STEPS, {"key": self._claim.key})
        return {name: bytes(result) for name, result in rows}

    def record(self, step: str, result: bytes) -> None:
        """Record a finished step and renew the lease, in one transaction."""
        self.open_step().record(step, result)

    def open_step(self) -> SqliteHold:
        """A transaction for one step."""
        hold = self._records.hold(self._claim)
        if hold is None:
            raise LeaseLost
        return hold

    def _change(self, template: str, **values: Any) -> None:
        transaction = self._records.begin()
        try:
            values = {**claim_values(self._claim), **values}
            if self._records.execute(transaction, template, values).rowcount == 0:
                raise LeaseLost
            self._records.commit(transaction)
        finally:
            transaction.abandon()
