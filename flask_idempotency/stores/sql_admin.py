"""What the commands do with a table of records, in PostgreSQL and in SQLite.

Each method is a few statements outside any request, on connections of the application's own pool.
"""

from __future__ import annotations

import sqlite3
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from random import choice
from typing import Any, Literal, cast

from sqlalchemy import Connection, Index, Inspector, QueuePool, exc, inspect, text
from sqlalchemy.schema import CreateIndex

from flask_idempotency.core.errors import (
    ConfigurationError,
    IdempotencyError,
    NotAtomic,
    StoreUnavailable,
    sqlstate,
)
from flask_idempotency.core.keys import KEY_BYTES
from flask_idempotency.core.records import SEALED_TEXT, Claim

from .admin import (
    ADD,
    LOCKED,
    REBUILD,
    UNLOCK,
    WAITING,
    AuditEntry,
    Belongings,
    Finding,
    Line,
    Overview,
    StepLine,
    Tally,
    Time,
    Verdict,
    finding,
    original,
    read_audit,
    read_time,
    reason,
    remedy_of,
    step_lines,
    trying,
)
from .postgres import statements
from .postgres.failures import LOCK_NOT_AVAILABLE, NO_RIGHT, QUERY_CANCELED, store_error
from .table import FILLFACTOR

_FORGET = "DELETE FROM {table} WHERE key = %(key)s AND owner = %(owner)s"


_WITHOUT: dict[str, tuple[Literal["advice", "FAILED"], str]] = {
    "expires_at": ("FAILED", "none on expires_at, so every purge reads the whole table"),
    "lease_expires_at": (
        "advice",
        "none of operations with a lease, so a search for interrupted ones reads the whole table",
    ),
}
"""How bad it is if the index that begins with a column is missing, and why."""


