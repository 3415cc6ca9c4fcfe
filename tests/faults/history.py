"""What happened in a run, written down line by line as it happens, by clients, workers and nemesis.

Every line is one JSON object in one ``write`` to a file opened for appending, so processes need no
lock among each other, and what a process wrote before a SIGKILL is there. Times are seconds of
``time.monotonic()``, one clock for all processes of the machine.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

Name = tuple[str, str]
"""Scope and key: what names an operation."""


@dataclass(frozen=True)
class Request:
    """One request of a client. ``status`` is None if no whole answer came."""

    id: int
    scope: str
    key: str
    body: int
    at: float
    fault: str = ""
    returned: float = float("inf")
    status: int | None = None
    answer: str = ""
    execution: str = ""
    replayed: bool = False

    @property
    def name(self) -> Name:
        return self.scope, self.key

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
    """A view that began. ``attempt`` is 0 where the design counts none."""

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
class Miss:
    """A worker's call to Redis that failed; it then leaves Redis alone for a while."""

    at: float


@dataclass(frozen=True)
class Child:
    """A child process of a view that has committed a row of its own."""

    scope: str
    key: str
    execution: str
    at: float


@dataclass(frozen=True)
class Error:
    """An exception that nobody asked for, in a view or in the protection around it."""

    scope: str
    key: str
    text: str
    at: float


@dataclass
class History:
    """All of a run, in order of time. ``healed``: faults stopped; ``ended``: no new operations."""

    requests: list[Request] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    errors: list[Error] = field(default_factory=list)
    children: list[Child] = field(default_factory=list)
    healed: float = 0.0
    ended: float = 0.0

    def by_name(self) -> dict[Name, list[Request]]:
        """The requests of each operation."""
        found: dict[Name, list[Request]] = defaultdict(list)
        for request in self.requests:
            found[request.name].append(request)
        return found

    def replay_seconds(self) -> float:
        """What a replay took after the faults had stopped: the pace of the machine."""
        took = [r.returned - r.at for r in self.requests if r.replayed and r.at >= self.healed]
        return statistics.median(took) if took else 0.0

    def any_fault(self, kinds: Iterable[str], since: float, until: float) -> bool:
        """Whether a fault of one of these kinds was there at any time between."""
        wanted = set(kinds)
        return any(f.kind in wanted and f.at <= until and f.ended >= since for f in self.faults)


class Journal:
    """The file that all processes append to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, event: str, **facts: Any) -> float:
        """Append one event; returns its time."""
        facts.setdefault("at", time.monotonic())
        os.write(self._file, (json.dumps({"event": event, **facts}) + "\n").encode())
        return float(facts["at"])

    def close(self) -> None:
        os.close(self._file)


_KINDS: dict[str, tuple[type[Any], str]] = {
    "run": (Run, "runs"),
    "death": (Death, "deaths"),
    "fault": (Fault, "faults"),
    "miss": (Miss, "misses"),
    "error": (Error, "errors"),
    "child": (Child, "children"),
}


def load(path: Path) -> History:
    """Read a journal back, as far as its lines are whole."""
    history = History()
    asked: dict[int, dict[str, Any]] = {}
    for line in path.read_text().rpartition("\n")[0].splitlines():
        facts = json.loads(line)
        event = facts.pop("event")
        if event == "invoke":
            asked[facts["id"]] = facts
        elif event == "return":
            asked[facts["id"]].update(facts, at=asked[facts["id"]]["at"], returned=facts["at"])
        elif event in ("healed", "ended"):
            setattr(history, event, facts["at"])
        else:
            kind, place = _KINDS[event]
            known = {each.name for each in fields(kind)}
            getattr(history, place).append(kind(**{k: v for k, v in facts.items() if k in known}))
    history.requests = [Request(**facts) for facts in asked.values()]
    for events in (history.requests, history.runs, history.deaths, history.faults):
        events.sort(key=lambda each: each.at)
    return history
