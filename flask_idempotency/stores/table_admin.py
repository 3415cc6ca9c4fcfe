"""What the commands do with a table of records, in PostgreSQL and in SQLite alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from sqlalchemy import Connection, Index, Inspector, Table, inspect

from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.core.keys import KEY_BYTES, SCOPE_BYTES
from flask_idempotency.core.records import ERASED, Claim
from flask_idempotency.core.rows import response_values

from .admin import (
    CAPPED,
    ERASURE_SECONDS,
    REBUILD,
    USUAL,
    WAITING,
    AuditEntry,
    Belongings,
    Erasure,
    Line,
    Overview,
    StepLine,
    Tally,
    Time,
    Verdict,
    read_audit,
    read_time,
)
from .table import IS_OBSERVED, NO_LEASE, VERSION

_FORGET = "DELETE FROM {table} WHERE key = %(key)s AND owner = %(owner)s"

T = TypeVar("T", Line, StepLine)


_CHANCE = 0.15
"""Five times the standard deviation of the number of pages in a sample of a thousand."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large a table is: for one page that an overview reads, it has ``pages_for_one``.

    ``records`` is what the database believes to be in it; 0 if it has no idea.
    """

    pages_for_one: float = 1.0
    records: float = 0.0
    inserted: int | None = None
    deleted: int | None = None

    def factor(self, sampled: int) -> float:
        """Return how many records each of so many in a sample stands for.

        The number of pages in a sample varies by a few percent. The database has counted better when it
        last read them all; but if the two differ by more than chance does, much has changed since.
        """
        known = self.records / max(sampled, 1)
        is_likely = abs(known / self.pages_for_one - 1) < _CHANCE
        return known if self.pages_for_one > 1 and is_likely else self.pages_for_one


class AdminStatements:
    """The statements of one dialect, with the placeholders of PostgreSQL's."""

    def __init__(
        self,
        *,
        now: str,
        in_ttl: str,
        later: str,
        digits: str,
        age: str,
        before: str,
        entry: str,
        audit: str,
        first: str,
        count: str = "%(why)s",
        durable: str = "",
        lock: str = "",
        time: str = "{}",
        bounded: str = "",
        sample: str = "",
    ) -> None:
        """Fill in a dialect's present time, the time in ``ttl`` seconds and the later of two times.

        ``digits`` are the first 16 of a key's hash, ``time`` makes text of a time, in UTC, ``age`` are
        the seconds since the earliest, ``before`` is the time ``older`` seconds ago as text. ``entry``
        is one of the audit with a placeholder for ``why``, ``audit`` is the list with another,
        ``first`` one of its own, ``count`` says how many were erased. ``durable`` makes a commit wait
        for the disk, ``lock`` passes by rows that others hold. For an overview ``bounded`` limits the
        time, ``sample`` what it reads.
        """
        expired = f"(expires_at <= {now} AND lease_expires_at IS NULL)"
        # Who runs an operation has a lease, or has nothing written of an end (completed_at is null).
        state = f"""CASE WHEN {IS_OBSERVED} THEN 'observed' WHEN owner = '{ERASED}' THEN 'erased'
       WHEN state <> 'in_progress' THEN state
       WHEN lease_expires_at <= {now} THEN 'interrupted'
       WHEN lease_expires_at IS NULL AND completed_at IS NOT NULL THEN 'released'
       ELSE state END"""
        group = f"CAST(name AS text), CAST({state} AS text)"  # in SQLite they may be anything
        line = f"""SELECT {digits}, {group}, attempt, status, length(body),
       {time.format("created_at")},
       CASE WHEN state <> 'in_progress' THEN {time.format("completed_at")} END,
       CASE WHEN lease_expires_at IS NULL THEN {time.format("expires_at")} END, {expired},
       {VERSION}
  FROM"""
        starting = "key BETWEEN %(low)s AND %(high)s"
        of_scope = f"substr(key, {KEY_BYTES - SCOPE_BYTES + 1}) = %(tail)s"
        # Sorted inside, so that texts are made of a few records only. The third condition says nothing
        # new, but it shows the planner that interrupted ones are in the partial index.
        newest, of_scope_newest = (
            f"""{line} (SELECT * FROM {{table}}
 WHERE {which}(CAST(%(name)s AS text) IS NULL OR name = %(name)s)
   AND (CAST(%(state)s AS text) IS NULL OR {state} = %(state)s)
   AND (coalesce(%(state)s, '') <> 'interrupted' OR lease_expires_at <= (SELECT {now}))
 ORDER BY created_at DESC LIMIT %(limit)s) AS newest ORDER BY created_at DESC"""
            for which in ("", f"{of_scope} AND ")
        )
        mine = f"""SELECT key FROM {{table}}
   WHERE key = %(key)s AND {VERSION} = %(seen)s
     AND {state} IN ('interrupted', 'failed'){lock}"""
        self.tally = f"""{bounded}SELECT {group}, count(*) FROM {{table}} {sample}
 WHERE lease_expires_at IS NULL GROUP BY 1, 2"""
        # Few, and those that matter: never estimated. The partial index has no others.
        self.leases = f"""{bounded}SELECT {group}, attempt > {USUAL}, count(*),
       {age.format("created_at")}
  FROM (SELECT * FROM {{table}} WHERE lease_expires_at IS NOT NULL
         ORDER BY lease_expires_at LIMIT {CAPPED}) AS leased GROUP BY 1, 2, 3"""
        self.expired = f"""{bounded}SELECT count(*), {age.format("expires_at")}
  FROM (SELECT expires_at FROM {{table}}
         WHERE expires_at <= (SELECT {now}) AND lease_expires_at IS NULL
         ORDER BY expires_at LIMIT {CAPPED}) AS expired"""
        self.newest = newest
        self.of_scope = of_scope_newest
        self.leased = f"""{line} (SELECT * FROM {{table}}
 WHERE lease_expires_at IS NOT NULL AND {state} = %(state)s
 ORDER BY created_at LIMIT %(limit)s) AS leased ORDER BY created_at"""
        self.starting = f"{line} {{table}} WHERE {starting} LIMIT 2"
        self.steps = f"""SELECT name, attempt, length(result), {time.format("created_at")}, result
  FROM {{steps}} WHERE {starting} ORDER BY created_at"""
        self.key = f"SELECT key FROM {{table}} WHERE {starting} LIMIT 2"
        self.outermost = f"""SELECT key FROM (SELECT key FROM {{table}}
         WHERE expires_at > (SELECT {now}) AND owner <> '{ERASED}'
         ORDER BY expires_at DESC LIMIT 1) AS latest
 UNION SELECT key FROM (SELECT key FROM {{table}}
         WHERE expires_at > (SELECT {now}) AND state <> 'in_progress'
         ORDER BY expires_at LIMIT 1) AS next"""
        self.audit = f"""SELECT CAST(audit AS text), {time.format("created_at")}
  FROM {{table}} WHERE {starting} LIMIT 1"""
        self.note = f"""{durable}UPDATE {{table}} SET audit = {audit.format(entry.format("%(why)s"))}
 WHERE key = (SELECT key FROM {{table}} WHERE key = %(key)s{lock})"""
        # It looks like what was rolled back; its owner tells it apart.
        self.erasure = f"""INSERT INTO {{table}} (key, expires_at, created_at, attempt,
       fingerprint_version, state, owner, name, fingerprint, audit)
SELECT %(note)s, {in_ttl}, {now}, 0, 0, 'in_progress', '{ERASED}', %(name)s, %(note)s,
       {first.format(entry.format(count))}"""
        # Another owner: whoever held it before writes nothing more. The retention begins again, and so
        # does the count of attempts. What is released waits with a lease that is over: the decision is
        # not the end, and if no client comes back, somebody must hear of it.
        self.settle = f"""{durable}UPDATE {{table}} SET state = %(state)s, owner = %(owner)s,
       lease_expires_at = CASE WHEN %(state)s = 'in_progress' THEN {now} END,
       created_at = CASE WHEN %(anew)s THEN {now} ELSE created_at END,
       completed_at = {now}, expires_at = {later}(expires_at, {in_ttl}),
       status = %(status)s, headers = %(headers)s, body = %(body)s,
       released_attempt = CASE WHEN %(state)s = 'in_progress' THEN attempt END,
       audit = {audit.format(entry.format("%(why)s"))}
 WHERE key = ({mine})"""
        self.belonging = f"""SELECT key, CAST(name AS text) FROM {{table}}
 WHERE {of_scope} AND (CAST(%(name)s AS text) IS NULL OR name = %(name)s) AND {NO_LEASE}"""
        self.left = f"""SELECT {state}, count(*) FROM {{table}}
 WHERE {of_scope} AND (CAST(%(name)s AS text) IS NULL OR name = %(name)s)
   AND lease_expires_at IS NOT NULL AND NOT {IS_OBSERVED} GROUP BY 1"""
        self.before = f"SELECT {before}"
        self.older = f"""SELECT count(*) FROM {{table}}
 WHERE state <> 'in_progress' AND completed_at <= %(before)s AND expires_at > (SELECT {now})"""