class SqlAdmin:
    """The half of an ``Admin`` that the two databases share."""

    remedy: str
    _first = ""  # what each message begins with

    def __init__(self, records: Any) -> None:
        self._records, self._messages = records, records.messages
        self._sql = self._messages.sql

    def overview(self) -> Overview:
        """Return what there is at a glance."""
        percent, counts = self._percent(), Counter[tuple[str, str]]()
        for name, state, count in self._fetch(self._sql.tally, percent=percent):
            counts[name, state] += round(count * 100 / percent)
        leases = self._fetch(self._sql.leases)
        known = []
        for name, state, again, count, seconds in leases:
            counts[name, state] += count
            if seconds is not None and (state in WAITING or (again and state == "in_progress")):
                known.append(seconds)
        expired, expired_seconds = self._fetch(self._sql.waiting)[0]
        return Overview(
            tallies=[Tally(*group, count) for group, count in sorted(counts.items())],
            estimated=percent < 100,
            running=sum(count for _, state, _, count, _ in leases if state == "in_progress"),
            interrupted=sum(count for _, state, _, count, _ in leases if state in WAITING),
            interrupted_seconds=max(known, default=None),
            expired=expired,
            expired_seconds=expired_seconds,
        )

    def _percent(self) -> float:
        """Return how much of the table an overview reads."""
        return 100.0

    def newest(self, name: str | None, state: str | None, limit: int, tail: bytes = b"") -> list[Line]:
        """Return the newest records."""
        values = {"name": name, "state": state, "limit": limit, "every_scope": not tail, "tail": tail}
        return [_line(row) for row in self._fetch(self._sql.newest, **values)]

    def leased(self, state: str, limit: int) -> list[Line]:
        """Return the oldest records with a lease."""
        return [_line(row) for row in self._fetch(self._sql.leased, state=state, limit=limit)]

    def starting(self, start: bytes) -> list[Line]:
        """Return the records whose key's hash starts so."""
        return [_line(row) for row in self._fetch(self._sql.starting, **_between(start))]

    def steps(self, start: bytes) -> list[StepLine]:
        """Return the finished steps."""
        rows = self._fetch(self._sql.notes, **_between(start))
        return step_lines(rows[0][0] if rows else None)

    def sealings(self) -> Counter[bytes | None]:
        """Count what is encrypted, by the key, and what is not."""
        found = Counter[bytes | None]()
        for prefix, count in self._fetch(self._sql.sealed_responses):
            found[None if prefix is None else bytes(prefix)] += count
        for result, count in self._fetch(self._sql.sealed_steps):
            if result is not None:
                is_sealed = result.startswith(SEALED_TEXT)
                found[b64decode(result.removeprefix(SEALED_TEXT)) if is_sealed else None] += count
        return found

    def audit(self, start: bytes) -> list[AuditEntry]:
        """Return what operators did."""
        rows = self._fetch(self._sql.notes, **_between(start))
        return read_audit(rows[0][1]) if rows else []

    def note(self, key: bytes, entry: AuditEntry) -> bool:
        """Note what an operator did."""
        return self._change(self._sql.note, key=key, **_entry_values(entry)) == 1

    def settle(self, verdict: Verdict) -> bool:
        """End it as an operator decided."""
        empty = {"status": None, "headers": None, "body": None}
        values = {
            **(empty if verdict.response is None else verdict.response.values()),
            "key": verdict.key,
            "owner": verdict.owner,
            "ttl": verdict.ttl_seconds,
            "seen": verdict.seen,
            "state": verdict.state.value,
            "anew": verdict.anew,
            **_entry_values(verdict.entry),
        }
        return self._change(self._sql.settle, **values) == 1

    def belonging(self, tail: bytes, name: str | None) -> Belongings:
        """Return the records of a scope."""
        keys = [bytes(key) for (key,) in self._fetch(self._sql.belonging, tail=tail, name=name)]
        return Belongings(keys, dict(map(tuple, self._fetch(self._sql.left, tail=tail, name=name))))

    def _forget(self, claim: Claim) -> None:
        self._change(_FORGET, key=claim.key, owner=claim.owner)

    def _create(self, connection: Connection) -> Iterator[str]:
        """Create the table and the indexes that are missing; say which.

        Raises ``ConfigurationError`` if the table lacks columns: it is not ours to alter.
        """
        table, database = self._messages.table, inspect(connection)
        if not database.has_table(table.name, schema=table.schema):
            table.create(connection)
            yield "created the table"
        elif lacking := ", ".join(self._missing_columns(database)):
            raise ConfigurationError(
                f"{table.fullname} is there, but lacks columns ({lacking}). Nothing is created:"
                f" {REBUILD}"
            )
        else:
            for index in self._missing_indexes(database):
                index.create(connection)
                yield f"created the index {index.name}"

    def _examine_table(self, connection: Connection) -> Iterator[Finding]:
        """Check the table's columns, key and indexes."""
        table, database = self._messages.table, inspect(connection)
        if not database.has_table(table.name, schema=table.schema):
            yield Finding("FAILED", "table", f"{table.fullname} is missing", ADD)
            return
        lacking = self._missing_columns(database)
        all_of_it = f"all {len(table.columns)} of {table.fullname}"
        bad = f"missing in {table.fullname} or of another type: {', '.join(lacking)}"
        yield finding(not lacking, "columns", all_of_it, bad, REBUILD)
        unique = database.get_unique_constraints(table.name, schema=table.schema)
        keys = [database.get_pk_constraint(table.name, schema=table.schema)["constrained_columns"]]
        keys += [each["column_names"] for each in unique]
        yield finding(
            ["key"] in keys,
            "primary key",
            "key",
            "nothing prevents two records of one key",
            f"ALTER TABLE {table.fullname} ADD PRIMARY KEY (key)",
        )
        missing = self._missing_indexes(database)
        if not any(index.columns[0].name == "expires_at" for index in missing):
            yield Finding("ok", "index", "expires_at")
        for index in missing:
            if any(lacks.startswith(f"{index.columns[0].name} ") for lacks in lacking):
                continue
            level, bad = _WITHOUT[index.columns[0].name]
            yield Finding(level, "index", bad, self._mend(index))

    def _mend(self, index: Index) -> str:  # noqa: ARG002
        """Return how to make an index."""
        return ADD

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
        there = set()
        for each in database.get_indexes(table.name, schema=table.schema):
            column, where = each["column_names"][0], each.get("dialect_options", {})
            if where.get("postgresql_where") in (None, f"({column} IS NOT NULL)"):
                there.add(column)
        lacking = [index for index in table.indexes if index.columns[0].name not in there]
        return sorted(lacking, key=lambda index: str(index.name))

    def _fetch(self, template: str, **values: Any) -> list[Any]:
        """Return the rows of a statement that only reads."""
        return self._messages.fetch(self._first + template, values)  # type: ignore[no-any-return]

    def _change(self, template: str, **values: Any) -> int:
        """Return how many rows a statement has changed, committed."""
        return self._messages.change(self._first + template, values)  # type: ignore[no-any-return]


