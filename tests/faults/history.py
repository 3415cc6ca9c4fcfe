"""What happened in a run, written down line by line by clients, workers and nemesis; and what is there.

Every line is one JSON object in one ``write`` to a file opened for appending, so processes need no
lock among each other, and what a process wrote before a SIGKILL is there. Times are seconds of
``time.monotonic()``, one clock for all processes of the machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg2

from flask_idempotency.core.keys import hash_key

Name = tuple[str, str]
"""Scope and key: what names an operation."""


@dataclass(frozen=True)
class Request:
    """One request of a client. ``status`` is None if no whole answer came."""

    scope: str
    key: str
    body: int
    at: float
    returned: float = float("inf")
    status: int | None = None
    answer: str = ""
    execution: str = ""
    replayed: bool = False

    @property
    def is_final(self) -> bool:
        """Whether the answer is one that is kept: what the view said, once and for all."""
        return self.status in (201, 402)

    @property
    def is_definite(self) -> bool:
        """Whether a client has no reason to ask again."""
        return self.is_final or self.status == 422


@dataclass(frozen=True)
class Run:
    """A view that began."""

    scope: str
    key: str
    body: int
    attempt: int
    execution: str
    at: float


@dataclass(frozen=True)
class Death:
    """A worker that killed itself at a point of a request's way."""

    point: str
    scope: str
    key: str
    at: float


@dataclass(frozen=True)
class Fault:
    """What the nemesis did, from ``at`` to ``ended``."""

    kind: str
    at: float
    ended: float


@dataclass(frozen=True)
class Error:
    """An exception that nobody asked for, in a view or in the protection around it."""

    scope: str
    key: str
    text: str
    at: float


_KINDS: dict[str, type[Any]] = {
    each.__name__.lower(): each for each in (Request, Run, Death, Fault, Error)
}


@dataclass
class History:
    """All of a run, in order of time. ``healed``: faults stopped; ``ended``: no new operations."""

    requests: list[Request] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    errors: list[Error] = field(default_factory=list)
    healed: float = 0.0
    ended: float = 0.0

    def replay_seconds(self) -> float:
        """What a replay took after the faults had stopped: the pace of the machine."""
        took = [r.returned - r.at for r in self.requests if r.replayed and r.at >= self.healed]
        return statistics.median(took) if took else 0.0

    def any_fault(self, since: float, until: float, kinds: Iterable[str] = ()) -> bool:
        """Whether there was a fault (of one of these kinds) at any time between."""
        wanted = [fault for fault in self.faults if not kinds or fault.kind in kinds]
        return any(fault.at <= until and fault.ended >= since for fault in wanted)

    def any_trouble(self, since: float, until: float) -> bool:
        """Whether there was a fault or a death between."""
        deaths = any(since <= death.at <= until for death in self.deaths)
        return deaths or self.any_fault(since, until)


def by_name(events: Iterable[Any]) -> dict[Name, list[Any]]:
    """The requests, runs or rows of each operation."""
    found: dict[Name, list[Any]] = defaultdict(list)
    for each in events:
        found[each.scope, each.key].append(each)
    return found


class Journal:
    """The file that all processes append to."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, event: str, **facts: Any) -> None:
        facts.setdefault("at", time.monotonic())
        os.write(self._file, (json.dumps({"event": event, **facts}) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)


def load(path: Path) -> History:
    """Read a journal back, as far as its lines are whole."""
    history = History()
    for line in path.read_text().rpartition("\n")[0].splitlines():
        facts = json.loads(line)
        event = facts.pop("event")
        if event in ("healed", "ended"):
            setattr(history, event, facts["at"])
        else:
            getattr(history, f"{event}s").append(_KINDS[event](**facts))
    for events in (history.requests, history.runs, history.deaths, history.faults):
        events.sort(key=lambda each: each.at)
    return history


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
    """What the database holds when all is over; and how many transactions were left open."""

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
    known = {hash_key("", endpoint_of(name[1]), *name): name for name in by_name(history.requests)}
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
            told = 201 if status == 200 else status  # a result of run(): the view around it says 201
            kept = Kept(True, told, digest(bytes(body or b""))) if state == "completed" else Kept(False)
            truth.records[known.get(bytes(key), ("of nobody", str(number)))] = kept
    return truth