class TableAdmin:
    """The half of an ``Admin`` that two dialects share."""

    sql: AdminStatements

    def __init__(self, records: Any) -> None:
        self._records, self._messages = records, records.messages

    def overview(self) -> Overview:
        """Return what there is at a glance."""
        size, counts = self._size(), Counter[tuple[str, str]]()
        sample = self._fetch(self.sql.tally, {"percent": 100 / size.pages_for_one})
        factor = size.factor(sum(count for *_, count in sample))
        for name, state, count in sample:
            counts[name, state] += round(count * factor)
        leases = self._fetch(self.sql.leases, {})
        known = []
        for name, state, again, count, seconds in leases:
            counts[name, state] += count
            if seconds is not None and (state in WAITING or (again and state == "in_progress")):
                known.append(seconds)
        expired, expired_seconds = self._fetch(self.sql.expired, {})[0]
        return Overview(
            tallies=[Tally(*group, count) for group, count in sorted(counts.items())],
            estimated=size.pages_for_one > 1,
            running=sum(count for _, state, _, count, _ in leases if state == "in_progress"),
            interrupted=sum(count for _, state, _, count, _ in leases if state in WAITING),
            interrupted_seconds=max(known, default=None),
            expired=expired,
            expired_seconds=expired_seconds,
            inserted=size.inserted,
            deleted=size.deleted,
        )

    def _size(self) -> Size:
        """Return how large the table is."""
        return Size()

    def newest(self, name: str | None, state: str | None, limit: int) -> list[Line]:
        """Return the newest records."""
        return self._lines(self.sql.newest, name=name, state=state, limit=limit)

    def of_scope(self, tail: bytes, name: str | None, state: str | None, limit: int) -> list[Line]:
        """Return the newest records of a scope."""
        return self._lines(self.sql.of_scope, tail=tail, name=name, state=state, limit=limit)

    def _lines(self, template: str, **values: Any) -> list[Line]:
        return [read_row(Line, row) for row in self._fetch(template, values)]

    def leased(self, state: str, limit: int) -> list[Line]:
        """Return the oldest records with a lease."""
        return self._lines(self.sql.leased, state=state, limit=limit)

    def starting(self, start: bytes) -> list[Line]:
        """Return the records whose key's hash starts so."""
        return self._lines(self.sql.starting, **between(start))

    def steps(self, start: bytes) -> list[StepLine]:
        """Return the finished steps."""
        return [read_row(StepLine, row) for row in self._fetch(self.sql.steps, between(start))]

    def key(self, start: bytes) -> bytes | None:
        """Return the whole key."""
        rows = self._fetch(self.sql.key, between(start))
        return bytes(rows[0][0]) if len(rows) == 1 else None

    def outermost(self) -> list[bytes]:
        """Return the keys of what expires last, so is young, and next, if any: found by the index."""
        return [bytes(key) for (key,) in self._fetch(self.sql.outermost, {})]

    def audit(self, start: bytes) -> list[AuditEntry]:
        """Return what operators did."""
        rows = self._fetch(self.sql.audit, between(start))
        return [entry for text, since in rows for entry in read_audit(text, read_time(since))]

    def note(self, key: bytes, entry: AuditEntry) -> bool:
        """Note what an operator did."""
        return self._change(self.sql.note, {"key": key, **_entry_values(entry)}) == 1

    def settle(self, verdict: Verdict) -> bool:
        """End it as an operator decided."""
        empty = {"status": None, "headers": None, "body": None}
        values = {
            "key": verdict.key,
            "owner": verdict.owner,
            "ttl": verdict.ttl_seconds,
            "seen": verdict.seen,
            "state": verdict.state.value,
            "anew": verdict.anew,
            **_entry_values(verdict.entry),
            **(empty if verdict.response is None else response_values(verdict.response)),
        }
        return self._change(self.sql.settle, values) == 1

    def belonging(self, tail: bytes, name: str | None) -> Belongings:
        """Return the records of a scope."""
        values = {"tail": tail, "name": name}
        found = self._fetch(self.sql.belonging, values)
        left = dict(map(tuple, self._fetch(self.sql.left, values)))
        return Belongings([bytes(key) for key, _ in found], left, frozenset(name for _, name in found))

    def count_older(self, seconds: float) -> int:
        """Return how many ended so long ago and have not expired."""
        return int(self._fetch(self.sql.older, {"before": self._before(seconds)})[0][0])

    def _before(self, seconds: float) -> str:
        """Return the time so many seconds ago, by the database's clock, as its own text."""
        return str(self._fetch(self.sql.before, {"older": seconds})[0][0])

    def _forget(self, claim: Claim) -> None:
        self._change(_FORGET, {"key": claim.key, "owner": claim.owner})

    def _create(self, connection: Connection) -> Iterator[str]:
        """Create the tables and indexes that are missing; say which.

        Raises ``ConfigurationError`` if a table lacks columns: it is not ours to alter.
        """
        tables = {
            "the table": self._messages.table,
            "the table of its steps": self._messages.steps,
        }
        database = inspect(connection)
        for what, table in tables.items():
            if not database.has_table(table.name, schema=table.schema):
                table.create(connection)
                yield f"created {what}"
            elif lacking := ", ".join(missing_columns(database, table)):
                raise ConfigurationError(
                    f"{table.fullname} is there, but lacks columns ({lacking}). Nothing is created:"
                    f" {REBUILD}"
                )
            else:
                for index in missing_indexes(database, table):
                    index.create(connection)
                    yield f"created the index {index.name}"

    def _fetch(self, template: str, values: dict[str, Any]) -> list[Any]:
        """Return the rows of a statement that only reads."""
        raise NotImplementedError

    def _change(self, template: str, values: dict[str, Any]) -> int:
        """Return how many rows a statement has changed, committed."""
        raise NotImplementedError


