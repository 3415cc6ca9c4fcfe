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
from typing import Any

from sqlalchemy import Connection, Index, Inspector, exc, inspect, text
from sqlalchemy.schema import CreateIndex

from flask_idempotency.core.errors import ConfigurationError, StoreUnavailable, sqlstate
from flask_idempotency.core.keys import KEY_BYTES
from flask_idempotency.core.records import SEALED_TEXT, State, StoredResponse, StoredStep, steps_of

from .admin import AuditEntry, Finding, Line, Overview, finding, read_audit, read_time, reason
from .postgres import statements
from .postgres.errors import LOCK_NOT_AVAILABLE, QUERY_CANCELED

_CREATE = "run `flask idempotency create-table`"
_MIGRATE = "make a migration (the table is part of db.metadata)"
_REBUILD = f"{_MIGRATE}; where its records are not needed, drop the table and {_CREATE}"


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
        self._messages = records.messages
        self._sql = self._messages.sql

    def overview(self) -> Overview:
        """Return what there is at a glance. Reads no more of a large table than of a small one."""
        rows, counts = self._fetch(self._sql.overview), defaultdict[str, Counter[str]](Counter)
        found = {part: numbers for part, name, _, *numbers in rows if name is None}
        for _, name, state, count, _ in rows:
            if name is not None:
                counts[name][state] += count
        estimated = any(part == "estimated" for part, *_ in rows)
        return Overview(counts, estimated, *found["waiting"], *found["expired"])

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
        values = {
            "low": low,
            "high": high,
            "tail": tail,
            "size": len(tail),
            "name": name,
            "state": state,
        }
        return [_line(row) for row in self._fetch(self._sql.lines, **values, limit=limit)]

    def notes(self, key: bytes) -> tuple[dict[str, StoredStep], list[AuditEntry]]:
        """Return a record's finished steps, by name, and what operators did to it."""
        steps, audit = next(iter(self._fetch(self._sql.notes, key=key)), (None, None))
        return steps_of(steps), read_audit(audit)

    def sealings(self) -> Counter[bytes | None]:
        """Count responses and results of steps that have not expired, by how they begin if encrypted.

        That is ``SEALED`` and the id of the key; None for those that are not encrypted. Reads all.
        """
        found = Counter[bytes | None]()
        for response, step, count in self._fetch(self._sql.sealed):
            prefix = None if response is None else bytes(response)
            if step is not None and step.startswith(SEALED_TEXT):
                prefix = b64decode(step.removeprefix(SEALED_TEXT))
            found[prefix] += count
        return found

    def note(self, key: bytes, entry: AuditEntry) -> bool:
        """Note durably what an operator did to a record; False if it is gone, or somebody holds it."""
        return self._change(self._sql.note, key=key, **_entry_values(entry)) == 1

    def settle(
        self,
        seen: Line,
        entry: AuditEntry,
        ttl_seconds: float,
        response: StoredResponse | None = None,
        *,
        anew: bool = False,
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
        values |= {"state": state.value, "ttl": ttl_seconds, "anew": anew, **_entry_values(entry)}
        return self._change(self._sql.settle, **values) == 1

    def belonging(self, tail: bytes, name: str | None) -> tuple[list[bytes], Counter[str]]:
        """Return the keys that end with ``tail`` of records without a lease; count the rest by state.

        Of one operation if it is given. Reads all of the table's keys: a scope has no index.
        """
        rows = self._fetch(self._sql.belonging, tail=tail, size=len(tail), name=name)
        keys = [bytes(key) for key, _, _ in rows if key is not None]
        return keys, Counter({state: count for key, state, count in rows if key is None})

    def erase(self, keys: list[bytes], seen: str | None = None) -> int:
        """Delete these records, durably and in one transaction; return how many.

        Leaves those in progress: with a lease, or held by somebody. With ``seen``, a
        :attr:`Line.version`, there is one key, and its record is left if it has another version.
        """
        erase = self._messages.prepared(self._sql.erase)
        with self._messages.writing() as (_, raw):
            deleted = sum(raw.send(erase, {"key": key, "seen": seen})[1] for key in keys)
            raw.send("COMMIT")
        return int(deleted)

    def purge(self, batch: int) -> Iterator[int]:
        """Delete expired records, at most ``batch`` in each transaction, until none is left.

        Yields how many each transaction has deleted, after its commit. Skips a record that somebody
        holds.
        """
        while deleted := self._change(self._sql.purge, batch=batch):
            yield deleted

    def purge_briefly(self, batch: int) -> int | None:
        """Delete at most ``batch`` expired records, within 100 ms; return how many.

        None, and none is deleted, if that takes longer. Waits for nobody, and leaves the last
        connection of a pool to others.
        """
        try:
            return int(self._messages.change(self._sql.purge, {"batch": batch}, patience=0))
        except StoreUnavailable as error:
            if "database is locked" not in str(error.__cause__):
                raise
            return 0

    def create(self) -> list[str]:
        """Create the table and the indexes that are missing, and say which: never a column.

        Of several processes that do so at once one creates, and the others find it done.
        """
        table = self._messages.table
        try:
            with self._messages.engine.begin() as connection:
                database = self._inspector(connection)
                if not database.has_table(table.name, schema=table.schema):
                    table.create(connection)
                    return ["created the table"]
                if lacking := ", ".join(self._missing_columns(database)):
                    raise ConfigurationError(
                        f"{table.fullname} is there, but lacks columns ({lacking}). Nothing is created:"
                        f" {_REBUILD}"
                    )
                missing = self._missing_indexes(database)
                for index in missing:
                    index.create(connection)
                return [f"created the index {index.name}" for index in missing]
        except exc.SQLAlchemyError as error:
            raise ConfigurationError(f"{table.fullname}: {reason(error)}") from error

    def examine(self) -> Iterator[Finding]:
        """Check the server and the table, without writing. Ends early if it cannot be reached."""
        try:
            with self._messages.engine.begin() as connection:
                database = self._inspector(connection)
                found = [*self._examine_server(connection), *self._examine_table(database)]
        except exc.SQLAlchemyError as error:
            yield Finding("FAILED", "database", reason(error), self.remedy)
            return
        yield from found

    def _examine_server(self, connection: Connection) -> Iterator[Finding]:
        yield Finding("ok", "SQLite", f"{sqlite3.sqlite_version}, {connection.engine.url.database}")

    def _examine_table(self, database: Inspector) -> Iterator[Finding]:
        """Check the table's columns and indexes."""
        table = self._messages.table
        if not database.has_table(table.name, schema=table.schema):
            yield Finding(
                "FAILED", "table", f"{table.fullname} is missing", f"{_CREATE}, or {_MIGRATE}"
            )
            return
        lacking = self._missing_columns(database)
        all_of_it = f"all {len(table.columns)} of {table.fullname}"
        bad = f"missing in {table.fullname} or of another type: {', '.join(lacking)}"
        yield finding(not lacking, "columns", all_of_it, bad, _REBUILD)
        missing = [] if lacking else self._missing_indexes(database)
        for index in missing:
            bad = (
                f"no {index.name}: a purge, or a search for what is interrupted, reads the whole table"
            )
            statement = str(CreateIndex(index).compile(self._messages.engine))
            remedy = statement.replace("CREATE INDEX", self._create_index, 1)
            yield Finding("FAILED", "index", bad, remedy)

    def _inspector(self, connection: Connection) -> Inspector:
        for statement in self._alone:
            connection.execute(text(statement))
        return inspect(connection)

    def _missing_columns(self, database: Inspector) -> list[str]:
        """Return the columns that the table lacks, or has of another type, each with its type."""
        table, dialect = self._messages.table, self._messages.engine.dialect
        found = database.get_columns(table.name, schema=table.schema)
        there = {each["name"]: each["type"].compile(dialect) for each in found}
        wanted = {each.name: each.type.compile(dialect) for each in table.columns}
        return [f"{name} {kind}" for name, kind in wanted.items() if there.get(name) != kind]

    def _missing_indexes(self, database: Inspector) -> list[Index]:
        """Return those of ours for which there is none on the same column."""
        table = self._messages.table
        found = database.get_indexes(table.name, schema=table.schema)
        there = {each["column_names"][0] for each in found}
        lacking = [index for index in table.indexes if index.columns[0].name not in there]
        return sorted(lacking, key=lambda index: str(index.name))

    def _fetch(self, template: str, **values: Any) -> list[Any]:
        """Return the rows of a statement that only reads."""
        return self._messages.fetch(template, values)  # type: ignore[no-any-return]

    def _change(self, template: str, **values: Any) -> int:
        """Return how many rows a statement has changed, committed."""
        return self._messages.change(template, values)  # type: ignore[no-any-return]


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

    def erase(self, keys: list[bytes], seen: str | None = None) -> int:
        """Delete what nobody works on."""
        return int(self._messages.change(statements.ERASE, {"keys": keys, "seen": seen}))

    def purge(self, batch: int) -> Iterator[int]:
        """Delete expired records in batches, in the order in which they expire."""
        deleted = batch
        while deleted == batch:
            began = time.monotonic()
            deleted = self._purge(batch)
            took = time.monotonic() - began
            if deleted:
                yield deleted
                time.sleep(took)  # requests have the disk to themselves for half of the time

    def purge_briefly(self, batch: int) -> int | None:
        """Delete a batch."""
        pool = self._messages.engine.pool
        if pool.size() - pool.checkedout() < 2:
            return 0
        try:
            return self._purge(batch, statements.AFTER_RESPONSE)
        except StoreUnavailable as error:
            code = sqlstate(error.__cause__)
            if code not in (LOCK_NOT_AVAILABLE, QUERY_CANCELED):
                raise
            return 0 if code == LOCK_NOT_AVAILABLE else None

    def _purge(self, batch: int, first: str = "") -> int:
        values = {"batch": batch, "since": self._since}
        deleted, since = self._messages.fetch(first + statements.PURGE, values)[0]
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


def _entry_values(entry: AuditEntry) -> dict[str, Any]:
    return {"by": entry.by, "did": entry.did, "why": entry.why}


def _line(row: Sequence[Any]) -> Line:
    """Make a line of a row: psycopg2 gives a memoryview, and SQLite a number for what is true."""
    key, *facts, created, completed, expires, expired, version = row
    times = map(read_time, (created, completed, expires))
    values: list[Any] = [bytes(key), *facts, *times, bool(expired), version]
    return Line(*values)
