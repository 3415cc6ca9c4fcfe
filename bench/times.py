"""Time in turns: absolute times mean little on a shared machine, ratios within one run do.

A path and its base run one after the other, A B A B …, so that what slows the machine slows both. The
time that they, the servers and the proxies wait for a processor is taken off. Processor time is
that of the thread that sends the request: client and application, without the servers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .calls import no_collection
from .paths import Send
from .processors import Queue
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
        low = ratios[max(int(middle - reach), 0)]
        high = ratios[min(int(middle + reach), len(ratios) - 1)]
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


def in_turns(
    send: Send,
    send_base: Send,
    rounds: int,
    pids: Callable[[], Iterable[int]],
    warm_up: int = WARM_UP,
) -> tuple[Turns, Turns]:
    """Measure a path and its base in turns: by the clock, and in processor time.

    ``pids`` gives the processes that serve them, once they are warm.
    """
    elapsed, processor = Turns(), Turns()
    for _ in range(warm_up):
        send()
        send_base()
    with no_collection(), Queue(pids()) as queue:
        for _ in range(rounds):
            path, base = spent(send, queue), spent(send_base, queue)
            for turns, a, b in zip((elapsed, processor), path, base, strict=True):
                turns.path.append(a)
                turns.base.append(b)
    return elapsed, processor


def spent(function: Callable[[], object], queue: Queue) -> tuple[float, float]:
    """Seconds that a call takes, without those in the queue; and seconds of processor time."""
    waited, processor, elapsed = queue.seconds(), time.thread_time(), time.perf_counter()
    function()
    elapsed, processor = time.perf_counter() - elapsed, time.thread_time() - processor
    waited = queue.seconds() - waited
    # Two may have waited at the same time: but no call is shorter than what this thread did in it.
    return max(elapsed - waited, processor), processor
