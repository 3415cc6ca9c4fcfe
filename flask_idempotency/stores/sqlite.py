"""The records in SQLite, for development: PostgreSQL's guarantees on one machine, one writer at a time.

SQLite has one lock for all writers. The transaction in which a view runs holds it, so whoever gets it
knows that no view is running, and that nobody works on a record in progress. Whoever does not get it
knows only that somebody writes: then a duplicate is rejected as in progress, and the first request of
another key waits, for five seconds at most.
"""

from __future__ import annotations

import math
import re
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from typing import Any

from sqlalchemy import Connection, Engine, Table, exc

from flask_idempotency.core.errors import (
    ConfigurationError,
    LeaseLost,
    NotAtomic,
    RecordBroken,
    StoreUnavailable,
)
from flask_idempotency.core.records import Claim, Record, State, StoredResponse, step_values
from flask_idempotency.drivers import sqlite
from flask_idempotency.drivers.raw_connection import IDLE, Values, give_back
from flask_idempotency.session.transaction import FIRST, OperationTransaction

from .admin import original
from .lease import Lease
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
        text="{}",
        result="json_extract(step.value, '$.result')",
        with_step=f"""json_patch(coalesce(steps, json_object()), json_object(%(step)s,
         json_object('attempt', %(attempt)s, 'at', {NOW}, 'result', %(result)s)))""",
        with_entry=f"""json_insert(coalesce(audit, json_array()), '$[#]',
         json_object('by', %(by)s, 'did', %(did)s, 'at', {NOW}, 'why', %(why)s))""",
    )
)

POLL_SECONDS = 0.01
"""How often a waiting request looks: SQLite does not announce that its lock is free."""

LINE_SECONDS = 5.0
"""How long the first request of a key waits for other writers; as long as the driver would."""

_TRANSACTION = 22  # SQLITE_TRANSACTION (Python names it from 3.11 on)

# Python 3.10 cannot remove an authorizer, and denies everything if it is set to None.
_NO_AUTHORIZER: Any = None if sys.version_info >= (3, 11) else lambda *_what: sqlite3.SQLITE_OK

_ENDED_BY_STATEMENT = (
    "a statement of the view, or a trigger, ended the operation's transaction: inside an atomic"
    " operation use db.session.commit() and rollback(), and roll back after an error"
)
_BLOCKED = (
    "db.session had written, but not committed, before the idempotent view began. Until that is"
    " committed, SQLite lets nobody else write, not even the record: commit before the view, or do it"
    " inside"
)

Run = Callable[[str, dict[str, Any]], Any]


class _RawConnection(sqlite.Connection):
    """A connection to SQLite whose transaction only we may end, once it is guarded."""

    def guard(self) -> None:
        """From now on others may use the transaction: what triggers do, no text tells."""
        self.driver.set_authorizer(self._authorize)

    def _authorize(self, action: int, *_what: object) -> int:
        """Deny BEGIN, COMMIT and ROLLBACK; and all else once a statement's OR ROLLBACK has ended it."""
        denied = action == _TRANSACTION or not self.driver.in_transaction
        return sqlite3.SQLITE_DENY if denied else sqlite3.SQLITE_OK

    def commit(self, text: str, values: Values, first: Sequence[str]) -> None:
        """See :class:`RawConnection`."""
        self.send(text, values, first)
        self.driver.set_authorizer(_NO_AUTHORIZER)
        self.send("COMMIT")

    def put_right(self) -> None:
        """See :class:`RawConnection`."""
        self.driver.set_authorizer(_NO_AUTHORIZER)
        super().put_right()

    def is_lost(self) -> bool:
        """See :class:`RawConnection`."""
        try:
            self.driver.total_changes  # noqa: B018 -- asks nothing but whether it is open
        except sqlite3.ProgrammingError:
            return True
        return False


