"""The ports of an application's engine with a watch on them, for as long as a test asks for it.

Nothing in the package knows of it: the records and the lock of ``app.extensions["idempotency"]`` are
replaced by others that pass everything on, and put back afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from flask_idempotency.core.engine import DecisionEngine
from flask_idempotency.core.ports import Glance, Hold
from flask_idempotency.core.records import Claim, Record, StoredResponse
from flask_idempotency.web.routes import AppState


class Watch:
    """Observes an operation. What it raises surfaces where the event happened."""

    def claimed(self, claim: Claim, attempt: int) -> None:
        """The operation is held, and its view has not begun."""

    def recording(self, claim: Claim) -> None:
        """A step has run, and its result is not recorded yet."""

    def completing(self, claim: Claim) -> None:
        """The view has returned, and nothing is committed yet."""

    def completed(self, claim: Claim) -> None:
        """The response is committed, and nobody has heard of it yet."""

    def releasing(self, claim: Claim, release: Callable[[], None]) -> None:  # noqa: ARG002
        """The lock is released without a response."""
        release()

    def glanced(self, claim: Claim, glance: Glance) -> Glance:  # noqa: ARG002
        """Hear what the lock says of a claim, and return it."""
        return glance


def ports(
    state: AppState, records: Any, lock: Any, engine_class: type[DecisionEngine] | None = None
) -> AbstractContextManager[object]:
    """Let an application use other records, another lock and, if given, another kind of engine."""
    make = engine_class or type(state.engine)
    engine = make(records, lock, state.sealer, time, state.engine.max_waiters)
    return patch.multiple(state, records=records, lock=lock, engine=engine)


def watched(state: AppState, watch: Watch) -> AbstractContextManager[object]:
    """Report to ``watch`` what happens in an application."""
    return ports(state, WatchedRecords(state.records, watch), WatchedLock(state.lock, watch))


class Watched:
    """A port of any store. It passes on what it does not watch."""

    def __init__(self, inner: Any, watch: Watch) -> None:
        self._inner, self._watch = inner, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class WatchedRecords(Watched):
    """Any store's records."""

    def claim(self, claim: Claim) -> WatchedHold | None:
        """See :class:`Records`."""
        return self._watched(self._inner.claim(claim), claim)

    def look_or_claim(self, claim: Claim) -> Record | WatchedHold | None:
        """See :class:`Records`. To be watched, the claim is made apart from the look."""
        record: Record | None = self._inner.look(claim.key)
        return record or self.claim(claim)

    def take_over(self, claim: Claim, as_seen: Record) -> WatchedHold | None:
        """See :class:`Records`."""
        return self._watched(self._inner.take_over(claim, as_seen), claim)

    def _watched(self, hold: Hold | None, claim: Claim) -> WatchedHold | None:
        if hold is None:
            return None
        try:
            self._watch.claimed(claim, hold.attempt)
        except BaseException:
            hold.abandon()
            raise
        return WatchedHold(hold, self._watch, claim)


class WatchedHold(Watched):
    """Any hold, or a step's transaction."""

    def __init__(self, inner: Any, watch: Watch, claim: Claim) -> None:
        super().__init__(inner, watch)
        self._claim = claim

    def complete(self, response: StoredResponse, **how: Any) -> None:
        """See :class:`Hold`."""
        self._watch.completing(self._claim)
        self._inner.complete(response, **how)
        self._watch.completed(self._claim)

    def record(self, step: str, result: bytes) -> None:
        """See :class:`Lease` and :class:`Step`."""
        self._watch.recording(self._claim)
        self._inner.record(step, result)

    def open_step(self, connection: Any = None) -> WatchedHold:
        """See :class:`Lease`."""
        return WatchedHold(self._inner.open_step(connection), self._watch, self._claim)


class WatchedLock(Watched):
    """Any lock."""

    def acquire(self, claim: Claim) -> Glance:
        """See :class:`Lock`."""
        return self._watch.glanced(claim, self._inner.acquire(claim))

    def release(self, claim: Claim) -> None:
        """See :class:`Lock`."""
        self._watch.releasing(claim, lambda: self._inner.release(claim))
