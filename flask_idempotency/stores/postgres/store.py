"""The records in Postgres: the truth.

Why locking the row proves that it is free: a holder locks it at the top of its transaction, before
anything else, and everything the view writes is in that same transaction, which nobody but
:meth:`Hold.complete` commits. So whoever gets the lock knows that the holder's transaction has
ended: committed, then the record says so, or rolled back, then nothing of it exists. No clock, no
time-out and no heartbeat is part of the argument.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, Table, exc

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
    Answer,
    RawConnection,
    borrowed,
    checked_out,
    give_back,
    raw_of,
)
from flask_idempotency.session.transaction import FAILED, LASTING, OperationTransaction
from flask_idempotency.stores.admin import original
from flask_idempotency.stores.holds import CONFLICTS, Hold, Lease, SqlRecords
from flask_idempotency.stores.own_pool import apart, reach

from . import statements
from .errors import ABORTED, LOCK_NOT_AVAILABLE, NO_TABLE, NOT_COMMITTABLE, READ_ONLY, is_lost, meaning

Values = dict[str, Any] | None

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


class Facts(NamedTuple):
    """What was asked once of the database.

    ``table`` is the table's full name, ``role`` that of a fresh connection, and ``watch`` the statement
    that lets the server look for dead clients, or nothing. ``deferred`` says that constraints are
    checked at COMMIT by definition, and ``reads_may_write`` that no text tells what a SELECT does.
    """

    table: str
    role: str
    deferred: bool
    reads_may_write: bool
    watch: str


class Messages:
    """Sends statements of our own: for this table, and prepared for this database.

    Views run on connections of ``application``, its engine. ``engine`` is another one: a request that
    has a connection never waits for a second of the same pool.
    """

    sql = statements.SQL
    finish = statements.FINISH % statements.SQL.finish
    record_step = statements.FINISH % statements.SQL.record_step
    is_brief = False

    def __init__(self, application: Engine, table: Table) -> None:
        self.application, self.table = application, table
        self.Error: type[Exception] = application.dialect.loaded_dbapi.Error
        # Made when it is first needed, so that all of the pool's listeners make its connections ready.
        self._engine = cache(partial(apart, application))
        self._facts: Facts | None = None
        self._cache: dict[tuple[str, str], str] = {}

    @property
    def engine(self) -> Engine:
        """The engine of our own connections."""
        return self._engine()

    def fetch(self, template: str, values: Values = None) -> list[tuple[Any, ...]]:
        """Send statements of our own in one message; the last one's rows.

        Raises ``StoreUnavailable``, ``ConfigurationError`` or ``RecordBroken``.
        """
        return self.send(statements.BRIEFLY, template, values)[0]

    def change(self, template: str, values: Values = None) -> int:
        """The same for what waits for the disk; how many rows the last statement changed."""
        return self.send(statements.DURABLY, template, values)[1]

    def send(
        self, first: str, template: str, values: Values, none: frozenset[str] = frozenset()
    ) -> Answer:
        """Send a message that begins so; the last statement's rows, and how many it changed.

        There are none if it fails with one of the SQLSTATEs in ``none``.
        """
        text = self.prepared((statements.OBSERVING if self.is_brief else first) + template)
        return self.twice(self.engine, partial(self._ask, text, values), none) or ([], 0)

    def _ask(self, text: str, values: Values) -> Answer:
        if self.is_brief:
            reach(self.engine)
        with borrowed(self.engine) as raw:
            return raw.send(text, values)

    def twice(self, engine: Engine, use: Callable[[], Any], none: frozenset[str] = frozenset()) -> Any:
        """Call ``use``, a second time if the pooled connection turned out to be unusable.

        It is dead, or after a failover it leads to a server that takes no writes. Every verb may be
        sent twice: a claim that did get through the first time carries our token. A connect that failed
        is not repeated, as it would take its whole time-out again where the host is silent. None if it
        fails with one of the SQLSTATEs in ``none``.
        """
        for again in (True, False):
            try:
                return use()
            except (self.Error, exc.SQLAlchemyError) as error:
                code = sqlstate(original(error))
                if code in NO_TABLE:  # it may have moved
                    self.forget_facts()
                if code in none:
                    break
                if not again or not (is_lost(error) or code == READ_ONLY):
                    raise self.error(error) from error
                # As SQLAlchemy does: if one pooled connection is dead, the server went away and the
                # others are dead too. Those in use are not touched. One to a standby would never die by
                # itself.
                engine.dispose()
        return None

    def error(self, error: Exception, *, of_view: bool = False) -> Exception:
        """Return what an error of the database, or of its driver, means."""
        return meaning(error, self.table, self.Error, of_view=of_view)

    def end_error(self, error: Exception, claim: Claim, lost: bool) -> Exception:
        """Return what failing to complete means; asks the record when the row was not ours."""
        driver_error: Any = original(error)
        if lost or is_lost(error):
            return StoreUnavailable(
                "The connection to the database was lost, and it is not known whether the operation"
                " was committed; a retry with the same key finds out."
            )
        if sqlstate(driver_error) not in NOT_COMMITTABLE:
            self.forget_facts()  # it may be a deferred constraint that is new in the database
            return self.error(driver_error, of_view=True)
        if not self.fetch(self.sql.attempt, claim.values()):
            return RequestInProgress(retry_after=1)
        return NotAtomic(
            "the view ended the operation's transaction and began another, ended or went back to a"
            " savepoint that was set before it, hid the record from its role, or caught the error of a"
            " statement without db.session.rollback(): what it wrote and the record cannot commit"
            " together"
        )

    def prepared(self, template: str, level: str = "") -> str:
        """The statement for this table and, where it begins a transaction, this ``level``."""
        text = self._cache.get((template, level))
        if text is None:
            text = template.format(begin=level, **self.facts()._asdict())
            self._cache[template, level] = text
        return text

    def forget_facts(self) -> None:
        """Ask again: something has proved wrong."""
        self._facts = None
        self._cache.clear()

    def facts(self) -> Facts:
        """What a transaction must know about the database.

        Takes no lock, which would be held over a round trip: the first requests that come at the same
        time each ask, and get the same facts.
        """
        if self._facts is None:
            table = self.application.dialect.identifier_preparer.format_table(self.table)
            values = {"table": table.replace("%%", "%")}
            (row,), _ = self.twice(self.engine, partial(self._ask, statements.FACTS, values))
            self._facts = Facts(*row)
        return self._facts


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
            record = self._record(claim.key, messages.send(before, first, values, NOT_OURS)[0])
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
        return Hold(self.messages, claim, transaction, row)

    def _lock(self, raw: RawConnection, text: str, values: dict[str, Any]) -> dict[str, Any]:
        """Send a message that locks the row; the values, and what is in ``statements.LOCKED``."""
        ((held,),), _ = raw.send(self.messages.prepared(text, raw.level), values)
        row = {**values, **dict(zip(statements.LOCKED, held.split(" ", 4), strict=True))}
        row["xid"] = int(row["xid"])
        return row