def _entry_values(entry: AuditEntry) -> dict[str, Any]:
    return {"by": entry.by, "did": entry.did, "why": entry.why}


def erasure_values(erasure: Erasure) -> dict[str, Any]:
    """Return what :attr:`AdminStatements.erasure` is filled in with."""
    values = {"note": erasure.key, "name": erasure.operation, "ttl": ERASURE_SECONDS}
    return values | _entry_values(erasure.entry)


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
    "Stored | None": lambda result: bytes(result or b""),  # psycopg2 gives a memoryview
}


def read_row(kind: type[T], row: Sequence[Any]) -> T:
    """Make a value of a row. Times are text there, and in SQLite everything may be anything."""
    read = (_READ.get(field.type, lambda value: value) for field in fields(kind))
    return kind(*(convert(value) for convert, value in zip(read, row, strict=True)))


def between(start: bytes) -> dict[str, bytes]:
    """Return the first and the last key that start so."""
    return {"low": start.ljust(KEY_BYTES, b"\0"), "high": start.ljust(KEY_BYTES, b"\xff")}


def missing_columns(database: Inspector, table: Table) -> list[str]:
    """Return the names of the columns that a table lacks."""
    there = {column["name"] for column in database.get_columns(table.name, schema=table.schema)}
    return [column.name for column in table.columns if column.name not in there]


def missing_indexes(database: Inspector, table: Table) -> list[Index]:
    """Return the indexes that a table lacks, as far as names tell, which a dialect may shorten."""
    names = database.dialect.identifier_preparer
    found = database.get_indexes(table.name, schema=table.schema)
    there = {names.quote(str(index["name"])) for index in found}
    lacking = [index for index in table.indexes if names.format_index(index) not in there]
    return sorted(lacking, key=lambda index: str(index.name))
