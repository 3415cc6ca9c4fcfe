"""What an operator does with a table of records, in PostgreSQL and in SQLite.

Each method is a few statements outside any request, on connections of the extension's own.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Index, Table, exc, inspect, text
from sqlalchemy.schema import CreateIndex

from flask_idempotency.core.errors import ConfigurationError, StoreUnavailable, sqlstate
from flask_idempotency.core.keys import KEY_BYTES
from flask_idempotency.core.records import SEALED_TEXT, State, StoredResponse, StoredStep, steps_of

from .admin import WAITING, AuditEntry, Finding, Line, Overview, read_audit, read_time, reason
from .postgres import statements
from .postgres.errors import LOCK_NOT_AVAILABLE, QUERY_CANCELED

_CREATE = "run `flask idempotency create-table`"
_MIGRATE = "make a migration (the table is part of db.metadata)"


class SqlAdmin:
    """A table of records as an operator needs it, outside of any request: in SQLite.

    Its one writer keeps everybody else out. Everything may raise ``StoreUnavailable``,
    ``ConfigurationError`` and ``RecordBroken``.
    """

    remedy = "check that the file is a SQLite database and writable, and that nobody writes for long"
    """What to do if the database cannot be reached, or a record not be claimed and completed."""

    _alone: tuple[str, ...] = ()  # statements with which a look at the table's definition begins
    _create_index = "CREATE INDEX"

    def __init__(self, records: Any) -> None:
        self._records, self._messages = records, records.messages
        self._sql = self._messages.sql

    def overview(self) -> Overview:
        """Return what there is at a glance. Reads no more of a large table than of a small one."""
        counts = defaultdict[str, Counter[str]](Counter)
        waiting, oldest, percent = 0, list[float](), 100.0
        for name, state, count, seconds in self._messages.fetch(self._sql.leased, {}):
            counts[name][state] += count
            if state in WAITING:
                waiting += count
                if seconds is not None:  # whoever writes to the table may write any time
                    oldest.append(seconds)
        for name, state, count, percent in self._messages.fetch(self._sql.others, {}):
            counts[name][state] += round(count * 100 / percent)
        ((expired, since),) = self._messages.fetch(self._sql.overdue, {})
        return Overview(counts, percent < 100, waiting, max(oldest, default=None), expired, since)

    def lines(
        self,
        limit: int,
        *,
        start: bytes = b"",
        tail: bytes = b"",
        name: str | None = None,
        state: str | None = None,
    ) -> list[Line]:
        """Return the ``limit`` newest records, of one operation and in one state if these are given.

        Only those whose key's hash begins with ``start`` and ends with ``tail``.
        """
        low, high = start.ljust(KEY_BYTES, b"\0"), start.ljust(KEY_BYTES, b"\xff")
        values = {"start": start, "low": low, "high": high, "tail": tail, "size": len(tail)}
        return self._lines(values | {"name": name, "state": state, "limit": limit})

    def _lines(self, values: dict[str, Any]) -> list[Line]:
        return [_line(row) for row in self._messages.fetch(self._sql.lines, values)]

    def notes(self, key: bytes) -> tuple[dict[str, StoredStep], list[AuditEntry]]:
        """Return a record's finished steps, by name, and what operators did to it."""
        steps, audit = next(iter(self._messages.fetch(self._sql.notes, {"key": key})), (None, None))
        return steps_of(steps), read_audit(audit)

    def sealings(self) -> Counter[bytes | None]:
        """Count responses and results of steps that have not expired, by how they begin if encrypted.

        That is ``SEALED`` and the id of the key; None for those that are not encrypted. Reads all.
        """
        found = Counter[bytes | None]()
        for response, step, count in self._messages.fetch(self._sql.sealed, {}):
            prefix = None if response is None else bytes(response)
            if step is not None and step.startswith(SEALED_TEXT):
                prefix = b64decode(step.removeprefix(SEALED_TEXT))
            found[prefix] += count
        return found

    def note(self, key: bytes, entry: AuditEntry) -> bool:
        """Note durably what an operator did to a record; False if it is gone, or somebody holds it."""
        return bool(self._messages.change(self._sql.note, {"key": key, **asdict(entry)}))

    def settle(
        self,
        seen: Line,
        entry: AuditEntry,
        ttl_seconds: float,
        response: StoredResponse | None = None,
        *,
        anew: bool,
    ) -> bool:
        """End what is interrupted or failed as an operator decided, durably; return True if it did.

        It does not if the record has changed since it was ``seen``, or if somebody works on it.
        ``response`` is stored as it is, sealed or not; None lets the operation be run again. Either
        lives for at least ``ttl_seconds``. ``anew``: its age begins anew. A new owner fences off
        whoever held the record.
        """
        values: dict[str, Any] = {"status": None, "headers": None, "body": None}
        state = State.IN_PROGRESS
        if response is not None:
            values = response.values()
            state = State.FAILED if response.status >= 500 else State.COMPLETED
        values |= {"key": seen.hash, "seen": seen.version, "owner": secrets.token_urlsafe(16)}
        values |= {"state": state.value, "ttl": ttl_seconds, "anew": anew, **asdict(entry)}
        return bool(self._messages.change(self._sql.settle, values))

    def erase(self, seen: Line) -> bool:
        """Delete a record, durably; return True if it did.

        It does not if the record has changed since it was ``seen``, if it has a lease, or if somebody
        holds it.
        """
        values = {"key": seen.hash, "seen": seen.version}
        return bool(self._messages.change(self._sql.erase, values))

    def purge(self, batch: int) -> Iterator[int]:
        """Delete expired records, at most ``batch`` in each transaction, until none is left.

        Yields how many each transaction has deleted, after its commit. Skips a record that somebody
        holds.
        """
        deleted = batch
        while deleted == batch:
            began = time.monotonic()
            deleted = self._purge(self._messages, batch)
            took = time.monotonic() - began
            if deleted:
                yield deleted
                time.sleep(took)  # requests have the disk to themselves for half of the time

    def purge_briefly(self, batch: int) -> int | None:
        """Delete at most ``batch`` expired records, within 100 ms; return how many.

        None, and none is deleted, if that takes longer; 0 if somebody is in the way.
        """
        try:
            return self._purge(self._records.briefly().messages, batch)
        except StoreUnavailable as error:
            code = sqlstate(error.__cause__)
            if code == LOCK_NOT_AVAILABLE or "is locked" in str(error.__cause__):
                return 0
            if code == QUERY_CANCELED:
                return None
            raise

    def _purge(self, messages: Any, batch: int) -> int:
        """Delete a batch in one transaction."""
        return int(messages.change(self._sql.purge, {"batch": batch}))

    def create(self) -> list[str]:
        """Create the table, or the indexes that it lacks, and say which: never a column.

        Of several processes that do so at once one creates, and the others find it done.
        """
        try:
            with self._messages.engine.begin() as connection:
                missing = self._missing(connection)
                for each in missing:
                    each.create(connection)
        except exc.SQLAlchemyError as error:
            raise ConfigurationError(f"{self._messages.table.fullname}: {reason(error)}") from error
        return [
            "created the table" if isinstance(each, Table) else f"created the index {each.name}"
            for each in missing
        ]

    def examine(self) -> Iterator[Finding]:
        """Check the server and the table, without writing. Ends early if it cannot be reached."""
        found = list[Finding]()
        try:
            with self._messages.engine.begin() as connection:
                found += self._examine_server(connection)
                found += map(self._lack, self._missing(connection))
        except ConfigurationError as error:
            found.append(Finding("FAILED", "columns", *error.detail.split("; ", 1)))
        except exc.SQLAlchemyError as error:
            found.append(Finding("FAILED", "database", reason(error), self.remedy))
        yield from found

    def _examine_server(self, connection: Connection) -> Iterator[Finding]:
        yield Finding("ok", "SQLite", f"{sqlite3.sqlite_version}, {connection.engine.url.database}")

    def _missing(self, connection: Connection) -> list[Any]:
        """Return the table if it is missing, or the indexes for whose column it has none.

        Raises ``ConfigurationError`` if it lacks columns, or has them of another type.
        """
        for statement in self._alone:
            connection.exec_driver_sql(statement)
        table, database, dialect = self._messages.table, inspect(connection), connection.dialect
        if not database.has_table(table.name, schema=table.schema):
            return [table]
        found = database.get_columns(table.name, schema=table.schema)
        types = {each["name"]: each["type"].compile(dialect) for each in found}
        wanted = {each.name: each.type.compile(dialect) for each in table.columns}
        lacking = [f"{name} {kind}" for name, kind in wanted.items() if types.get(name) != kind]
        if lacking:
            raise ConfigurationError(
                f"{table.fullname} lacks columns, or has them of another type: {', '.join(lacking)};"
                f" {_MIGRATE}, or, if its records are not needed, drop the table and {_CREATE}"
            )
        indexes = database.get_indexes(table.name, schema=table.schema)
        there = {each["column_names"][0] for each in indexes}
        missing = [index for index in table.indexes if index.columns[0].name not in there]
        return sorted(missing, key=lambda index: str(index.name))

    def _lack(self, missing: Table | Index) -> Finding:
        if isinstance(missing, Table):
            bad = f"{missing.fullname} is missing"
            return Finding("FAILED", "table", bad, f"{_CREATE}, or {_MIGRATE}")
        bad = f"no {missing.name}: a purge, or a search for what is interrupted, reads the whole table"
        statement = str(CreateIndex(missing).compile(self._messages.engine))
        remedy = statement.replace("CREATE INDEX", self._create_index, 1)
        return Finding("FAILED", "index", bad, remedy)


