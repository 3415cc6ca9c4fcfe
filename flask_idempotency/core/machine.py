"""The state machines: what a request does about a record, and where an attempt is.

A request finds a record in one of six situations. The record is *absent*, *in progress* or *completed*
(its response may say "failed"). Once its retention is over it is *expired*, which counts as absent,
except that its row still exists and is taken over instead of inserted. An operation that is not atomic
is *leased* while it runs, and *interrupted* once its lease is over: it may already have had effects
outside the database, so it neither expires nor simply runs again.

What a request does next depends on the situation and on whether its fingerprint is the stored one.
A changed request is rejected first, even while the first one still runs (422 before 409). Fingerprints
of two algorithms cannot be compared; a deployment must not turn every key in flight into an error, so
they count as the same, and that is logged.

The table does not say whether an operation in progress still has a living owner: only the row's lock
knows. ``TAKE_OVER`` means "try to lock the row"; failing to get the lock means that the owner is
alive: 409. ``ASK_ROUTE`` means that the route's ``on_interrupted`` says whether to try:
``runs_again``. Nothing else decides, but that a lock which is held rejects before all this.

A route may limit how often an operation is begun. Then the request that would begin it once more makes
it interrupted instead, and every later one leaves it so, whatever the route says: ``GIVE_UP``.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

from .errors import ConfigurationError, Problem, RecordBroken, Retryable, TransactionConflict
from .records import Claim, Record, State


class Situation(str, Enum):
    """How a request finds the record."""

    ABSENT = "absent"
    IN_PROGRESS = "in progress"
    LEASED = "leased"
    INTERRUPTED = "interrupted"
    COMPLETED = "completed"
    EXPIRED = "expired"


class Next(Enum):
    """What to do about it."""

    CLAIM = "insert the record"
    TAKE_OVER = "make the row mine, if nobody holds it"
    LET_RUN = "leave it to the lease's owner"
    ASK_ROUTE = "do what the route says about interrupted operations"
    REPLAY = "replay the stored response"
    REFUSE = "reject: the key was used for another request"
    GIVE_UP = "leave it to an operator: it was begun often enough"


NEXT: dict[Situation, tuple[Next, Next]] = {
    Situation.ABSENT: (Next.CLAIM, Next.CLAIM),
    Situation.EXPIRED: (Next.TAKE_OVER, Next.TAKE_OVER),
    Situation.IN_PROGRESS: (Next.TAKE_OVER, Next.REFUSE),
    Situation.LEASED: (Next.LET_RUN, Next.REFUSE),
    Situation.INTERRUPTED: (Next.ASK_ROUTE, Next.REFUSE),
    Situation.COMPLETED: (Next.REPLAY, Next.REFUSE),
}
"""For the same request, as far as anyone can tell, and for a changed one."""


class Phase(Enum):
    """Where one attempt at an operation is, from its claim to its end."""

    OPEN = "claimed: whoever finds it so, and does not go on to the view, abandons it"
    IN_VIEW = "the view runs, or what became of it is being stored"
    AWAITING = "an error of the view is on its way: the application makes a response of it"
    WAITING = "its response waits for what the application does above the view"
    OVER = "committed, or undone"

    # What comes back from above the view, the response to its error or the end of the request, enters
    # IN_VIEW once more. Who abandons an attempt makes it OPEN first, so that it is found and abandoned
    # again if that is cut off. Nothing follows the end.


def situation(record: Record | None) -> Situation:
    """The situation that a record, or its absence, stands for."""
    if record is None:
        return Situation.ABSENT
    if record.expired:
        return Situation.EXPIRED
    if record.state is not State.IN_PROGRESS:
        return Situation.COMPLETED
    if record.lease_left is None:
        return Situation.IN_PROGRESS
    return Situation.LEASED if record.lease_left > 0 else Situation.INTERRUPTED


def decide(record: Record | None, claim: Claim) -> Next:
    """Decide what a request with this claim does about this record."""
    is_changed = record is not None and claim.fingerprint.matches(record.fingerprint) is False
    step = NEXT[situation(record)][is_changed]
    if record is None or record.expired or step not in (Next.TAKE_OVER, Next.ASK_ROUTE):
        return step
    begun = record.attempt - (record.released_attempt or 0)
    is_spent = claim.max_attempts is not None and begun >= claim.max_attempts
    return Next.GIVE_UP if is_spent else step


def runs_again(record: Record, policy: object, seconds: float) -> bool:
    """Return True if ``policy``, a route's ``on_interrupted``, lets a request take the operation over.

    "retry" does so for ``seconds`` after the first attempt began, however often it was interrupted: the
    service that is called remembers the view's keys from its first call on. Once it has forgotten them,
    it would charge a second time. What was released has the same time, whatever the policy.
    """
    if policy == "retry" or record.released is not None:
        return record.age < seconds
    return policy != "hold"


# What an error of the view means.

INTERRUPTING = frozenset(
    {
        "billiard.exceptions.SoftTimeLimitExceeded",  # Celery
        "rq.timeouts.JobTimeoutException",
        "rq.exceptions.ShutDownImminentException",  # an Exception before RQ 3
        "huey.exceptions.TaskTimeout",
    }
)
"""What queues raise in the middle of a job: nobody knows whether its effect happened. Those that no
``except Exception`` catches need not be here: dramatiq's, asyncio's, ``SystemExit``."""

RELEASING = {
    "celery.exceptions.Retry": None,
    "celery.exceptions.Reject": "requeue",
    "dramatiq.errors.Retry": None,
    "huey.exceptions.RetryTask": None,
    "huey.exceptions.CancelExecution": "retry",
    "arq.worker.Retry": None,
}
"""What a job raises to be run again by its queue, if the attribute (where one is named) is true."""


_UNDONE = (Retryable, TransactionConflict)
"""The view, or the database of a step, says with these that the operation may be tried again."""

_NOT_THE_OPERATIONS = (Problem, ConfigurationError, RecordBroken)
"""Errors that say nothing about the operation's effect: they interrupt it, and do not fail it."""


def outcome_after(error: Exception) -> Literal["interrupted", "released"] | None:
    """Say what becomes of an operation that is not atomic if its view raises ``error``.

    ``"released"``: it may run again. ``"interrupted"``: nobody knows whether its effect happened, or
    somebody has to repair the set-up first. None: the response to ``error`` is stored.
    """
    # By name: no queue need be installed.
    names = [f"{each.__module__}.{each.__qualname__}" for each in type(error).__mro__]
    if not INTERRUPTING.isdisjoint(names):
        return "interrupted"
    flags = (RELEASING[name] for name in names if name in RELEASING)
    if isinstance(error, _UNDONE) or any(flag is None or getattr(error, flag, False) for flag in flags):
        return "released"
    return "interrupted" if isinstance(error, _NOT_THE_OPERATIONS) else None
