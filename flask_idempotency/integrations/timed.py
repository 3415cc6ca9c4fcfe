"""The ports of an engine, timed. Whoever measures puts them in front of an application's own.

``seconds(part, verb)`` gives the function that is told how long a call of that verb took; ``part`` is
``"lock"`` or ``"records"``. What is not timed is passed on as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, Protocol, TypeVar

from flask_idempotency.core.ports import Hold, Lock, Records
from flask_idempotency.core.records import Claim, Record, StoredResponse

T = TypeVar("T")

Observe = Callable[[float], object]
Seconds = Callable[[str, str], Observe]

_VERBS = {"acquire", "release", "look", "wait", "extend", "steps", "record"}
_CLAIMS = ("claim", "take_over", "look_or_claim")


class Gauge(Protocol):
    """A number that goes up and down."""

    def inc(self) -> None:
        """Add one."""

    def dec(self) -> None:
        """Take one away."""


def _timed(observe: Observe, function: Callable[..., T], *args: Any) -> T:
    began = perf_counter()
    try:
        return function(*args)
    finally:
        observe(perf_counter() - began)


class Timed:
    """A port, or a hold, whose verbs are timed."""

    def __init__(self, port: Any, part: str, seconds: Seconds) -> None:
        self._port, self._part, self._seconds = port, part, seconds

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._port, name)
        if name in _VERBS:
            found = self.__dict__[name] = partial(_timed, self._seconds(self._part, name), found)
        return found


class TimedLock(Timed):
    """A lock. Of ``finish`` its sending and the wait for its reply count, not the time between."""

    def __init__(self, lock: Lock, seconds: Seconds) -> None:
        super().__init__(lock, "lock", seconds)
        self._finished = seconds("lock", "finish")

    def finish(self, claim: Claim) -> Callable[[], object]:
        """See :class:`~flask_idempotency.core.ports.Lock`."""
        began = perf_counter()
        wait = self._port.finish(claim)
        sent = perf_counter() - began

        def told() -> None:
            began = perf_counter()
            wait()
            self._finished(sent + perf_counter() - began)

        return told


class TimedRecords(Timed):
    """Any store's records. ``in_progress(operation)`` counts the holds that are open."""

    def __init__(self, records: Records, seconds: Seconds, in_progress: Callable[[str], Gauge]) -> None:
        super().__init__(records, "records", seconds)
        self._in_progress = in_progress
        for verb in _CLAIMS:
            if hasattr(records, verb):
                setattr(
                    self, verb, partial(self._claim, getattr(records, verb), seconds("records", verb))
                )

    def _claim(self, verb: Callable[..., Any], observe: Observe, claim: Claim, *as_seen: Record) -> Any:
        found = _timed(observe, verb, claim, *as_seen)
        if found is None or isinstance(found, Record):
            return found
        return TimedHold(found, self._seconds, self._in_progress(claim.name))


class TimedHold(Timed):
    """Any hold. It is in progress until it has ended, however it ends."""

    def __init__(self, hold: Hold, seconds: Seconds, in_progress: Gauge) -> None:
        super().__init__(hold, "records", seconds)
        self._in_progress, self._is_over = in_progress, False
        in_progress.inc()

    def complete(self, response: StoredResponse, **how: bool) -> None:
        """See :class:`~flask_idempotency.core.ports.Hold`."""
        _timed(self._seconds("records", "complete"), partial(self._port.complete, **how), response)
        self._end()

    def release(self) -> None:
        """See :class:`~flask_idempotency.core.ports.Lease`."""
        _timed(self._seconds("records", "release"), self._port.release)
        self._end()

    def abandon(self) -> None:
        """See :class:`~flask_idempotency.core.ports.Hold`. What has ended has nothing to be timed."""
        if self._is_over:
            self._port.abandon()
            return
        try:
            _timed(self._seconds("records", "abandon"), self._port.abandon)
        finally:
            self._end()

    def open_step(self) -> Timed:
        """See :class:`~flask_idempotency.core.ports.Lease`."""
        step = _timed(self._seconds("records", "open_step"), self._port.open_step)
        return Timed(step, "records", self._seconds)

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._in_progress.dec()
