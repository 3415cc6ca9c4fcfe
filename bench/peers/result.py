"""What was measured of each contender, as tables and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.times import Turns

from .crashes import EXPERIMENTS, Outcome
from .environments import SHARED
from .table import PACKAGES

BASE = {"first": "bare", "replay": "empty"}
"""The paths, and the unprotected view that each is compared with."""

HASTY = "first, without the disk"
"""As "first", on a server that flushes nothing."""

Versions = Mapping[str, Mapping[str, str]]
"""What is installed for each package."""


@dataclass
class Result:
    """What was measured of one contender; ``turns`` are without the waits for a processor."""

    package: str
    turns: dict[str, Turns] = field(default_factory=dict)
    clock: dict[str, Turns] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    trips: dict[str, list[int]] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    error: str | None = None

    def shown(self) -> list[str]:
        """The cells of its row: times with and without the disk, calls, round trips."""
        times = [
            str(self.turns[path].ratio) if path in self.turns else self.refused.get(path, "–")
            for path in ("first", HASTY, "replay")
        ]
        calls = (f"{self.calls[path]:,}" if path in self.calls else "–" for path in BASE)
        trips = ("{} + {}".format(*self.trips[path]) if path in self.trips else "–" for path in BASE)
        return [*times, ", ".join(calls), ", ".join(trips)]

    def data(self) -> dict[str, Any]:
        """All of it, as JSON takes it."""
        turns = {path: _summary(each) for path, each in self.turns.items()}
        clock = {path: _summary(each) for path, each in self.clock.items()}
        return {**asdict(self), "turns": turns, "clock": clock}


def _summary(turns: Turns) -> dict[str, Any]:
    return {
        "ratio": asdict(turns.ratio),
        "p99_ratio": turns.p99_ratio.value,
        "median_us": statistics.median(turns.path) * 1e6,
        "base_median_us": statistics.median(turns.base) * 1e6,
        "rounds": len(turns.path),
    }


def markdown(results: Mapping[str, Result], versions: Versions, notes: list[str]) -> str:
    """The figures, then what went wrong, then what is not promised."""
    counted = "calls added: first, replay | round trips added, PostgreSQL + Redis: first, replay"
    timed = "first request, × bare | without the disk, × bare | replay, × empty"
    lines = [f"| | {timed} | {counted} |", "|---|---:|---:|---:|---:|---:|"]
    for name, result in results.items():
        cells = [f"not measured: {result.error}", "", "", "", ""] if result.error else result.shown()
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"| payments made; what the client sees | {' | '.join(EXPERIMENTS)} |"]
    lines += ["|---" * (len(EXPERIMENTS) + 1) + "|"]
    for name, result in results.items():
        if result.outcomes:
            cells = [str(result.outcomes[what]) for what in EXPERIMENTS]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| package | what it does not promise |", "|---|---|"]
    for name in versions:
        if pinned := PACKAGES[name].requirements:
            lines.append(f"| {', '.join(pinned)} | {PACKAGES[name].unpromised} |")
    shared = [f"{name} {each}" for name, each in versions["ours"].items() if name.lower() in SHARED]
    bases = [_bases(results, path, base) for path, base in BASE.items()]
    notes = [f"in every environment: {', '.join(shared)}", *bases, *notes]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)])


def data(results: Mapping[str, Result], versions: Versions, notes: list[str]) -> dict[str, Any]:
    """All figures, as JSON takes them."""
    every = {name: result.data() for name, result in results.items()}
    return {"results": every, "versions": versions, "notes": notes}


def _bases(results: Mapping[str, Result], path: str, base: str) -> str:
    turns = [result.turns[path] for result in results.values() if path in result.turns]
    medians = [statistics.median(each.base) * 1e6 for each in turns]
    return f"{base}: {min(medians):,.0f} to {max(medians):,.0f} µs, by contender"
