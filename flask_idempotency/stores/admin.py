"""What an operator asks of the stores: create, count, list, purge, examine.

Each function is a few statements outside any request, on connections of the application's own pool.
Nothing here reads an answer, and of a key's hash no more than eight digits leave the database.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Engine, exc, inspect, text

from ..errors import ConfigurationError, UnknownRecord
from . import statements
from .failures import original, store_error
from .shape import MIGRATE, Shape, index_on, preparer, shape_of, wrong_columns
from .sql import SqlRecords
from .table import FILLFACTOR

_ONE_AT_A_TIME = text("SELECT pg_advisory_xact_lock(hashtext(:table))")
_CREATE_INDEX = "CREATE INDEX CONCURRENTLY IF NOT EXISTS {name} ON {{table}} (expires_at)"
_CREATE_RESUMABLE = (
    "CREATE INDEX CONCURRENTLY IF NOT EXISTS {name} ON {{table}} (created_at) WHERE request IS NOT NULL"
)
_DROP_INDEX = "DROP INDEX CONCURRENTLY IF EXISTS {name}"
_FILL = f"ALTER TABLE {{table}} SET (fillfactor = {FILLFACTOR})"


@dataclass(frozen=True, slots=True)
class Group:
    """The records of one operation in one state. ``bytes`` counts the bodies of their answers."""

    operation: str
    state: str
    count: int
    expired: int
    bytes: int
    oldest: datetime


@dataclass(frozen=True, slots=True)
class Line:
    """One record, without its key and its answer. ``key`` is 8 hex digits of the key's hash."""

    key: str
    operation: str
    state: str
    attempt: int
    status: int | None
    bytes: int | None
    created: datetime
    completed: datetime | None
    expires: datetime
    expired: bool


def stats(records: SqlRecords) -> list[Group]:
    """The records counted, by operation and state. Reads the whole table."""
    return [Group(*row) for row in records.fetch(statements.STATS)[0]]


def newest(records: SqlRecords, name: str | None, state: str | None, limit: int) -> list[Line]:
    """The ``limit`` newest records, of one operation and in one state if these are given."""
    values = {"name": name, "state": state, "limit": limit}
    return [Line(*row) for row in records.fetch(statements.LIST, values)[0]]


@dataclass(frozen=True, slots=True)
class StepLine:
    """One finished step, without its result."""

    name: str
    attempt: int
    bytes: int
    finished: datetime


@dataclass(frozen=True, slots=True)
class Due:
    """An operation to resume; ``request`` as it is stored, ``attempt`` the latest one."""

    key: bytes
    operation: str
    attempt: int
    request: bytes


def find(records: SqlRecords, digits: str) -> tuple[Line, list[StepLine]]:
    """The record whose key's hash begins with ``digits``, and its steps.

    Raises ``UnknownRecord`` if there is none, or more than one.
    """
    rows = records.fetch(statements.SHOW, {"digits": digits})[0]
    if len(rows) != 1:
        found = "no record" if not rows else "more than one record"
        raise UnknownRecord(f"there is {found} whose digits are {digits}")
    steps = records.fetch(statements.SHOW_STEPS, {"digits": digits})[0]
    return Line(*rows[0]), [StepLine(*step) for step in steps]


def reopen(records: SqlRecords, digits: str, owner: str, ttl_seconds: float) -> bytes | None:
    """Let a record that is interrupted or failed be run again, for at least ``ttl_seconds``.

    Gives its key, or None if it is neither.
    """
    values = {"digits": digits, "owner": owner, "ttl": ttl_seconds}
    row = records.run(statements.REOPEN, values)[0]
    return None if row is None else bytes(row[0])


def resumable(records: SqlRecords, limit: int, max_attempts: int, backoff_seconds: float) -> list[Due]:
    """Put off the operations to resume now, and give them; none that somebody holds."""
    values = {"limit": limit, "max_attempts": max_attempts, "backoff": backoff_seconds}
    rows = records.fetch(statements.RESUMABLE, values)[0]
    return [Due(bytes(key), name, attempt, bytes(request)) for key, name, attempt, request in rows]


def purge(records: SqlRecords, batch: int) -> Iterator[int]:
    """Delete expired records, at most ``batch`` in each transaction, until none is left.

    Yields how many each transaction deleted, after it has committed. A record that somebody holds
    stays. Raises ``StoreUnavailable`` or ``ConfigurationError``.
    """
    while deleted := records.fetch(statements.PURGE, {"batch": batch})[0][0][0]:
        yield deleted


def create(records: SqlRecords, engine: Engine) -> list[str]:
    """Create what is missing: the tables, or of one that is there its indexes and its fill factor.

    Says what was done. Never alters a column: ``ConfigurationError`` if one is not as it should be.
    """
    table, done = records.table, []
    try:
        with engine.begin() as connection:
            connection.execute(_ONE_AT_A_TIME, {"table": table.fullname})
            for each, what in ((table, "the table"), (records.steps, "the table of its steps")):
                if not inspect(connection).has_table(each.name, schema=each.schema):
                    each.create(connection)
                    done.append(f"created {what}")
    except exc.SQLAlchemyError as error:
        if getattr(original(error), "pgcode", None) == "42501":
            raise ConfigurationError(
                "the database user may not create tables here: run this as one that may, such as the"
                " owner of the schema"
            ) from error
        raise store_error(error, table.fullname) from error
    shape = shape_of(records)
    if shape is None or not shape.has_key or wrong_columns(records, shape):
        raise ConfigurationError(
            f"{table.fullname} is there, but its columns or its primary key are not as they should be"
            f" (flask idempotency check says how). Columns are not altered here: {MIGRATE}"
        )
    return done + _complete(records, shape)


def _complete(records: SqlRecords, shape: Shape) -> list[str]:
    """Add the index and the fill factor to a table in use, which goes on being read and written."""
    done = []
    if not shape.has_expiry:
        for broken in shape.broken:
            records.run(_DROP_INDEX.format(name=broken))
        name = preparer.format_index(index_on(records.table, "expires_at"))
        records.run(_CREATE_INDEX.format(name=name))
        done.append("created the index on expires_at")
    if not shape.has_resumable:
        name = preparer.format_index(index_on(records.table, "created_at"))
        records.run(_CREATE_RESUMABLE.format(name=name))
        done.append("created the index of resumable operations")
    if shape.fillfactor is None:
        records.run(_FILL)
        done.append(f"set the fill factor to {FILLFACTOR}")
    return done
