"""One loop: ask the core what comes next, do it through the ports.

The engine knows no database, no Redis and no web framework. A request calls
:meth:`DecisionEngine.decide` and gets a decision. If that is an :class:`Execution`, it runs the
operation and ends that with ``complete``, ``release`` or ``abandon``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from . import process
from .errors import RecordBroken, StoreUnavailable
from .machine import Next, Situation, decide, runs_again, situation
from .ports import Glance, Hold, Lease, Lock, Records, Sealer
from .records import Claim, Record, State, StoredResponse

ROUNDS = 4
"""How often a record may vanish or appear between a look and a claim. Each round means that another
request's transaction or a purge ended just then, but for the first, in which a claim finds that it is
none of a new key; four in a row mean that something is wrong."""
POLL_SECONDS = 0.1
"""How often a waiting request looks at a *leased* record. There is no row lock to wait for, and poolers
drop notifications."""
MAX_WAITERS = 4
"""How many requests of a process wait at once, unless the pool is small. Each occupies a thread
and a connection; a gunicorn worker with eight threads can still serve others with half of them."""

SETTLE_SECONDS = 0.1
"""How long an atomic operation that is to be given up is left alone first. A claim locks its row a
moment after it has committed it, so an attempt that begins just now looks like one that has died."""


class _Patience:
    """How long one request may wait for another, if there is a place for it among the waiters."""

    def __init__(self, seconds: float, clock: Any, places: threading.Semaphore) -> None:
        self._clock, self._places, self._has_place = clock, places, False
        self._deadline = clock.monotonic() + seconds if seconds else -math.inf

    def left(self) -> float:
        """Seconds that the request may still wait; it has a place from then on."""
        left = self._deadline - self._clock.monotonic()
        if left > 0 and not self._has_place:
            self._has_place = self._places.acquire(blocking=False)
        return left if self._has_place else 0

    def spend(self, seconds: float, wait: Callable[[float], object]) -> None:
        """Let ``wait`` wait. On a clock that stands still, as tests stop it, the seconds count."""
        began = self._clock.monotonic()
        wait(seconds)
        if self._clock.monotonic() == began:
            self._deadline -= seconds

    def end(self) -> None:
        """Give the place up."""
        if self._has_place:
            self._has_place = False
            self._places.release()


class Execution:
    """One attempt at an operation, from its claim to its end: the operation is ours to run.

    It belongs to the process that made the claim, ``pid``. In a child forked since, what would end it
    raises ``LeaseLost``, and ``abandon`` does nothing.
    """

    def __init__(
        self, engine: DecisionEngine, hold: Hold, claim: Claim, mine: bool, found: Record | None
    ) -> None:
        self.hold, self.claim, self.pid = hold, claim, claim.pid
        self.took_over = found is not None and not found.expired
        self.was_interrupted = found is not None and situation(found) is Situation.INTERRUPTED
        self.was_released = found is not None and found.released is not None
        self._engine, self._mine = engine, mine

    def complete(self, response: StoredResponse, *, waits: bool = False) -> None:
        """Store the response and commit, durably, while the lock is told.

        ``waits``: see ``Lease.complete``. Errors: see ``Hold.complete``. After one, ``abandon``.
        """
        self.claim.refuse_in_child()
        sealed = self._engine.sealer.seal(response, self.claim)
        lock_is_told = self._engine.lock.finish(self.claim)
        # If this fails, the lock sends retries to the records for nothing, which costs them a look.
        try:
            self.hold.complete(sealed, **({"waits": True} if waits else {}))
            self._mine = False
        finally:
            lock_is_told()

    def release(self) -> None:
        """Give an operation with a lease back, so that the same key may try again."""
        self.claim.refuse_in_child()
        cast("Lease", self.hold).release()
        self.abandon()

    def abandon(self, *, at_once: bool = True) -> None:
        """Roll back, or end the lease with the outcome unknown. Does nothing once it has ended.

        Not ``at_once``: the lease runs out by itself.
        """
        if self.pid != process.number:
            return
        try:
            if at_once:
                self.hold.abandon()
        finally:
            if self._mine:
                self._mine = False
                self._engine.lock.release(self.claim)


@dataclass(frozen=True, slots=True)
class Replay:
    """The operation has finished in its ``attempt``: replay its response.

    Not ``is_comparable``: nobody can tell whether the request is the same.
    """

    response: StoredResponse
    attempt: int
    is_comparable: bool = True


@dataclass(frozen=True, slots=True)
class InProgress:
    """Another request is running the operation, for at most ``seconds`` if that is known.

    ``by_lock``: so says the lock, and nobody has asked the records.
    """

    seconds: float | None = None
    by_lock: bool = False


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The operation started, its lease is over, and nobody knows how far it got.

    Or it was begun as often as the claim allows.
    """


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The key was used for a different request, which has ``finished`` or not."""

    finished: bool


Settled = Replay | InProgress | Interrupted | Mismatch
Decision = Execution | Settled


class DecisionEngine:
    """Claims operations in ``records``, behind a fast ``lock``.

    ``clock`` has ``monotonic()`` and ``sleep(seconds)``, like the module ``time``. At most
    ``max_waiters`` requests wait for others at the same time.
    """

    def __init__(
        self,
        records: Records,
        lock: Lock,
        sealer: Sealer,
        clock: Any,
        max_waiters: int = MAX_WAITERS,
    ) -> None:
        self._records, self.lock, self.sealer, self._clock = records, lock, sealer, clock
        self.max_waiters, self._places = max_waiters, threading.Semaphore(max_waiters)

    def decide(
        self,
        claim: Claim,
        wait: float = 0,
        *,
        on_interrupted: object = "hold",
        found: Record | None = None,
    ) -> Decision:
        """Decide about a request; ``wait`` is how many seconds it may wait for another's end.

        ``on_interrupted`` is the route's: whether an interrupted operation is taken over or left alone.
        ``found`` is the record, if the caller has just looked it up.
        Raises ``StoreUnavailable`` if the records cannot be reached, and ``LeaseLost`` in a child that
        was forked since the claim was made: a fork copies all greenlets, and the parent's goes on.
        """
        glance = self.lock.acquire(claim)
        patience = _Patience(wait, self._clock, self._places)
        if glance is Glance.BUSY and patience.left() <= 0:
            return InProgress(by_lock=True)
        mine = glance is Glance.MINE
        decision: Decision | None = None
        try:
            # Whoever gets a free lock is most likely a first request: it claims without looking.
            if found is None and not mine:
                found = self._records.look(claim.key)
            decision = self._settle(claim, found, mine, patience, on_interrupted)
            return decision
        finally:
            patience.end()
            if mine and not isinstance(decision, Execution) and claim.pid == process.number:
                if isinstance(decision, Replay) or decision == Mismatch(finished=True):
                    self.lock.finish(claim)()
                else:
                    self.lock.release(claim)

    def look(self, key: bytes) -> Record | None:
        """The record as it is now, with its response decrypted. Claims nothing.

        Raises ``StoreUnavailable`` or ``RecordBroken``.
        """
        record = self._records.look(key)
        if record is None or (record.response is None and record.state is State.IN_PROGRESS):
            return record
        return replace(record, response=self.opened(record))

    def _settle(
        self,
        claim: Claim,
        record: Record | None,
        mine: bool,
        patience: _Patience,
        policy: object,
    ) -> Decision:
        """Claim, or find out who did. ``mine``: the lock is this claim's."""
        rounds = 0
        while True:
            claim.refuse_in_child()
            step, tried = decide(record, claim), record
            taken = self._take(step, record, claim, mine, policy)
            if taken is not None and not isinstance(taken, Record):
                return taken
            if rounds == ROUNDS:
                raise StoreUnavailable
            if step is not Next.LET_RUN:
                # Not getting a hold may mean held, finished just now or gone. So look once more.
                record = taken or self._records.look(claim.key)
            found = situation(record)
            if tried is None or record is None or found is Situation.COMPLETED:
                rounds += 1
                continue
            if (left := patience.left()) <= 0:
                return InProgress(record.lease_left)
            if found is Situation.LEASED:
                patience.spend(min(left, POLL_SECONDS), self._clock.sleep)
            else:
                patience.spend(left, partial(self._records.wait, claim.key))
            record = self._records.look(claim.key)

    def _take(
        self, step: Next, record: Record | None, claim: Claim, mine: bool, policy: object
    ) -> Decision | Record | None:
        """Take the next step.

        A record, or None: somebody else holds the operation, or the record has changed, to this.
        """
        seen: Any = record
        hold: Hold | Record | None = None
        match step:
            case Next.REPLAY:
                is_comparable = claim.fingerprint.matches(seen.fingerprint) is not None
                return Replay(self.opened(seen), seen.attempt, is_comparable)
            case Next.REFUSE:
                return Mismatch(finished=situation(seen) is Situation.COMPLETED)
            case Next.ASK_ROUTE if not runs_again(seen, policy, claim.retried_seconds):
                return Interrupted()
            case Next.GIVE_UP:
                return self._give_up(claim, seen)
            case Next.CLAIM:
                hold = self._records.claim(claim)
            case Next.TAKE_OVER | Next.ASK_ROUTE:
                hold = self._records.take_over(claim, seen)
        if hold is None or isinstance(hold, Record):
            return hold
        claim.refuse_in_child()  # the hold is the parent's, too
        return Execution(self, hold, claim, mine, record)

    def _give_up(self, claim: Claim, record: Record) -> Interrupted | None:
        """Give the operation a lease that is over at once: so every store shows it as interrupted."""
        if situation(record) is not Situation.INTERRUPTED:
            if claim.lease_seconds is None:
                self._clock.sleep(SETTLE_SECONDS)
            hold = self._records.take_over(replace(claim, lease_seconds=0.0), record)
            if hold is None or isinstance(hold, Record):
                return None
            hold.abandon()
        return Interrupted()

    def opened(self, record: Record) -> StoredResponse:
        """The response of a record that has ended, decrypted.

        Raises ``RecordBroken``.
        """
        if record.response is None:
            raise RecordBroken
        return self.sealer.open(record.response, record)
