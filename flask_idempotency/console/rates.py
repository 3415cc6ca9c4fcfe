"""What became of the requests of the last hour.

The receiver of the signals only counts. A timer writes the counts of this process into a table that
all processes share; it runs only while there is something to write.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from flask import Flask

from flask_idempotency.stores.counts import Count, Counts, CountsUnavailable
from flask_idempotency.web.signals import Event

log = logging.getLogger("flask_idempotency")

EVERY_SECONDS = 10
"""How often a process writes. One that is killed loses so much; more often is more transactions."""

HOUR_SECONDS = 3600

_WOULD = {
    "executed": "would execute",
    "replayed": "would replay",
    "rejected": "would reject",
    "rolled_back": "would roll back",
    "released": "would release",
    "interrupted": "would interrupt",
}
"""What an observed request is counted as, by what protection would have done with it."""

Timer = Callable[[float, Callable[[], None]], Any]


class Rates:
    """The outcomes of requests to one application.

    ``counts`` is the table, or None if the records are in none: then each process knows its own
    requests only. ``now`` gives seconds that never go back, ``timer`` is a ``threading.Timer``.
    """

    def __init__(
        self,
        counts: Counts | None,
        now: Callable[[], float] = time.monotonic,
        timer: Timer = threading.Timer,
    ) -> None:
        self._counts, self._now, self._timer = counts, now, timer
        self.begin()
        _all.add(self)

    @property
    def is_shared(self) -> bool:
        """Whether all processes are counted."""
        return self._counts is not None

    def begin(self) -> None:
        """Count from nothing, as in a new process: what its parent counted, that writes itself."""
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._seen: Counter[tuple[int, str, str]] = Counter()
        self._is_timed = self._is_failing = False

    def note(self, _app: Flask, event: Event) -> None:
        """Count the outcome of a request."""
        if event.outcome is None:
            return
        slot = int(self._now()) // EVERY_SECONDS
        outcome = _WOULD.get(event.would or "", event.outcome)
        with self._lock:
            self._seen[slot, event.operation, outcome] += 1
            if not self._is_timed:
                timer = self._timer(EVERY_SECONDS, self.tick)
                timer.daemon = True
                timer.start()
                self._is_timed = True

    def tick(self) -> None:
        """Write what was counted, or say in the log why not: once, until it works again."""
        with self._lock:
            self._is_timed = False
        try:
            self.flush()
        except CountsUnavailable as error:
            if not self._is_failing:
                log.warning("the console's counts cannot be written: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False

    def flush(self) -> None:
        """Write what was counted. Raises :class:`CountsUnavailable`; then it is kept for an hour."""
        with self._writing:  # whoever reads afterwards misses nothing that a timer was just writing
            with self._lock:
                seen, self._seen = self._seen, Counter()
            try:
                if self._counts is not None and seen:
                    self._counts.add(self._aged(seen))
                    seen = Counter()
            finally:
                with self._lock:
                    self._seen += self._recent(seen)

    def last_hour(self) -> list[Count]:
        """The counts, whose ages are in minutes. Raises :class:`CountsUnavailable`."""
        self.flush()
        if self._counts is not None:
            return self._counts.last_hour()
        with self._lock:
            mine = self._aged(self._seen)
        return [replace(each, age=each.age // 60) for each in mine if each.age < HOUR_SECONDS]

    def _aged(self, seen: Counter[tuple[int, str, str]]) -> list[Count]:
        now = int(self._now())
        return [
            Count(now - slot * EVERY_SECONDS, operation, outcome, count)
            for (slot, operation, outcome), count in seen.items()
        ]

    def _recent(self, seen: Counter[tuple[int, str, str]]) -> Counter[tuple[int, str, str]]:
        oldest = (self._now() - HOUR_SECONDS) / EVERY_SECONDS
        return Counter({where: count for where, count in seen.items() if where[0] > oldest})


_all: WeakSet[Rates] = WeakSet()


def _begin_all() -> None:
    for rates in [*_all]:
        rates.begin()


@atexit.register
def _flush_all() -> None:
    for rates in [*_all]:
        rates.tick()


os.register_at_fork(after_in_child=_begin_all)
