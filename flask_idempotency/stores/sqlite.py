"""The records in SQLite, for development: PostgreSQL's guarantees on one machine, one writer at a time.

SQLite has one lock for all writers. The transaction in which a view runs holds it, so whoever gets it
knows that no view is running, and that nobody works on a record in progress. Whoever does not get it
knows only that somebody writes: then a duplicate is rejected as in progress, and the first request of
another key waits, as long as the driver would: five seconds by default.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sqlalchemy import Connection, Engine, Table, exc

from flask_idempotency.core.errors import (
    ConfigurationError,
    LeaseLost,
    NotAtomic,
    RecordBroken,
    StoreUnavailable,
)
from flask_idempotency.core.records import Claim, Record
from flask_idempotency.drivers.raw_connection import IDLE, RawConnection, give_back, raw_of, taken
from flask_idempotency.session.transaction import FIRST, NOT_OURS, OperationTransaction

from .admin import MISSING
from .holds import Hold, Lease, SqlRecords
from .sql import Dialect, Statements

NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now')"
SQL = Statements(
    Dialect(
        now=NOW,
        after="""CASE WHEN {0} IS NOT NULL
            THEN strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', {0})) END""",
        since="((julianday('now') - julianday({})) * 86400.0)",
        oldest="(julianday('now') - min(julianday({}))) * 86400.0",
        later="max",
        array="json_array({})",
        text="{}",
        result="json_extract(step.value, '$.result')",
        with_step=f"""json_patch(coalesce(steps, json_object()), json_object(%(step)s,
         json_object('attempt', %(attempt)s, 'at', {NOW}, 'result', %(result)s)))""",
        with_entry=f"""json_insert(coalesce(audit, json_array()), '$[#]',
         json_object('by', %(by)s, 'did', %(did)s, 'at', {NOW}, 'why', %(why)s))""",
    )
)

_BLOCKED = (
    "db.session had written, but not committed, before the idempotent view began. Until that is"
    " committed, SQLite lets nobody else write, not even the record: commit before the view, or do it"
    " inside"
)


# In SQLite no error stops a message by itself, and a statement's OR ROLLBACK ends the transaction. So a
# savepoint is released that was made with it; and abs() has no value for the least integer.
_HELD = "idempotency_held"
_END = f"""RELEASE {_HELD};
%s;
SELECT CASE WHEN changes() = 0 THEN abs(-9223372036854775807 - 1) END"""


class Messages:
    """Sends statements of our own: for this table, on connections of this engine."""

    sql = SQL
    finish, record_step = _END % SQL.finish, _END % SQL.record_step
    is_brief = False

    def __init__(self, engine: Engine, table: Table) -> None:
        self.engine, self.table = engine, table

    def fetch(self, template: str, values: dict[str, Any]) -> list[Any]:
        """The rows of a statement that only reads."""
        try:
            with self.engine.connect() as connection:
                raw = raw_of(connection.connection, self.engine.dialect)
                return raw.send(self.prepared(template), values)[0]
        except (sqlite3.Error, exc.SQLAlchemyError) as error:
            raise self.error(error) from error

    def change(self, template: str, values: dict[str, Any]) -> int:
        """Run one statement in a transaction of its own; how many rows it changed."""
        with self.writing() as (_, raw):
            changed = raw.send(self.prepared(template), values)[1]
            raw.send("COMMIT")
        return changed

    @contextmanager
    def writing(
        self, connection: Connection | None = None, patience: int | None = None
    ) -> Iterator[tuple[Connection, RawConnection]]:
        """The one transaction that writes, on a session's connection or a new one.

        It waits for others, ``patience`` milliseconds or as the driver would, and at the COMMIT for who
        reads. What is open at the end is rolled back, unless an operation has it by then. Raises
        ``StoreUnavailable``, and ``NotAtomic`` if the session has written: then nobody else can.
        """
        try:
            held = connection or self.engine.connect()
        except exc.SQLAlchemyError as error:
            raise self.error(error) from error
        raw = raw_of(held.connection, self.engine.dialect)
        try:
            if raw.status() != IDLE:
                raise NotAtomic(_BLOCKED)
            raw.take()
            ((usual,),), _ = raw.send("PRAGMA busy_timeout")
            waits = 0 if self.is_brief else usual if patience is None else patience
            try:
                raw.send(f"PRAGMA busy_timeout = {waits}; BEGIN IMMEDIATE")
                yield held, raw
            finally:
                raw.send(f"PRAGMA busy_timeout = {usual}")
        except (sqlite3.Error, exc.SQLAlchemyError) as error:
            raise self.error(error) from error
        finally:
            if not raw.operation() and connection is None:
                give_back(held, raw)
            elif not raw.operation() and taken.get(raw.driver) is raw:
                raw.put_right()

    def prepared(self, template: str) -> str:
        """The statement for this table."""
        return template.format(table=self.engine.dialect.identifier_preparer.format_table(self.table))

    def error(self, error: Exception) -> Exception:
        """Return what an error of the database, or of its driver, means."""
        if "no such table" in str(error) or "no such column" in str(error):
            return ConfigurationError(MISSING.format(self.table.fullname))
        is_illegible = "malformed JSON" in str(error) or "Could not decode" in str(error)
        return RecordBroken() if is_illegible else StoreUnavailable()

    def end_error(self, error: Exception, _claim: Claim, _is_lost: bool) -> Exception:
        """Return what failing to complete means."""
        if "no such savepoint" in str(error):
            return NotAtomic(NOT_OURS)
        return LeaseLost() if "integer overflow" in str(error) else self.error(error)