class _Writing:
    """The one transaction that writes, on a connection of the engine's, or on that of a session.

    IMMEDIATE: whoever begins gets the only right to write, or waits for it if ``waits``, for as long as
    the driver is configured to. Whoever makes one ends it. Raises ``StoreUnavailable``.
    """

    def __init__(self, engine: Engine, connection: Connection | None, *, waits: bool) -> None:
        self._is_sessions = connection is not None
        try:
            self.connection = connection or engine.connect()
        except exc.SQLAlchemyError as error:
            raise StoreUnavailable from error
        driver: Any = self.connection.connection.driver_connection
        self.raw = _RawConnection(driver, engine.dialect)
        try:
            self.raw.take()
            (patience,) = driver.execute("PRAGMA busy_timeout").fetchone()
            try:
                driver.execute(f"PRAGMA busy_timeout = {patience if waits else 0}")
                driver.execute("BEGIN IMMEDIATE")
            finally:
                driver.execute(f"PRAGMA busy_timeout = {patience}")
        except BaseException as error:
            self.abandon()
            if isinstance(error, (exc.SQLAlchemyError, sqlite3.Error)):
                raise StoreUnavailable from error
            raise

    def abandon(self) -> None:
        """Roll back what is open, and give the connection back, unless an operation has them by now."""
        if self.connection.closed or self.raw.operation():
            return
        if not self._is_sessions:
            give_back(self.connection, self.raw)
        elif self.raw.is_taken():
            self.raw.put_right()


class Messages:
    """Sends statements of our own: for this table, on connections of this engine."""

    sql, alone = SQL, ""
    waits = True  # for other writers

    def __init__(self, engine: Engine, table: Table) -> None:
        self.engine, self.table = engine, table

    def fetch(self, template: str, values: dict[str, Any]) -> list[Any]:
        """The rows of a statement that only reads."""
        try:
            with self.engine.connect() as connection:
                return list(connection.exec_driver_sql(self.prepared(template), values))
        except exc.SQLAlchemyError as error:
            raise self.error(error) from error

    def begin(self, connection: Connection | None = None, *, waits: bool = True) -> _Writing:
        """The one transaction that writes. Raises ``StoreUnavailable``."""
        return _Writing(self.engine, connection, waits=waits and self.waits)

    @contextmanager
    def writing(self, transaction: _Writing | None = None) -> Iterator[Run]:
        """Yield what runs a statement in the transaction, or in a new one; commit at the end."""
        transaction = transaction or self.begin()
        driver = transaction.raw.driver
        try:
            yield lambda template, values: driver.execute(self.prepared(template), values)
            driver.execute("COMMIT")
        except (sqlite3.Error, exc.SQLAlchemyError) as error:
            raise self.error(error) from error
        finally:
            transaction.abandon()

    def change(self, template: str, values: dict[str, Any]) -> int:
        """Run one statement in a transaction of its own; how many rows it changed."""
        with self.writing() as run:
            return int(run(template, values).rowcount)

    def prepared(self, template: str) -> str:
        """The statement for this table, with values named as SQLite wants them."""
        named = re.sub(r"%\((\w+)\)s", r":\1", template)
        return named.format(table=self.engine.dialect.identifier_preparer.format_table(self.table))

    def error(self, error: Exception) -> Exception:
        """Return what an error of the database, or of its driver, means."""
        if "no such table" in str(error) or "no such column" in str(error):
            return ConfigurationError(
                f"the table {self.table.fullname} is missing or not up to date: run `flask"
                " idempotency create-table`, call db.create_all(), or make a migration (the table is"
                " part of db.metadata)"
            )
        is_illegible = "malformed JSON" in str(error) or "Could not decode" in str(error)
        return RecordBroken() if is_illegible else StoreUnavailable()