_SERVER = """SELECT current_setting('server_version'),
       current_setting('server_version_num')::int, current_database()::text, current_user::text,
       pg_is_in_recovery(), current_setting('default_transaction_read_only') = 'on',
       current_setting('synchronous_commit')"""

_KNOWS_DEAD_CLIENTS = 140000  # client_connection_check_interval came with PostgreSQL 14

# Of the table, or of its partitions.
_STORAGE = """SELECT oid::regclass::text, relpersistence = 'u',
       coalesce((SELECT option_value::int FROM pg_options_to_table(reloptions)
                  WHERE option_name = 'fillfactor'), 100),
       ARRAY(SELECT indexrelid::regclass::text FROM pg_index
              WHERE indrelid = pg_class.oid AND NOT (indisvalid AND indisready))
  FROM pg_class
 WHERE oid = $name${table}$name$::regclass AND relkind <> 'p' OR oid IN (
  SELECT relid FROM pg_partition_tree($name${table}$name$::regclass) WHERE isleaf)"""

_IS_PARTITIONED = "SELECT relkind = 'p' FROM pg_class WHERE oid = $name${table}$name$::regclass"

_ONE_AT_A_TIME = text("SELECT pg_advisory_xact_lock(hashtext(:table))")

# While CREATE INDEX waits for a lock, requests queue behind it, and they wait for 250 ms at most.
_IMPATIENTLY = text("SET LOCAL lock_timeout = '100ms'")

_POOLER = "a pooler such as PgBouncer must pool transactions or sessions, not statements"
"""Advice where a connection is lost or changes under a transaction."""


