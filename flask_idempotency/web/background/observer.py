"""The records, asked about requests that are only observed: briefly, on few connections, or not at all.

The request waits in front of its view. So each question is asked in a thread of its own, which the
request leaves behind when it has waited long enough: that holds for a silent host, a full pool, a slow
disk and whatever else may hang, in any store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from flask import Flask

from flask_idempotency.core.engine import Claimed, Decision, Engine
from flask_idempotency.core.errors import (
    KeyExpired,
    LeaseLost,
    RecordBroken,
    SealBroken,
    StoreUnavailable,
)
from flask_idempotency.core.ports import Clock
from flask_idempotency.core.records import Claim, Record

from .threads import aside, reply

T = TypeVar("T")

CONNECTIONS = 4
"""How many questions a process asks at once, each on one connection. Each takes a millisecond or two,
so four serve some thousand requests a second; more would be felt by a database near its
``max_connections``."""

PATIENCE_SECONDS = 0.5
"""How long a request waits at most, twice: before its view and after it. Enough for a new connection
with TLS in front of a question, and no delay that a client would take for an outage."""

PAUSE_SECONDS = 10.0
"""How long the records are left alone after a failure, or until a reply comes after all. After each
pause one request tries them."""

OF_THE_RECORD = (KeyExpired, LeaseLost, RecordBroken, SealBroken)
"""Errors about one record. The others are about the store."""


class Observer:
    """Asks ``engine`` for requests that must not notice it."""

    def __init__(self, app: Flask, engine: Engine, clock: Clock) -> None:
        self._app, self._engine, self._clock = app, engine, clock
        self._connections = threading.BoundedSemaphore(CONNECTIONS)
        self._failing = threading.Lock()
        self._paused_until: float | None = None

    def decide(self, claim: Claim, on_interrupted: object, found: Record | None) -> Decision | None:
        """Return the engine's decision; None while it is left alone. Raises whatever goes wrong."""
        decide = partial(self._engine.decide, claim, on_interrupted=on_interrupted, found=found)
        return self.ask(decide, _give_back)

    def ask(self, act: Callable[[], T], late: Callable[[T], object] | None = None) -> T | None:
        """Return what ``act`` returns; None while the store is left alone.

        Raises what it raises, and ``StoreUnavailable`` after :data:`PATIENCE_SECONDS`; then ``late``
        gets the result when it comes. Of the failures that begin a pause together, one is raised.
        """
        known = self._paused_until
        if known is not None:
            now = self._clock.monotonic()
            if now < known:
                return None
            # This request tries; the others go on without.
            self._paused_until = known = now + PAUSE_SECONDS
        deadline = self._clock.monotonic() + PATIENCE_SECONDS
        result: Future[T] | None = None
        try:
            result = self._within(act)
            found = reply(result, max(0.0, deadline - self._clock.monotonic()))
        except OF_THE_RECORD:
            raise
        except Exception:
            is_first = self._pause(known)
            if result is not None:
                result.add_done_callback(partial(self._recover, late))
            if is_first:
                raise
            return None
        self._paused_until = None
        return found

    def _pause(self, known: float | None) -> bool:
        """Leave the store alone. False if another failure, after ``known``, has begun the pause."""
        with self._failing:
            is_first = self._paused_until in (None, known)
            if is_first:
                self._paused_until = self._clock.monotonic() + PAUSE_SECONDS
        return is_first

    def _recover(self, late: Callable[[T], object] | None, result: Future[T]) -> None:
        """The reply came, for nobody."""
        if result.exception() is None:
            self._paused_until = None
            if late is not None:
                aside(self._app, partial(late, result.result()))

    def _within(self, act: Callable[[], T]) -> Future[T]:
        """Return what ``act`` returns in a thread of its own, once a connection is free for it."""
        if not self._connections.acquire(timeout=PATIENCE_SECONDS):
            what = f"no connection became free in {PATIENCE_SECONDS} s"
            raise StoreUnavailable from TimeoutError(what)
        try:
            result = aside(self._app, act)
        except BaseException:
            self._connections.release()
            raise
        result.add_done_callback(lambda _: self._connections.release())
        return result


def _give_back(decision: Decision) -> None:
    """Release the claim of a request that did not wait for it: nobody would ever complete it."""
    if isinstance(decision, Claimed):
        decision.execution.release()
