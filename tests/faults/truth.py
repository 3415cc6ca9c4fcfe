"""What the database holds when all is over: the business rows, and the records by scope and key."""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import dataclass, field

import psycopg2

from flask_idempotency.core.keys import hash_key
from tests.faults.history import History, Name


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
    """Rows, records by name, and how many transactions were left open."""

    rows: list[Row] = field(default_factory=list)
    records: dict[Name, Kept] = field(default_factory=dict)
    left_open: int = 0


def digest(body: bytes) -> str:
    """The hash by which answers are compared."""
    return hashlib.sha256(body).hexdigest()[:16]


def endpoint_of(key: str) -> str:
    """The view of a key, which its record names, too."""
    return "payments" if key.startswith("key") else "events"


def read(dsn: str, history: History) -> Truth:
    """Read it all, once nobody works any more."""
    known = {
        hash_key("", endpoint_of(key), scope, key): (scope, key) for scope, key in history.by_name()
    }
    truth = Truth()
    with closing(psycopg2.connect(dsn)) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT scope, key, body, execution FROM payment ORDER BY id")
        truth.rows = [Row(*row) for row in cursor]
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%'"
        )
        ((truth.left_open,),) = cursor.fetchall()
        cursor.execute("SELECT key, state, status, body FROM idempotency_record")
        for number, (key, state, status, body) in enumerate(cursor):
            name = known.get(bytes(key), ("of nobody", str(number)))
            told = 201 if status == 200 else status  # a result of run(): the view around it says 201
            completed = state == "completed"
            truth.records[name] = Kept(
                completed, told if completed else None, digest(bytes(body or b"")) if completed else ""
            )
    return truth