class PostgresAdmin(SqlAdmin):
    """The records in PostgreSQL, for an operator."""

    remedy = _POOLER
    # A migration may hold the table for minutes: it waits no longer than a request does.
    _first = statements.BRIEFLY

    def __init__(self, records: Any) -> None:
        super().__init__(records)
        self._since: dict[str, str] = {}  # by piece, where the last brief purge of it ended

    def erase(self, keys: list[bytes], seen: str | None = None) -> int:
        """Delete what nobody works on."""
        return int(self._messages.change(statements.ERASE, {"keys": keys, "seen": seen}))

    def purge(self, batch: int) -> Iterator[int]:
        """Delete expired records in batches, in the order in which they expire."""
        for (piece,) in self._messages.fetch(statements.PIECES):
            values = {"batch": batch, "since": "-infinity"}
            purge = statements.purge(_escaped(piece))
            while True:
                began = time.monotonic()
                deleted, values["since"] = self._messages.fetch(purge, values)[0]
                if not deleted:
                    break
                took = time.monotonic() - began
                yield deleted
                time.sleep(took)  # requests have the disk to themselves for half of the time

    def purge_briefly(self, batch: int) -> int | None:
        """Delete a batch from the table, or from one partition, which is picked at random."""
        pool = cast("QueuePool", self._messages.engine.pool)
        if pool.size() - pool.checkedout() < 2:
            return 0
        try:
            (piece,) = choice(self._fetch(statements.PIECES))  # noqa: S311
            values = {"batch": batch, "since": self._since.get(piece, "-infinity")}
            purge = statements.purge(_escaped(piece), bounds=statements.AFTER_RESPONSE)
            deleted, since = self._messages.fetch(purge, values)[0]
        except StoreUnavailable as error:
            code = sqlstate(error.__cause__)
            if code not in (LOCK_NOT_AVAILABLE, QUERY_CANCELED):
                raise
            return 0 if code == LOCK_NOT_AVAILABLE else None
        # From the beginning again once there was no more: what was locked is there.
        self._since[piece] = since if deleted == batch else "-infinity"
        return int(deleted)

    def create(self) -> list[str]:
        """Create the table and indexes that are missing: one process does, others find it done."""
        name = self._messages.table.fullname
        engine = self._messages.engine.execution_options(isolation_level="READ COMMITTED")
        try:
            with engine.begin() as connection:
                connection.execute(_ONE_AT_A_TIME, {"table": name})
                connection.execute(_IMPATIENTLY)
                return list(self._create(connection))
        except exc.SQLAlchemyError as error:
            if sqlstate(original(error)) == NO_RIGHT:
                raise ConfigurationError(
                    "the database user may not create tables and indexes here: run this as one that"
                    " may, such as the owner of the tables and their schema"
                ) from error
            raise store_error(error, name, self._messages.Error) from error

    def examine(self) -> Iterator[Finding]:
        """Check the server and the table, and leave nothing there."""
        try:
            server = self._fetch(_SERVER)[0]
            with self._messages.engine.begin() as connection:
                connection.execute(_IMPATIENTLY)
                found = list(self._examine_table(connection))
            storage = [] if found[0].subject == "table" else self._fetch(_STORAGE)
        except (IdempotencyError, exc.SQLAlchemyError) as error:
            if LOCK_NOT_AVAILABLE in (sqlstate(original(error)), sqlstate(error.__cause__)):
                yield Finding("FAILED", "table", LOCKED, UNLOCK)
                return
            remedy = "check that the server runs and that the URL, user and password are right"
            yield Finding("FAILED", "PostgreSQL", reason(error), f"{remedy}; {_POOLER}")
            return
        dialect = self._messages.engine.dialect
        version = dialect.loaded_dbapi.__version__.split()[0]
        yield from _examine_server(f"{dialect.driver} {version}", *server)
        yield from found
        yield from _examine_storage(self._messages.table.fullname, storage)

    @contextmanager
    def trial(self) -> Iterator[Any]:
        """Claim a record of its own, and change it as the end of an operation does.

        Raises ``ConfigurationError`` if the table rejects that, and ``NotAtomic`` if two messages are
        not one transaction.
        """
        table = self._messages.table
        try:
            with trying(self._records, self._forget) as (claim, hold):
                mine = hold
                has_begun = text("SELECT txid_current_if_assigned() IS NOT NULL")
                if not mine.connection.scalar(has_begun):
                    raise NotAtomic(
                        f"two statements of one transaction used two connections: {_POOLER}"
                    )
                update = table.update().where(table.c.key == claim.key).values(status=200)
                if mine.connection.execute(update).rowcount != 1:
                    raise ConfigurationError(
                        f"an UPDATE of a record in {table.fullname} changes nothing: a trigger, a rule"
                        " or row security prevents it, so no response can be stored"
                    )
                yield mine
        except exc.SQLAlchemyError as error:  # of the INSERT, the UPDATE or the COMMIT
            found = f"{table.fullname}: {reason(error)}"
            raise ConfigurationError(f"{found}; {remedy_of(error, self.remedy)}") from error

    def _mend(self, index: Index) -> str:
        """Without partitions it can be made beside everybody's work."""
        is_partitioned = self._fetch(_IS_PARTITIONED)[0][0]
        how = "CREATE INDEX" if is_partitioned else "CREATE INDEX CONCURRENTLY"
        return str(CreateIndex(index).compile(self._messages.engine)).replace("CREATE INDEX", how, 1)

    def _percent(self) -> float:
        return float(self._fetch(statements.SAMPLE)[0][0])


def _escaped(name: str) -> str:
    """Return a name as part of a template."""
    return name.replace("%", "%%").replace("{", "{{").replace("}", "}}")


def _examine_server(
    driver: str,
    version: str,
    number: int,
    database: str,
    user: str,
    standby: bool,
    read_only: bool,
    commit: str,
) -> Iterator[Finding]:
    yield Finding("ok", "PostgreSQL", f"{version}, database {database}, user {user}")
    yield Finding("ok", "driver", driver)
    if number < _KNOWS_DEAD_CLIENTS:
        old = "a worker killed inside a long statement blocks its key until the statement ends"
        yield Finding("advice", "version", old, "upgrade to PostgreSQL 14 or later")
    remedy = "connect to the primary; on a standby nothing can be claimed"
    if not standby:
        remedy = "turn default_transaction_read_only off for this user and database"
    bad = "this server is a standby" if standby else "transactions are read-only by default"
    good = not (standby or read_only)
    yield finding(good, "writable", "this server is a primary", bad, remedy)
    if commit == "off":
        lossy = (
            "synchronous_commit is off; idempotent operations turn it on for themselves, but a crash"
            " may lose other commits of the application"
        )
        yield Finding("advice", "durability", lossy, "turn synchronous_commit on")


