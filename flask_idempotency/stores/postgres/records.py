"""The records in Postgres: the truth.

Why locking the row proves that it is free: a holder locks it at the top of its transaction, before
anything else, and everything the view writes is in that same transaction, which nobody but
:meth:`PostgresHold.complete` commits. So whoever gets the lock knows that the holder's transaction has
ended: committed, then the record says so, or rolled back, then nothing of it exists. No clock, no
time-out and no heartbeat is part of the argument.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg2
from sqlalchemy import Connection, Engine, Table, exc
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from flask_idempotency.core import session_statements
from flask_idempotency.core.errors import (
    ConfigurationError,
    NotAtomic,
    RequestInProgress,
    StoreUnavailable,
    TransactionConflict,
)
from flask_idempotency.core.records import Claim, Record, StoredResponse
from flask_idempotency.stores.lease import PostgresLease
from flask_idempotency.stores.rows import claim_values, record_of, response_values
from flask_idempotency.stores.savepoints.postgres import Facts, PostgresUnits, guard_isolation
from flask_idempotency.stores.savepoints.units import operation_engine

from . import lease_statements, statements
from .failures import (
    ABORTED,
    CONFLICTS,
    DIVISION_BY_ZERO,
    INTEGRITY,
    LOCK_NOT_AVAILABLE,
    NO_RIGHT,
    NO_TABLE,
    READ_ONLY,
    is_lost,
    original,
    problem,
    record_error,
    store_error,
)
from .wire import RawConnection

if TYPE_CHECKING:
    from .admin import PostgresAdmin

T = TypeVar("T")

# Timed out (by the application's statement_timeout, perhaps), or at a strict default isolation the
# row has changed: in each case the next look tells.
_WAIT_IS_OVER = CONFLICTS | {LOCK_NOT_AVAILABLE, "57014"}
_SET_LOCAL = f"SET LOCAL lock_timeout = '{statements.LOCK_TIMEOUT}';"
_NOT_OURS = CONFLICTS | {LOCK_NOT_AVAILABLE}


class PostgresRecords:
    """The table of records, reached through an engine of the application."""

    atomic = True
    takes_resumable = True

    def __init__(self, engine: Engine, table: Table, steps: Table) -> None:
        if isinstance(engine.pool, (StaticPool, SingletonThreadPool)):
            raise ConfigurationError(
                f"the engine's pool is a {type(engine.pool).__name__}, which hands one connection"
                " to all who ask: what a view writes on db.engine would be part of its operation."
                " Use QueuePool (the default) or NullPool"
            )
        self.engine = engine
        self.table = table
        self.steps = steps
        self._facts: Facts | None = None
        self._cache: dict[tuple[str, str], str] = {}
        self._schema: str | None = None
        self._as_login = False

    def admin(self) -> PostgresAdmin:
        """What the commands need."""
        from .admin import PostgresAdmin

        return PostgresAdmin(self)

    def look(self, key: bytes) -> Record | None:
        """The record, without a lock, in one plain read."""
        row = self.run(statements.LOOK, {"key": key})[0]
        return None if row is None else record_of(row)

    def claim(self, claim: Claim) -> PostgresHold | PostgresLease | None:
        """Insert the record and commit that; lock the row, if the operation is atomic: one message."""
        if claim.lease_seconds is not None:
            return self._lease(lease_statements.CLAIM, claim, claim_values(claim))
        return self.hold(statements.CLAIM, claim, claim_values(claim))

    def take_over(self, claim: Claim, as_seen: Record) -> PostgresHold | PostgresLease | None:
        """Make an unlocked row ours with the next attempt, and so on as in :meth:`claim`."""
        values = {**claim_values(claim), "seen": as_seen.owner}
        if claim.lease_seconds is not None:
            return self._lease(lease_statements.TAKE_OVER, claim, values)
        return self.hold(statements.TAKE_OVER, claim, values)

    def wait(self, key: bytes, seconds: float) -> None:
        """Wait for the row's lock in the server."""
        try:
            self.run(statements.WAIT, {"key": key, "milliseconds": max(1, int(seconds * 1000))})
        except (StoreUnavailable, TransactionConflict) as error:
            if getattr(error.__cause__, "pgcode", None) not in _WAIT_IS_OVER:
                raise

    def run(self, template: str, values: dict[str, Any] | None = None) -> tuple[Any, int]:
        """Send statements of our own in one message; the last one's first row and row count.

        Raises ``StoreUnavailable``, ``ConfigurationError`` or ``RecordBroken``.
        """
        rows, count = self.fetch(template, values)
        return (rows[0] if rows else None), count

    def fetch(
        self, template: str, values: dict[str, Any] | None = None
    ) -> tuple[list[tuple[Any, ...]], int]:
        """Like :meth:`run`, with all rows."""

        def ask(wire: RawConnection) -> tuple[list[tuple[Any, ...]], int]:
            try:
                cursor = wire.send(self.prepared(template, wire), values)
                return (cursor.fetchall() if cursor.description else []), cursor.rowcount
            finally:
                wire.close()

        return self._on_a_wire(ask)

    def _lease(self, template: str, claim: Claim, values: dict[str, Any]) -> PostgresLease | None:
        try:
            row = self.run(template, values)[0]
        except (StoreUnavailable, TransactionConflict) as error:
            if getattr(error.__cause__, "pgcode", None) not in _NOT_OURS:
                raise
            return None
        return None if row is None else PostgresLease(self, claim, attempt=row[0])

    def hold(self, template: str, claim: Claim, values: dict[str, Any]) -> PostgresHold | None:
        """Send a message that ends by locking the row; None if it could not be locked."""

        def lock(wire: RawConnection) -> PostgresHold | None:
            hold = None
            try:
                row = wire.send(self.prepared(template, wire), values).fetchone()
                if row is not None:
                    hold = PostgresHold(self, wire, claim, Locked(*row[:7]))
            except psycopg2.Error as error:
                if error.pgcode not in _NOT_OURS:
                    raise
            finally:
                if hold is None:
                    wire.close()
            return hold

        return self._on_a_wire(lock)

    def _on_a_wire(self, use: Callable[[RawConnection], T]) -> T:
        """Run ``use``, a second time if the pooled connection turned out to be of no use.

        It is dead, or after a failover it leads to a server that takes no writes. Every verb may be
        sent twice: a claim that did get through the first time carries our token.
        """
        for another_try in (True, False):
            try:
                return use(RawConnection(self.engine))
            except (psycopg2.Error, exc.SQLAlchemyError) as error:
                driver_error = original(error)
                if getattr(driver_error, "pgcode", None) == NO_RIGHT and another_try != self._as_login:
                    self._as_login = another_try  # tried, and given up again if that did not help
                    self._cache.clear()
                    if another_try:
                        continue
                if getattr(driver_error, "pgcode", None) in NO_TABLE:
                    self._forget_schema()  # it may have moved
                if not is_lost(driver_error) and getattr(driver_error, "pgcode", None) != READ_ONLY:
                    raise record_error(error, self.table.fullname) from error
                # As SQLAlchemy does: if one pooled connection is dead, the server went away and the
                # others are dead too. Those in use are not touched. One to a standby would never die
                # by itself.
                self.engine.dispose()
                if not another_try:
                    raise StoreUnavailable from error
        raise AssertionError("unreachable")

    def prepared(self, template: str, wire: RawConnection) -> str:
        """The statement for these tables and, where it begins a transaction, this engine."""
        begin = wire.isolation if "{begin}" in template else ""
        prepared = self._cache.get((template, begin))
        if prepared is None:
            settings = self.facts(wire).settings if "{settings}" in template else ""
            names = {"table": self._name(self.table, wire), "steps": self._name(self.steps, wire)}
            role = statements.AS_LOGIN if self._as_login else statements.AS_ANYONE
            prepared = template.format(**names, begin=begin, settings=settings, role=role)
            if self._as_login:
                prepared = prepared.replace(_SET_LOCAL, statements.LOGIN + _SET_LOCAL)
            if self._schema is not None or self.table.schema:
                self._cache[template, begin] = prepared
        return prepared

    def _name(self, table: Table, wire: RawConnection) -> str:
        """The table with its schema, found once: a request may leave any search path behind."""
        preparer = self.engine.dialect.identifier_preparer
        if self._schema is None and not self.table.schema:
            self._schema = self._find_schema(preparer.format_table(self.table), wire)
        place = "" if self.table.schema or self._schema is None else f"{self._schema}."
        return place + preparer.format_table(table)

    def forget_facts(self) -> None:
        """Ask the database again: it has changed since."""
        self._facts = None

    def _forget_schema(self) -> None:
        self._schema = None
        self._cache.clear()

    def _find_schema(self, table: str, wire: RawConnection) -> str | None:
        for question in (session_statements.WHERE_TABLE_IS, session_statements.WHERE_TABLE_IS_NOW):
            schema: str | None = wire.send(question, {"table": table}).fetchall()[0][0]
            if schema is not None:
                return schema
        return None

    def facts(self, wire: RawConnection) -> Facts:
        """Make the engine ready, and find out what depends on its database.

        Without a lock, which must not be held over a message: requests that come first at the same
        time each ask, and get the same answer.
        """
        if self._facts is None:
            guard_isolation(self.engine.dialect)
            synchronous, watching, deferred, has_deferrable, set_in_functions = wire.send(
                session_statements.FACTS
            ).fetchall()[0]
            settings = statements.SYNCHRONOUS if synchronous == "off" else ""
            if watching == "0":  # not set by the operator; None before Postgres 14
                try:
                    wire.send("BEGIN; " + statements.WATCH + "ROLLBACK")
                    settings += statements.WATCH
                except psycopg2.Error as error:
                    if is_lost(error, wire.driver):
                        raise
                    wire.send("ROLLBACK")
            self._facts = Facts(
                settings, tuple(deferred), has_deferrable, frozenset(set_in_functions or ())
            )
        return self._facts


