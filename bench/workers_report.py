"""What was measured under gunicorn, as tables and as data for a plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from .budgets import RATES
from .climb import Climber


@dataclass(frozen=True)
class Storm:
    """A burst of requests with one key; without the extension the key means nothing.

    Attributes:
        workers: their kind.
        server: the application.
        kinds: how many got which reply.
        payments: how many were made.
        milliseconds: until the last reply.
    """

    workers: str
    server: str
    kinds: dict[str, int]
    payments: int
    milliseconds: float


@dataclass(frozen=True)
class Pool:
    """First requests with a pool of some size.

    ``connects`` is how often 1,000 requests connected to PostgreSQL.
    """

    climber: Climber
    connects: float


@dataclass(frozen=True)
class Connections:
    """What a burst of first requests opened to PostgreSQL, with room in the pools for all of it.

    ``slots`` is how many requests the workers serve at once.
    """

    workers: str
    server: str
    slots: int
    opened: int


@dataclass
class Measured:
    """By one run."""

    climbers: list[Climber] = field(default_factory=list)
    storms: list[Storm] = field(default_factory=list)
    pools: list[Pool] = field(default_factory=list)
    connections: list[Connections] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """The tables, and the notes below them."""
        tables = (
            _table(
                "workers, request, server, requests a second, × base, goal, verdict,"
                " p50 at half of it, p99, p99.9",
                self._rates(),
            ),
            _table(
                "workers, server, payments, most common replies, last reply after (ms)", self._storms()
            ),
            _table(
                "workers, pool, connects by 1000 requests, requests a second, × the first pool,"
                " p50 at half of it, p99, p99.9",
                self._pools(),
            ),
            _table(
                "workers, server, requests served at once, connections",
                (vars(each).values() for each in self.connections),
            ),
            "\n".join(f"- {note}" for note in self.notes),
        )
        return "\n\n".join(filter(None, tables))

    def data(self) -> dict[str, Any]:
        """Everything, with each step: what was offered, what was achieved, and how long it took."""
        return {
            "rates": [each.data() for each in self.climbers],
            "storms": [asdict(each) for each in self.storms],
            "pools": [each.climber.data() | {"connects": each.connects} for each in self.pools],
            "connections": [asdict(each) for each in self.connections],
            "notes": self.notes,
        }

    def _rates(self) -> Iterator[list[object]]:
        for _, group in groupby(
            self.climbers, lambda each: (each.name["workers"], each.name["request"])
        ):
            base, *others = group
            yield [*base.name.values(), base.figure, "–", "–", "–", *base.at_half.values()]
            for each in others:
                ratio, goal = each.against(base), RATES[each.name["request"]]
                row = [*each.name.values(), each.figure, ratio, goal, ratio.reaches(goal)]
                yield [*row, *each.at_half.values()]

    def _storms(self) -> Iterator[list[object]]:
        def name(storm: Storm) -> tuple[str, str]:
            return storm.workers, storm.server

        for _, group in groupby(sorted(self.storms, key=name), name):
            storms = list(group)
            made = sorted({storm.payments for storm in storms})
            kinds = sorted({kind for storm in storms for kind in storm.kinds})
            replies = {k: statistics.median(storm.kinds.get(k, 0) for storm in storms) for k in kinds}
            yield [
                *name(storms[0]),
                " or ".join(map(str, made)),
                ", ".join(f"{count:g} × {kind}" for kind, count in replies.items()),
                statistics.median(storm.milliseconds for storm in storms),
            ]

    def _pools(self) -> Iterator[list[object]]:
        for _, group in groupby(self.pools, lambda each: each.climber.name["workers"]):
            pools = list(group)
            for each in pools:
                climber, ratio = each.climber, each.climber.against(pools[0].climber)
                measured = [each.connects, climber.figure, ratio, *climber.at_half.values()]
                yield [*climber.name.values(), *measured]


def _table(columns: str, rows: Iterable[Iterable[object]]) -> str:
    lines = [_row(row) for row in rows]
    names = columns.split(", ")
    return "\n".join([_row(names), "|---" * len(names) + "|", *lines]) if lines else ""


def _row(cells: Iterable[object]) -> str:
    shown = (f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells)
    return f"| {' | '.join(shown)} |"
