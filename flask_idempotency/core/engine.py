"""One loop: ask the table of states what comes next, do it through the ports.

The engine knows no database, no Redis and no web framework. A request calls
:meth:`DecisionEngine.decide` and gets a decision. If that is an :class:`Execution`, it runs the
operation and ends that with ``complete``, ``release`` or ``abandon``.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from typing import Any

from . import errors
from .logs import log
from .machine import Next, Situation, decide, runs_again, situation
from .ports import Glance, Hold, Lock, Records
from .records import Claim, Record, Sealer, State, StoredResponse

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

_SPENT = "The operation was begun too often without success; an operator must decide."
_NOT_COMPARABLE = (
    "operation %s: the stored fingerprint was made in another way or with another key, so the stored"
    " response is replayed"
)

SETTLE_SECONDS = 0.1
"""How long an atomic operation that is to be given up is left alone first. A claim locks its row a
moment after it has committed it, so an attempt that begins just now looks like one that has died."""


class Execution:
    """One attempt at an operation, from its claim to its end: the operation is ours to run.

    It belongs to the process that made the claim. In a child forked since, what would end it raises
    ``LeaseLost``, and ``abandon`` does nothing.
    """

    has_lock = False  # until the lock knows of its end

    def __init__(
        self, engine: DecisionEngine, hold: Any, claim: Claim, found: Record | None, step: Next
    ) -> None:
        self.hold, self.claim, self._engine = hold, claim, engine
        self.took_over = found is not None and not found.expired
        self.was_interrupted = step is Next.ASK_ROUTE
        self.was_released = found is not None and found.released is not None
        self._began = engine.clock.monotonic()

    def complete(self, response: StoredResponse, *, waits: bool = False) -> float:
        """Store the response and commit, durably, while the lock is told.

        Returns how many seconds the attempt took. ``waits``: see ``Lease.complete``. Errors: see
        ``Hold.complete``. After one, ``abandon``.
        """
        self.claim.refuse_in_child()
        sealed = self._engine.sealer.seal(response, self.claim)
        lock_is_told = self._engine.lock.finish(self.claim)
        # If this fails, the lock sends retries to the records for nothing, which costs them a look.
        try:
            self.hold.complete(sealed, **({"waits": True} if waits else {}))
            self.has_lock = False
        finally:
            lock_is_told()
        seconds: float = self._engine.clock.monotonic() - self._began
        self._engine.last_seconds[self.claim.name] = seconds
        return seconds

    def release(self) -> None:
        """Give an operation with a lease back, so that the same key may try again."""
        self.claim.refuse_in_child()
        self.hold.release()
        self.abandon()

    def abandon(self, *, at_once: bool = True) -> None:
        """Roll back, or end the lease with the outcome unknown. Does nothing once it has ended.

        Not ``at_once``: the lease runs out by itself.
        """
        if self.claim.is_inherited():
            return
        try:
            if at_once:
                self.hold.abandon()
        finally:
            if self.has_lock:
                self.has_lock = False
                self._engine.lock.release(self.claim)


@dataclass(frozen=True, slots=True)
class Replay:
    """The operation has finished in its ``attempt``: replay its response."""

    response: StoredResponse
    attempt: int


Decision = Execution | Replay
"""What a request gets. In all other cases it gets a :class:`Problem`."""


class DecisionEngine:
    """Claims operations in ``records``, behind a fast ``lock``.

    ``clock`` has what is used of the module ``time``. At most ``max_waiters`` requests wait for others
    at the same time.
    """

    def __init__(
        self, records: Records, lock: Lock, sealer: Sealer, clock: Any, max_waiters: int = MAX_WAITERS
    ) -> None:
        self._records, self.lock, self.sealer, self.clock = records, lock, sealer, clock
        self._places = threading.Semaphore(max_waiters)
        # How long each operation took here, by its name: what a duplicate is told to wait.
        self.last_seconds: dict[str, float] = {}

    def decide(self, claim: Claim, wait: float = 0, *, on_interrupted: object = "hold") -> Decision:
        """Decide about a request; ``wait`` is how many seconds it may wait for another's end.

        ``on_interrupted`` is the route's: whether an interrupted operation is taken over or left alone.
        Raises ``KeyExpired``, ``KeyReused``, ``RequestInProgress`` or ``OperationInterrupted`` where it
        is not this request's to run, ``StoreUnavailable`` if the records cannot be reached, and
        ``LeaseLost`` in a child that was forked since the claim was made: a fork copies all greenlets,
        and the parent's goes on.
        """
        is_old = claim.too_old_at is not None and self.clock.time() > claim.too_old_at
        found = self._remembered(claim) if is_old else None
        glance = self.lock.acquire(claim)
        if glance is Glance.BUSY and wait <= 0:
            raise self._in_progress(claim, None)
        decision: Decision | None = None
        try:
            # Whoever gets a free lock is most likely a first request: it claims without looking.
            if found is None and glance is not Glance.MINE:
                found = self._records.look(claim.key)
            decision = self._settle(claim, found, wait, on_interrupted)
            return decision
        finally:
            if glance is Glance.MINE:
                if decision is None:
                    self.lock.release(claim)
                elif isinstance(decision, Execution):
                    decision.has_lock = True
                else:
                    self.lock.finish(claim)()

    def _remembered(self, claim: Claim) -> Record:
        """The record of a key that is older than the memory of it: nothing happens before it decides.

        Raises ``KeyExpired`` if there is none: nobody knows whether it has run.

        * A record is made with a birth of at most "ahead" and five minutes after the database's time,
          as that host's clock may be fast. It lives for the retention, ahead and ten minutes. So when
          it expires, the retention after the birth is five minutes ago, and a host that is slow by as
          much knows it, too: every key without a record is refused, or has never had one. If the clocks
          are right, these ten minutes are also what a request may take from here to its claim.
        * What is in progress goes on, expired or not: its view still runs, or nothing of it was
          committed. Gone when it is to be taken over, it was never completed: then it would live for
          ten minutes more.
        """
        record = self._records.look(claim.key)
        if record is None or (record.expired and record.state is not State.IN_PROGRESS):
            raise errors.KeyExpired
        return record

    def look(self, key: bytes) -> Record | None:
        """The record as it is now, with its response decrypted. Claims nothing.

        Raises ``StoreUnavailable`` or ``RecordBroken``.
        """
        record = self._records.look(key)
        if record is None or (record.response is None and record.state is State.IN_PROGRESS):
            return record
        return replace(record, response=self.opened(record))

    def _settle(self, claim: Claim, record: Record | None, left: float, policy: object) -> Decision:
        """Claim, or find out who did."""
        rounds, waits = 0, False
        try:
            while True:
                step, tried = decide(record, claim), record
                taken = self._take(step, record, claim, policy)
                if isinstance(taken, Decision):
                    return taken
                if rounds == ROUNDS:
                    raise errors.StoreUnavailable
                if step is not Next.LET_RUN:
                    # Not getting a hold may mean held, finished just now or gone. So look once more.
                    record = taken or self._records.look(claim.key)
                found = situation(record)
                if tried is None or record is None or found is Situation.COMPLETED:
                    rounds += 1
                    continue
                if left > 0:  # a place is kept, or a newcomer would take it between two looks
                    waits = waits or self._places.acquire(blocking=False)
                if left <= 0 or not waits:
                    raise self._in_progress(claim, record)
                left = self._wait(claim, found, left)
                record = self._records.look(claim.key)
        finally:
            if waits:
                self._places.release()

    def _wait(self, claim: Claim, found: Situation, left: float) -> float:
        """Wait for what goes on, ``left`` seconds at most; how many are left then."""
        began = self.clock.monotonic()
        seconds = min(left, POLL_SECONDS) if found is Situation.LEASED else left
        if found is Situation.LEASED:
            self.clock.sleep(seconds)
        else:
            self._records.wait(claim.key, seconds)
        # On a clock that stands still, as tests stop it, the seconds count.
        return left - (self.clock.monotonic() - began or seconds)

    def _take(self, step: Next, record: Any, claim: Claim, policy: object) -> Decision | Record | None:
        """Take the next step.

        A record, or None: somebody else holds the operation, or the record has changed, to this.
        """
        hold: Hold | Record | None = None
        match step:
            case Next.REPLAY:
                is_equal = claim.fingerprint == record.fingerprint
                if not is_equal and claim.fingerprint.matches(record.fingerprint) is None:
                    log.warning(_NOT_COMPARABLE, claim.name)
                return Replay(self.opened(record), record.attempt)
            case Next.REFUSE:
                raise errors.KeyReused
            case Next.GIVE_UP:
                self._give_up(claim, record)
            case Next.ASK_ROUTE if not runs_again(record, policy, claim.retried_seconds):
                self._give_up(claim, record)
            case Next.CLAIM:
                hold = self._records.claim(claim)
            case Next.TAKE_OVER | Next.ASK_ROUTE:
                hold = self._records.take_over(claim, record)
        if hold is None or isinstance(hold, Record):
            return hold
        claim.refuse_in_child()  # the hold is the parent's, too
        return Execution(self, hold, claim, record, step)

    def _give_up(self, claim: Claim, record: Record) -> None:
        """Leave the operation to an operator.

        One with a living lease, or without, gets one that is over: so every store shows it as
        interrupted.
        """
        if situation(record) is not Situation.INTERRUPTED:
            if claim.lease_seconds is None:
                self.clock.sleep(SETTLE_SECONDS)
            hold = self._records.take_over(replace(claim, lease_seconds=0.0), record)
            if hold is None or isinstance(hold, Record):
                return
            hold.abandon()
        # An atomic one is rolled back: nothing but its number can end it.
        raise errors.OperationInterrupted(_SPENT if claim.lease_seconds is None else None)

    def _in_progress(self, claim: Claim, record: Record | None) -> errors.RequestInProgress:
        """The problem of a duplicate; without a ``record`` only the lock has been asked.

        That knows no leases, only young requests.
        """
        left = claim.lease_seconds if record is None else record.lease_left
        if left is None:
            left = self.last_seconds.get(claim.name, 0.0)
        # RFC 9110 section 10.2.3 knows no fractions.
        problem = errors.RequestInProgress(retry_after=max(1, math.ceil(left)))
        problem.by_lock = record is None
        return problem

    def opened(self, record: Record) -> StoredResponse:
        """The response of a record that has ended, decrypted.

        Raises ``RecordBroken``.
        """
        if record.response is None:
            raise errors.RecordBroken
        return self.sealer.open(record.response, record)