_SERVER = """SELECT current_setting('server_version'), current_database(), current_user,
       (SELECT relkind::text || relpersistence::text FROM pg_class WHERE oid = to_regclass(:table)),
       (SELECT string_agg(indexrelid::regclass::text, ', ') FROM pg_index
         WHERE indrelid = to_regclass(:table) AND NOT (indisvalid AND indisready))"""


class PostgresAdmin(SqlAdmin):
    """The same in PostgreSQL, where requests go on meanwhile."""

    remedy = (
        "check that URL, user and password lead to a primary that takes writes, that no migration holds"
        " the table (pg_stat_activity shows who does), and that a pooler such as PgBouncer pools"
        " transactions or sessions, not statements; let the table take what a request writes: a column"
        " of your own needs a default, and no constraint, trigger or row security may refuse a row"
    )
    # While CREATE INDEX waits for a lock, requests queue behind it, and they wait for 250 ms at most.
    _alone = (
        "SELECT pg_advisory_xact_lock(hashtext('flask idempotency create-table'))",
        "SET LOCAL lock_timeout = '100ms'",
    )
    _create_index = "CREATE INDEX CONCURRENTLY"  # beside everybody's work
    _since = "-infinity"  # where the last batch of a purge ended

    def _purge(self, messages: Any, batch: int) -> int:
        """Delete them in the order in which they expire."""
        values = {"batch": batch, "since": self._since}
        deleted, since = messages.fetch(statements.PURGE, values)[0]
        # From the beginning again once there was no more: what was locked is there.
        self._since = since if deleted == batch else "-infinity"
        return int(deleted)

    def _examine_server(self, connection: Connection) -> Iterator[Finding]:
        dialect, server = connection.dialect, text(_SERVER)
        table = dialect.identifier_preparer.format_table(self._messages.table)
        version, database, user, kind, broken = connection.execute(server, {"table": table}).one()
        driver = dialect.loaded_dbapi.__version__.split()[0]
        yield Finding("ok", "PostgreSQL", f"{version}, database {database}, user {user}")
        yield Finding("ok", "driver", f"{dialect.driver} {driver}")
        if kind not in (None, "rp"):  # an ordinary table, permanent
            bad = "it is unlogged, so a crash empties it, or partitioned, so no purge finds anything"
            yield Finding("FAILED", "table", bad, "make it an ordinary table")
        if broken:
            bad = "a CREATE INDEX CONCURRENTLY was interrupted, and has left one that is not valid"
            yield Finding("FAILED", "index", bad, f"REINDEX INDEX CONCURRENTLY {broken}")


def _line(row: Sequence[Any]) -> Line:
    """Make a line of a row: psycopg2 gives a memoryview, and SQLite a number for what is true."""
    key, *facts, created, completed, expires, expired, version = row
    times = map(read_time, (created, completed, expires))
    values: list[Any] = [bytes(key), *facts, *times, bool(expired), version]
    return Line(*values)