class SqliteRecords(SqlRecords):
    """The table of records in a SQLite file, reached through an engine of the application."""

    one_writer = True
    messages: Messages
    kind = Messages

    def admin(self) -> Any:
        """Return the operator's side."""
        from .sql_admin import SqlAdmin  # only operators need it

        return SqlAdmin(self)

    def claim(self, claim: Claim) -> Hold | Lease | Record | None:
        """Insert the record and commit that; then hold it. A replay waits for no other writer."""
        return self.look(claim.key) or super().claim(claim)

    def take_over(self, claim: Claim, as_seen: Record) -> Hold | Lease | None:
        """Make a record ours, unless somebody writes: its holder, perhaps."""
        with suppress(StoreUnavailable):
            return super().take_over(claim, as_seen)  # type: ignore[no-any-return]
        return None

    def wait(self, _key: bytes, seconds: float) -> None:
        """Wait until nobody writes."""
        with suppress(StoreUnavailable), self.messages.writing(patience=math.ceil(seconds * 1000)):
            pass

    def open_step(self, claim: Claim, connection: Connection | None) -> Hold | None:
        """Begin a transaction for one step, on a session's connection or a new one."""
        with self.messages.writing(connection) as transaction:
            return self._guarded(claim, *transaction)

    def _hold(self, claim: Claim, first: str, values: dict[str, Any]) -> Hold | Lease | None:
        """Commit a statement, and hold the record. What is taken over waits for nobody."""
        patience = 0 if "seen" in values else None
        with self.messages.writing(claim.connection, patience) as (held, raw):
            changed = raw.send(self.messages.prepared(first), values)[1]
            raw.send("COMMIT")
            if not changed:
                return None
            if claim.lease_seconds is None:
                raw.send("BEGIN IMMEDIATE")
                return self._guarded(claim, held, raw)
        rows = self.messages.fetch(SQL.attempt, values)
        return Lease(self, claim, rows[0][0]) if rows else None

    def _guarded(self, claim: Claim, held: Connection, raw: RawConnection) -> Hold | None:
        """A hold of the transaction that has begun, if the record is still this claim's."""
        values = claim.values()
        rows = raw.send(self.messages.prepared(SQL.attempt), values)[0]
        if not rows:
            return None
        raw.send(f"SAVEPOINT {_HELD}; SAVEPOINT {FIRST}")
        values["attempt"] = rows[0][0]
        return Hold(self.messages, claim, OperationTransaction(held, raw), values)
