"""Time in turns: absolute times mean little on a shared machine, ratios within one run do.

A path and its base run one after the other, A B A B …, so that what slows the machine slows both.
Processor time is that of the thread that sends the request: client and application, without the
servers. It hardly changes when other programs want the processor, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .calls import no_collection
from .paths import Send
from .report import Figure

WARM_UP = 50


@dataclass(frozen=True)
class Turns:
    """Seconds of a path and of its base, in the order of the rounds."""

    path: list[float] = field(default_factory=list)
    base: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> Figure:
        """The median of the rounds' ratios."""
        ratios = sorted(a / b for a, b in zip(self.path, self.base, strict=True))
        middle, reach = len(ratios) / 2, len(ratios) ** 0.5  # of ranks; two standard deviations
        low, high = (
            ratios[max(int(middle - reach), 0)],
            ratios[min(int(middle + reach), len(ratios) - 1)],
        )
        return Figure(statistics.median(ratios), low, high)

    @property
    def p99_ratio(self) -> Figure:
        """The 99th percentile against that of the base."""
        path, base = (statistics.quantiles(times, n=100)[98] for times in (self.path, self.base))
        return Figure(path / base)

    @property
    def added(self) -> float:
        """Seconds that the path takes beyond its base: the median of the rounds."""
        return statistics.median(a - b for a, b in zip(self.path, self.base, strict=True))


def in_turns(send: Send, send_base: Send, rounds: int, warm_up: int = WARM_UP) -> tuple[Turns, Turns]:
    """Measure a path and its base in turns: by the clock, and in processor time."""
    elapsed, processor = Turns(), Turns()
    with no_collection():
        for number in range(-warm_up, rounds):
            path, base = spent(send), spent(send_base)
            if number >= 0:
                for turns, a, b in zip((elapsed, processor), path, base, strict=True):
                    turns.path.append(a)
                    turns.base.append(b)
    return elapsed, processor


def spent(function: Callable[[], object]) -> tuple[float, float]:
    """Seconds that a call takes, and seconds of processor time."""
    elapsed, processor = time.perf_counter(), time.thread_time()
    function()
    return time.perf_counter() - elapsed, time.thread_time() - processor
