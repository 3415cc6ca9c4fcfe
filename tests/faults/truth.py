"""What the servers hold when all is over: the business rows, and the records by scope and key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg2

from flask_idempotency.core.keys import hash_key
from tests.faults import designs
from tests.faults.history import History, Name
from tests.faults.nemesis import World


@dataclass(frozen=True)
class Row:
    """A row of the business table."""

    scope: str
    key: str
    body: int
    execution: str


@dataclass(frozen=True)
class Kept:
    """A record. ``answer`` is the hash of the stored body, "" where there is none."""

    completed: bool
    status: int | None = None
    answer: str = ""


@dataclass
class Truth:
    """Rows, records by name, how many transactions were left open, and what children wrote."""

    rows: list[Row] = field(default_factory=list)
    records: dict[Name, Kept] = field(default_factory=dict)
    left_open: int = 0
    notes: set[str] = field(default_factory=set)


def digest(body: bytes) -> str:
    """The hash by which answers are compared."""
    return hashlib.sha256(body).hexdigest()[:16]


@contextmanager
def _cursor(dsn: str) -> Iterator[Any]:
    connection = psycopg2.connect(dsn)
    try:
        with connection, connection.cursor() as cursor:
            yield cursor
    finally:
        connection.close()


def read(world: World, design: str, history: History) -> Truth:
    """Read it all, once nobody works any more."""
    names = set(history.by_name())
    with _cursor(world.dsn) as cursor:
        cursor.execute("SELECT scope, key, body, execution FROM payment ORDER BY id")
        rows = [Row(*row) for row in cursor]
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND state LIKE 'idle in transaction%'"
        )
        (left_open,) = cursor.fetchone()
        cursor.execute("SELECT execution FROM note")
        notes = {execution for (execution,) in cursor}
        if design == "redis_only":
            records = dict(_in_redis(world, names))
        elif design in designs.DESIGNS:
            cursor.execute("SELECT scope, key, status, answer FROM mark")
            records = {(s, k): _kept(status, answer) for s, k, status, answer in cursor}
        else:
            records = dict(_ours(cursor, names))
    return Truth(rows, records, left_open, notes)


def _kept(status: int | None, answer: str | bytes | None) -> Kept:
    body = answer.encode() if isinstance(answer, str) else bytes(answer or b"")
    return Kept(status is not None, status, digest(body) if status is not None else "")


def _ours(cursor: Any, names: set[Name]) -> Iterator[tuple[Name, Kept]]:
    known = {
        hash_key("", "pay" if key.startswith("key") else "event", scope, key): (scope, key)
        for scope, key in names
    }
    cursor.execute("SELECT key, state, status, body FROM idempotency_record")
    for number, (key, state, status, body) in enumerate(cursor):
        name = known.get(bytes(key), ("of nobody", str(number)))
        told = 201 if status == 200 else status  # a result of run(): the webhook's view says 201
        yield name, _kept(told if state == "completed" else None, body)


def _in_redis(world: World, names: set[Name]) -> Iterator[tuple[Name, Kept]]:
    client = world.redis_client()
    try:
        for scope, key in names:
            value: Any = client.get(f"answer:{scope}:{key}")
            if value and value != b"running":
                status, answer = json.loads(value)
                yield (scope, key), _kept(status, answer)
    finally:
        client.close()