def _examine_storage(table: str, pieces: Sequence[Any]) -> Iterator[Finding]:
    """Check how the table, or its partitions, are stored."""
    unlogged = "; ".join(f"ALTER TABLE {name} SET LOGGED" for name, is_so, *_ in pieces if is_so)
    if unlogged:
        yield Finding("FAILED", "table", f"{table} is unlogged, so a crash empties it", unlogged)
    broken = [f"REINDEX INDEX CONCURRENTLY {index}" for *_, found in pieces for index in found]
    if broken:
        left = "a CREATE INDEX CONCURRENTLY was interrupted, and has left one that is not valid"
        yield Finding("FAILED", "index", left, "; ".join(broken))
    full = [(name, fill) for name, _, fill, _ in pieces if fill > FILLFACTOR]
    yield finding(
        not full,
        "fill factor",
        f"{max((fill for _, _, fill, _ in pieces), default=FILLFACTOR)} %",
        "pages have no room for the completing UPDATE, which then touches every index",
        "; ".join(f"ALTER TABLE {name} SET (fillfactor = {FILLFACTOR})" for name, _ in full),
        "advice",
    )


class SqliteAdmin(SqlAdmin):
    """The records in SQLite, for an operator."""

    remedy = "check that the file is writable and that nobody writes to it for long"

    def erase(self, keys: list[bytes], seen: str | None = None) -> int:
        """Delete what has no lease. While this writes, no view runs."""
        with self._messages.writing() as run:
            return sum(run(self._sql.erase, {"key": key, "seen": seen}).rowcount for key in keys)

    def purge(self, batch: int) -> Iterator[int]:
        """Delete expired records in batches."""
        while deleted := self._change(self._sql.purge, batch=batch):
            yield deleted

    def purge_briefly(self, batch: int) -> int | None:
        """Delete a batch, unless somebody writes."""
        try:
            with self._messages.writing(self._messages.begin(waits=False)) as run:
                return int(run(self._sql.purge, {"batch": batch}).rowcount)
        except StoreUnavailable as error:
            if error.__cause__ is not None and "locked" not in str(error.__cause__):
                raise
            return 0

    def create(self) -> list[str]:
        """Create the table and indexes that are missing."""
        try:
            with self._messages.engine.begin() as connection:
                return list(self._create(connection))
        except exc.SQLAlchemyError as error:
            raise self._messages.error(error) from error

    def examine(self) -> Iterator[Finding]:
        """Check the file and the table."""
        try:
            with self._messages.engine.connect() as connection:
                found = list(self._examine_table(connection))
        except exc.SQLAlchemyError as error:
            remedy = "check that the file is a SQLite database, readable and writable"
            yield Finding("FAILED", "SQLite", reason(error), remedy)
            return
        database = self._messages.engine.url.database
        yield Finding("ok", "SQLite", f"{sqlite3.sqlite_version}, {database}")
        yield from found

    @contextmanager
    def trial(self) -> Iterator[Any]:
        """Claim a record; roll back and delete it at the end."""
        with trying(self._records, self._forget) as (_claim, hold):
            yield hold


def _entry_values(entry: AuditEntry) -> dict[str, Any]:
    return {"by": entry.by, "did": entry.did, "why": entry.why}


def _time(text: str | None) -> Time | None:
    return None if text is None else read_time(text)


def _number(number: Any) -> Any:
    return number if isinstance(number, int | None) else str(number)


_READ: dict[Any, Callable[[Any], Any]] = {
    "Time": _time,
    "Time | None": _time,
    "int": _number,
    "int | None": _number,
    "bool": bool,  # which SQLite has not
    "Hash": bytes,  # psycopg2 gives a memoryview
}


def _line(row: Sequence[Any]) -> Line:
    """Make a line of a row. Times are text there, and in SQLite everything may be anything."""
    read = (_READ.get(field.type, lambda value: value) for field in fields(Line))
    return Line(*(convert(value) for convert, value in zip(read, row, strict=True)))


def _between(start: bytes) -> dict[str, bytes]:
    """Return the first and the last key that start so."""
    return {"low": start.ljust(KEY_BYTES, b"\0"), "high": start.ljust(KEY_BYTES, b"\xff")}