@dataclass(frozen=True, slots=True)
class Locked:
    """What came back with the row's lock: see ``statements.LOCK_ROW``."""

    attempt: int
    xid: int
    isolation: str
    session_user: str
    role: str
    search_path: str
    synchronous_commit: str


class PostgresHold:
    """A transaction that holds the row of a record that is ours: an atomic operation's, or a step's."""

    def __init__(
        self, records: PostgresRecords, wire: RawConnection, claim: Claim, locked: Locked
    ) -> None:
        self.attempt = locked.attempt
        self._records, self._wire, self._claim, self._locked = records, wire, claim, locked
        self._open, self._committed = True, False
        self._began = time.monotonic()
        self.units = PostgresUnits(wire, records.facts(wire), locked.isolation)
        self._connection: Connection | None = None

    @property
    def connection(self) -> Connection:
        """A connection in the transaction, and in none of the view's units of work."""
        if self._connection is None:
            top = operation_engine(self._records.engine, lambda: self.units.top)
            self._connection = top.connect()
            self._connection.begin()  # the transaction that is open already: sends nothing
        return self._connection

    def complete(self, response: StoredResponse) -> None:
        """Store the answer and commit, in one message."""
        late = time.monotonic() - self._began > statements.LATE * self._claim.ttl_seconds
        template = statements.FINISH_LATE if late else statements.FINISH
        self._finish(template, response_values(response))

    def record(self, step: str, result: bytes) -> None:
        """Record the step and commit, in one message."""
        values = {"step": step, "result": result, "attempt": self.attempt}
        self._finish(lease_statements.FINISH_STEP, values)

    def _finish(self, template: str, values: dict[str, Any]) -> None:
        wire, locked = self._wire, self._locked
        try:
            self._check()
            values = {
                **claim_values(self._claim),
                "xid": locked.xid,
                "session_user": locked.session_user,
                "role": locked.role,
                "search_path": locked.search_path,
                "synchronous_commit": locked.synchronous_commit,
                **values,
            }
            sql = self._records.prepared(template, wire)
            cursor = wire.send(self.units.waiting() + wire.mogrify(sql, values))
            if cursor.statusmessage != "COMMIT":  # COMMIT of a failed transaction says ROLLBACK
                raise NotAtomic("the transaction had failed, so nothing was committed")
            self._committed = True
        except psycopg2.Error as error:
            raise self._finish_error(error) from error
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Roll back what is open and give the connection back."""
        if self._open:
            self._open = False
            self._wire.is_spoiled = not self._committed and self.units.has_ended()
            self.units.close()
            self._wire.close()

    def explain(self, error: BaseException | None) -> Exception | None:
        """What an error that left the view (or None) means for the operation as a whole."""
        if found := self.units.explain(error):
            return found
        if self._wire.lost:
            return StoreUnavailable()
        return problem(error) if self.units.is_ours(original(error)) else None

    def _check(self) -> None:
        """Refuse to finish a transaction that is not the one we began."""
        if not self._open:  # the connection may be another request's by now
            raise NotAtomic("the operation's transaction was rolled back before it was finished")
        if found := self.explain(None):
            raise found
        if not self._wire.in_transaction:
            raise NotAtomic(
                "the view ended the operation's transaction: inside an atomic operation use"
                " db.session.commit() and rollback(), not those of current_operation.connection"
            )

    def _finish_error(self, error: psycopg2.Error) -> Exception:
        """What it means that completing failed; asks the record when the row was not ours."""
        if is_lost(error, self._wire.driver):
            return StoreUnavailable(
                "The connection to the database was lost, and it is not known whether the operation"
                " was committed; a retry with the same key finds out."
            )
        if error.pgcode == ABORTED:
            return NotAtomic(
                "a statement of the view failed and its error was caught without"
                " db.session.rollback(), so the transaction cannot commit"
            )
        if (error.pgcode or "").startswith(INTEGRITY):
            self._records.forget_facts()  # a constraint that can be deferred is new in the database
        if error.pgcode == DIVISION_BY_ZERO:
            self.abandon()
            return self._successor()
        return store_error(error, self._records.table.fullname)

    def _successor(self) -> Exception:
        """Who owns the record that is no longer ours."""
        row = self._records.run(statements.OWNER, {"key": self._claim.key})[0]
        if row == (self._claim.owner,):
            return NotAtomic(
                "the view ended the operation's transaction and began another, or hid the record from"
                " its role, so what it wrote and the record do not commit together"
            )
        return RequestInProgress(retry_after=1)
