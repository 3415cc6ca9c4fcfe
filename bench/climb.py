"""The highest rate that a server sustains: one step more for as long as it does.

Several climb together, a step of one after a step of another, so that what slows the machine slows all.
Each climbs several times: the turns differ by what the machine does besides.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .load import Clients, Replies, arrivals, percentile
from .report import Figure

MOST_P99 = 100.0
"""Milliseconds. Replies of a server that cannot keep up are soon later than that."""

RISE = 1.08
"""From a rate to the next. What a server is offered in excess must delay replies within one step."""

BURST = 200
"""Requests at once, for a first idea of the rate."""

FEWEST = 100
"""Requests of a step: of fewer nobody knows the 99th percentile."""

PERCENTILES = (50, 99, 99.9)


@dataclass
class Climber:
    """One kind of requests to one server, and what was measured of them.

    Attributes:
        name: what tells it from others, for the tables.
        port: the server's.
        path: the view's.
        keys: the keys that are used in turn; ``None`` for a new one each time.
        reply: what kind of reply every request must get.
        keep_alive: whether a connection serves several requests.
        highest: the highest rates, one by turn.
        steps: all steps.
    """

    name: dict[str, str]
    port: int
    path: str
    keys: list[str] | None = None
    reply: str = "201"
    keep_alive: bool = True
    highest: list[float] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    _at_half: list[float] = field(default_factory=list)

    def send(self, clients: Clients, due: list[float]) -> Replies:
        """Send a request at each of these seconds."""
        return clients.send(self.port, self.path, due, keys=self.keys, keep_alive=self.keep_alive)

    def turn(self, clients: Clients, seconds: float) -> Iterator[None]:
        """Find the highest rate, then take the times at half of it; paused after each step."""
        rate = self.highest[-1] / RISE if self.highest else self._first_idea(clients) / RISE**3
        while not self._sustains(rate, clients, seconds):
            rate /= RISE**2
            if rate < 1:
                raise RuntimeError(f"{self.name} sustains no rate: {self.steps[-1]}")
            yield
        # Twice, because for a moment something else may have needed the machine.
        while any(self._sustains(rate * RISE, clients, seconds) for _ in range(2)):
            rate *= RISE
            yield
        self.highest.append(rate)
        self._at_half += self._step(rate / 2, clients, seconds).milliseconds
        yield

    def _first_idea(self, clients: Clients) -> float:
        self.send(clients, [0.0] * BURST)
        return self.send(clients, [0.0] * BURST).per_second

    def _sustains(self, rate: float, clients: Clients, seconds: float) -> bool:
        replies = self._step(rate, clients, seconds)
        return set(replies.kinds) == {self.reply} and replies.percentile(99) <= MOST_P99

    def _step(self, rate: float, clients: Clients, seconds: float) -> Replies:
        due = arrivals(rate, max(seconds, FEWEST / rate), seed=len(self.steps))
        replies = self.send(clients, due)
        self.steps.append({
            "turn": len(self.highest),
            "offered": rate,
            "achieved": replies.per_second,
            **_percentiles(replies.milliseconds),
            "late": replies.late,
            "kinds": replies.kinds,
        })  # fmt: skip
        return replies

    @property
    def at_half(self) -> dict[str, float]:
        """Milliseconds by percentile at half of the highest rate, of all turns."""
        return _percentiles(self._at_half)

    @property
    def figure(self) -> Figure:
        """Requests a second."""
        return _spread(self.highest)

    def against(self, base: Climber) -> Figure:
        """The ratio of the rates, turn by turn."""
        return _spread([a / b for a, b in zip(self.highest, base.highest, strict=True)])

    def data(self) -> dict[str, Any]:
        """All of it, for a plot."""
        return {**self.name, "highest": self.highest, "at_half": self.at_half, "steps": self.steps}


def climb(climbers: Iterable[Climber], clients: Clients, turns: int, seconds: float) -> None:
    """All climb so many turns, with steps of so many seconds."""
    climbers = list(climbers)
    for _ in range(turns):
        going = [each.turn(clients, seconds) for each in climbers]
        while going:
            going = [each for each in going if next(each, going) is not going]


def _spread(values: list[float]) -> Figure:
    # Of five turns the least and the greatest enclose the median with 94 % certainty.
    return Figure(statistics.median(values), min(values), max(values))


def _percentiles(milliseconds: list[float]) -> dict[str, float]:
    return {f"p{percent}": round(percentile(milliseconds, percent), 2) for percent in PERCENTILES}