class SqliteHold:
    """An atomic operation that is ours, or a step: the one transaction that writes."""

    def __init__(
        self, messages: Any, claim: Claim, transaction: OperationTransaction, attempt: int
    ) -> None:
        self.attempt, self._open = attempt, True
        self._messages, self._claim, self.transaction = messages, claim, transaction

    @classmethod
    def open(
        cls, messages: Messages, claim: Claim, connection: Connection | None = None
    ) -> SqliteHold | None:
        """Begin the transaction in which a view or a step runs, if the record is still this claim's."""
        writing, hold = messages.begin(connection), None
        try:
            attempt = messages.prepared(SQL.attempt)
            row = writing.raw.driver.execute(attempt, claim.values()).fetchone()
            if row is not None:
                writing.raw.driver.execute(f"SAVEPOINT {FIRST}")
                writing.raw.guard()
                transaction = OperationTransaction(writing.connection, writing.raw)
                hold = cls(messages, claim, transaction, row[0])
        except sqlite3.Error as error:
            raise messages.error(error) from error
        finally:
            if hold is None:
                writing.abandon()
        return hold

    @property
    def connection(self) -> Connection:
        """The transaction's."""
        return self.transaction.connection

    def explain(self, error: BaseException | None) -> Exception | None:  # noqa: ARG002
        """Return what makes the operation void, whatever the error says."""
        transaction = self.transaction
        if transaction.broken is None and transaction.is_lost():
            return StoreUnavailable()
        if transaction.broken is None and transaction.raw.status() == IDLE:
            return NotAtomic(_ENDED_BY_STATEMENT)
        return transaction.broken

    def complete(self, response: StoredResponse) -> None:
        """Store the response and commit."""
        self._finish(self._messages.sql.finish, response.values())

    def record(self, step: str, result: bytes | None) -> None:
        """Record the step and commit."""
        self._finish(self._messages.sql.record_step, step_values(step, self.attempt, result))

    def abandon(self) -> None:
        """Roll back."""
        if self._open:
            self._open = False
            self.transaction.end()

    def _finish(self, template: str, values: dict[str, Any]) -> None:
        messages, transaction = self._messages, self.transaction
        try:
            if found := self.explain(None):
                raise found
            transaction.flush()
            every = {**self._claim.values(), **values}
            if transaction.raw.send(messages.prepared(template), every)[1] == 0:
                raise LeaseLost
            self._commit()
        except (exc.SQLAlchemyError, transaction.raw.Error) as error:
            raise messages.error(original(error)) from error
        finally:
            self.abandon()

    def _commit(self) -> None:
        self.transaction.commit("", {})


class SqliteLease(Lease):
    """A lease in SQLite."""

    def open_step(self, connection: Connection | None = None) -> SqliteHold:
        """Begin a transaction for one step, on a session's connection or a new one."""
        hold = SqliteHold.open(self._messages, self._claim, connection)
        if hold is None:
            raise LeaseLost
        return hold


class SqliteRecords:
    """The table of records in a SQLite file, reached through an engine of the application."""

    atomic = True
    one_writer = True

    def __init__(self, engine: Engine, table: Table) -> None:
        self.messages = Messages(engine, table)

    def briefly(self) -> SqliteRecords:
        """The same for what is only observed: it waits for no other writer."""
        records = copy(self)
        records.messages = copy(self.messages)
        records.messages.waits = False
        return records

    def admin(self) -> Any:
        """Return the operator's side."""
        from .sql_admin import SqlAdmin  # only operators need it

        return SqlAdmin(self)

    def can_hold(self, _name: str) -> bool:
        """Return True: all text there is UTF-8."""
        return True

    def look(self, key: bytes) -> Record | None:
        """The record, in one plain read."""
        rows = self.messages.fetch(self.messages.sql.look, {"key": key})
        fields = self.messages.sql.looked
        return Record.read(key, dict(zip(fields, rows[0], strict=True))) if rows else None

    def claim(self, claim: Claim) -> SqliteHold | SqliteLease | Record | None:
        """Insert the record and commit that; then hold it. A replay waits for no other writer."""
        if (record := self.look(claim.key)) is not None:
            return record
        transaction = self._begin_in_line(claim)
        if transaction is None:
            return None
        with self.messages.writing(transaction) as run:
            inserted = run(SQL.insert, claim.values()).rowcount
        return self._hold(claim) if inserted else None

    def take_over(self, claim: Claim, as_seen: Record) -> SqliteHold | SqliteLease | None:
        """Make a record that nobody holds ours, as its next attempt, and commit that; then hold it."""
        try:
            transaction = self.messages.begin(_place(claim), waits=False)
        except StoreUnavailable:
            return None  # somebody writes: its holder, perhaps
        with self.messages.writing(transaction) as run:
            taken = run(SQL.take_over, {**claim.values(), "seen": as_seen.owner}).rowcount
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

    def _begin_in_line(self, claim: Claim) -> _Writing | None:
        """The transaction that writes, when it is free; None if the record is there by then."""
        for _ in _rounds(LINE_SECONDS if self.messages.waits else 0.0):
            with suppress(StoreUnavailable):
                return self.messages.begin(_place(claim), waits=False)
            if self.look(claim.key) is not None:
                return None
        return self.messages.begin(_place(claim), waits=False)

    def _hold(self, claim: Claim) -> SqliteHold | SqliteLease | None:
        if claim.lease_seconds is None:
            return SqliteHold.open(self.messages, claim, _place(claim))
        rows = self.messages.fetch(SQL.attempt, claim.values())
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
        raise NotAtomic(_BLOCKED)
    return connection
