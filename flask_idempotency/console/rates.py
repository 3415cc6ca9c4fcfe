"""What became of the requests of the last hour.

The receiver of the signals only counts. A thread writes the counts of this process into a table that
all processes share; it is there only while there is something to write.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from weakref import WeakSet

from flask import Flask

from flask_idempotency.core.logs import log
from flask_idempotency.stores.admin import reason
from flask_idempotency.stores.counts import Count, Counts, CountsUnavailable
from flask_idempotency.web.background.threads import Worker, aside, in_context, reply
from flask_idempotency.web.signals import Event

EVERY_SECONDS = 10
"""How often a process writes. One that is killed loses so much; more often is more transactions."""

HOUR_SECONDS = 3600

PATIENCE_SECONDS = 3.0
"""How long the page waits for the counts, and the end of the process for the last of them. A statement
gives up before that; a host may be silent."""

_WOULD = {
    "executed": "would execute",
    "replayed": "would replay",
    "rejected": "would reject",
    "rolled_back": "would roll back",
    "released": "would release",
    "interrupted": "would interrupt",
}
"""What an observed request is counted as, by what protection would have done with it."""


class Rates(Worker):
    """The outcomes of requests to one application.

    ``counts`` is the table, or None if the records are in none: then each process knows its own
    requests only. ``now`` gives seconds that never go back.
    """

    def __init__(
        self, app: Flask, counts: Counts | None, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__("idempotency-counts")
        self._app, self._counts, self._now = app, counts, now
        _all.add(self)

    @property
    def is_shared(self) -> bool:
        """True if all processes are counted."""
        return self._counts is not None

    def begin_anew(self) -> None:
        """See :class:`Worker`: the parent writes what it has counted."""
        super().begin_anew()
        self._seen: Counter[tuple[int, str, str]] = Counter()
        self._is_failing = False
        self._asked: Future[list[Count]] | None = None
        self._writing: threading.Lock | None = None

    def note(self, _app: Flask, event: Event) -> None:
        """Count the outcome of a request."""
        if event.outcome is None:
            return
        slot = int(self._now()) // EVERY_SECONDS
        outcome = _WOULD.get(event.would or "", event.outcome)
        with self.lock:
            self._seen[slot, event.operation, outcome] += 1
            has_thread = self._thread is not None
        if not has_thread:
            self.begin()

    def has_work(self) -> bool:
        """See :class:`Worker`."""
        return bool(self._seen)

    def turn(self) -> None:
        """Write what was counted meanwhile."""
        self.rest(EVERY_SECONDS)
        self.tick()

    def tick(self) -> None:
        """Write what was counted, or say in the log why not: once, until it works again."""
        try:
            in_context(self._app, self.flush)
        except Exception as error:  # also a listener's
            was_failing, self._is_failing = self._is_failing, True
            if not was_failing:
                log.warning("the console's counts cannot be written: %s", reason(error))
        else:
            self._is_failing = False

    def flush(self) -> None:
        """Write what was counted. Raises :class:`CountsUnavailable`; then it is kept for an hour."""
        with self.lock:  # made now: by now gevent has replaced what waits
            writing = self._writing = self._writing or threading.Lock()
        with writing:  # whoever reads afterwards misses nothing that the thread was just writing
            with self.lock:
                seen, self._seen = self._seen, Counter()
            try:
                if self._counts is not None and seen:
                    self._counts.add(self._aged(seen))
                    seen = Counter()
            finally:
                with self.lock:
                    self._seen += self._recent(seen)

    def last_hour(self) -> list[Count]:
        """Return the counts, whose ages are in minutes. Raises :class:`CountsUnavailable`, soon.

        What hangs is not asked again before it has ended.
        """
        if self._counts is None:
            with self.lock:
                mine = self._aged(self._seen)
            return [replace(each, age=each.age // 60) for each in mine if each.age < HOUR_SECONDS]
        if self._asked is None or self._asked.done():
            self._asked = aside(self._app, partial(self._ask, self._counts))
        try:
            return reply(self._asked, PATIENCE_SECONDS)
        except CountsUnavailable:
            raise
        except Exception as error:  # also a listener's
            raise CountsUnavailable(reason(error)) from error

    def _ask(self, counts: Counts) -> list[Count]:
        self.flush()
        return counts.last_hour()

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


@atexit.register
def _end_all() -> None:
    ending = [*_all]
    for rates in ending:
        rates.end(0)
    deadline = time.monotonic() + PATIENCE_SECONDS
    for rates in ending:
        rates.end(max(0.0, deadline - time.monotonic()))
