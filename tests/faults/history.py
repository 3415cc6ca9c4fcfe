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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

    def any_fault(self, since: float, until: float, kinds: Iterable[str] = ()) -> bool:
        """Whether there was a fault (of one of these kinds) at any time between."""
        wanted = [fault for fault in self.faults if not kinds or fault.kind in kinds]
        return any(fault.at <= until and fault.ended >= since for fault in wanted)

    def any_trouble(self, since: float, until: float) -> bool:
        """Whether there was a fault or a death between."""
        deaths = any(since <= death.at <= until for death in self.deaths)
        return deaths or self.any_fault(since, until)


class Journal:
    """The file that all processes append to."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, event: str, **facts: Any) -> None:
        """Append one event."""
        facts.setdefault("at", time.monotonic())
        os.write(self._file, (json.dumps({"event": event, **facts}) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)


_KINDS: dict[str, type[Any]] = {
    "request": Request,
    "run": Run,
    "death": Death,
    "fault": Fault,
    "error": Error,
}


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
