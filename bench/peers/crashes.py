"""What a contender does when things go wrong.

Each of these is done to it, and then the payments in the database are counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from .process import Died, Place, Running
from .shop import AFTER_COMMIT, BEFORE_COMMIT

Start = Callable[[], Running]

DUPLICATES = 200

PATIENCE_SECONDS = 75.0
"""How long a client retries after a crash: longer than every lease here. Ours are the longest, 60 s."""

PROMPT_SECONDS = 1.0

KILLS = 10
"""So many workers are killed, each with a key of its own."""


@dataclass(frozen=True)
class Outcome:
    """How many payments one key made, and what the client saw."""

    payments: int
    seen: str

    def __str__(self) -> str:
        return f"{self.payments}; {self.seen}"


def storm(start: Start, place: Place) -> Outcome:
    """The same request many times at once."""
    with start() as worker:
        statuses = worker.ask("storm", threads=DUPLICATES, amount=11)
    return Outcome(place.payments(11), _listed(statuses))


def other_body(start: Start, place: Place) -> Outcome:
    """The key again with another body."""
    with start() as worker:
        worker.ask("send", key="other", amount=21, patience=1)
        answer = worker.ask("send", key="other", amount=22, patience=1)
    return Outcome(place.payments(21) + place.payments(22), f"answers {answer['status']}")


def emptied(start: Start, place: Place) -> Outcome:
    """Redis loses its data between a request and its retry."""
    with start() as worker:
        worker.ask("send", key="emptied", amount=31, patience=1)
    place.empty_redis()
    with start() as worker:
        answer = worker.ask("send", key="emptied", amount=31, patience=1)
    return Outcome(place.payments(31), f"answers {answer['status']}")


def killed_before(start: Start, place: Place) -> Outcome:
    """``kill -9`` in the view before its commit, and retries at another process."""
    return _killed(start, place, BEFORE_COMMIT)


def killed_after(start: Start, place: Place) -> Outcome:
    """``kill -9`` in the view after its commit, and retries at another process."""
    return _killed(start, place, AFTER_COMMIT)


QUICK = {
    f"{DUPLICATES} duplicates at once": storm,
    "Redis emptied": emptied,
    "another body": other_body,
}

WAITING = {
    "killed before the view's commit": killed_before,
    "killed after the view's commit": killed_after,
}
"""Nearly all of their time is waiting for a lease to end, so many can run at once."""

EXPERIMENTS = QUICK | WAITING


def _killed(start: Start, place: Place, moment: str) -> Outcome:
    keys = [f"killed-{number}" for number in range(KILLS)]
    for key in keys:
        with start() as worker:
            try:
                worker.ask("die", moment=moment, key=key, amount=41)
            except Died:
                killed = time.monotonic()
            else:
                return Outcome(place.payments(41), "never came to this moment")
    with start() as worker:
        ready = time.monotonic()
        # The key whose worker died last: it waits longest.
        answer = worker.ask("send", key=keys[-1], amount=41, patience=PATIENCE_SECONDS)
        waited, seconds = time.monotonic() - ready, time.monotonic() - killed
        others = [worker.ask("send", key=key, amount=41, patience=1) for key in keys[:-1]]
    statuses = {each["status"] for each in [answer, *others]}
    before = f" (before that {_listed(answer['before'])})" if answer["before"] else ""
    if answer["status"] not in (201, 422):
        kept = f", and the record is {left}" if (left := place.kept_in_redis()) else ""
        seen = f"still {answer['status']} after {seconds:.0f} s{kept}"
    elif waited < PROMPT_SECONDS and not before:
        seen = f"{answer['status']} at once"
    else:
        seen = f"{answer['status']} after {seconds:.0f} s{before}"
    differs = "" if len(statuses) == 1 else f"; the {KILLS} keys got {sorted(statuses)}"
    return Outcome(place.payments(41), f"of {KILLS} keys: {seen}{differs}")


def _listed(statuses: dict[str, int]) -> str:
    return ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items()))
