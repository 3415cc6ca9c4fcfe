"""The last hour as bars of one minute each, and as the table that says the same."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from flask_idempotency.stores.counts import Count

MINUTES = 60

OUTCOMES = {
    "executed": "the view ran and its response was stored",
    "replayed": "a retry got the stored response",
    "rejected": "a duplicate, a changed request or another problem; the metrics count each problem",
    "rolled_back": "the view ran and nothing of it was committed",
    "released": "the view ran and let its operation be tried again",
    "interrupted": "the operation waits for an operator",
    "unprotected": "the view ran without protection",
    "observed": "the view ran; what protection would have done is not known",
    "would execute": "observed: the view ran, and would have",
    "would replay": "observed: the view ran again; a retry would have got the stored response",
    "would reject": "observed: the view ran; the request would have been rejected",
    "would roll back": "observed: the view ran; nothing of it would have been committed",
    "would release": "observed: the view ran; its operation could have been tried again",
    "would interrupt": "observed: the view ran; its operation would wait for an operator",
}
"""From the bottom of a bar to its top."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A part of a minute's bar: ``minute`` is 0 on the left, ``top`` and ``height`` are in percent."""

    minute: int
    outcome: str
    top: float
    height: float


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table: how many requests, and of each outcome."""

    name: str
    total: int
    outcomes: Counter[str]


class Hour:
    """The counts of an hour, whose ages are in minutes."""

    def __init__(self, counts: Iterable[Count]) -> None:
        self.outcomes: Counter[str] = Counter()
        self._minutes: dict[int, Counter[str]] = defaultdict(Counter)
        self._operations: dict[str, Counter[str]] = defaultdict(Counter)
        for each in counts:
            minute = MINUTES - 1 - min(max(each.age, 0), MINUTES - 1)
            self.outcomes[each.outcome] += each.count
            self._minutes[minute][each.outcome] += each.count
            self._operations[each.operation][each.outcome] += each.count
        self.total = self.outcomes.total()
        self.most = max((minute.total() for minute in self._minutes.values()), default=0)

    @property
    def shown(self) -> list[str]:
        """The outcomes there were, in the order of the bars."""
        known = [outcome for outcome in OUTCOMES if self.outcomes[outcome]]
        return [*known, *sorted(self.outcomes.keys() - OUTCOMES.keys())]

    def share(self, outcome: str) -> str:
        """Of all requests, in percent. What there is at all is never 0."""
        percent = 100 * self.outcomes[outcome] / self.total
        return f"{percent:.1f} %" if percent >= 0.05 else "< 0.1 %"

    @property
    def bars(self) -> list[Bar]:
        """The parts of all bars."""
        found = []
        for minute, outcomes in sorted(self._minutes.items()):
            top = 100.0
            for outcome in self.shown:
                if count := outcomes[outcome]:
                    height = 100 * count / self.most
                    top -= height
                    found.append(Bar(minute, outcome, round(top, 2), round(height, 2)))
        return found

    @property
    def operations(self) -> list[Row]:
        """The operations, the busiest first."""
        rows = [Row(name, each.total(), each) for name, each in self._operations.items()]
        return sorted(rows, key=lambda row: (-row.total, row.name))
