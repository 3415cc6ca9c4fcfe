"""Leases that renew themselves while their views run: one thread of the process renews them all.

A process that dies or is paused renews nothing, so its leases end as any other. One that wakes up too
late finds that its operation was taken over, as the token is compared with each renewal.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import cache

from flask_idempotency.core.errors import LeaseLost
from flask_idempotency.core.ports import Lease

SHARE = 1 / 3
"""After which part of a lease it is renewed: two renewals may fail, and the lease still runs."""

RETRY_SHARE = 1 / 12
"""The pause after a renewal that failed, as a part of the lease: eight more tries, until it is over."""


class Heartbeat:
    """One lease of ``seconds`` that began just now.

    ``on_lapse`` is told once if it has run out, and once if it was lost (``LeaseLost``).

    While the record ``is_held`` by the transaction of a step, nobody can take over, and a renewal would
    wait for it: it comes soon after.
    """

    def __init__(
        self,
        lease: Lease,
        seconds: float,
        on_lapse: Callable[[Exception], object],
        is_held: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lease, self._seconds, self._clock = lease, seconds, clock
        self._on_lapse, self._is_held = on_lapse, is_held
        self._ends = clock() + seconds
        self.due = clock() + seconds * SHARE
        self.is_over = self._has_lapsed = False
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Renew the lease no more; returns when no renewal is on its way."""
        with self._lock:
            self.is_over = True

    def renew(self) -> None:
        """Renew the lease, unless it is over. Never raises."""
        with self._lock:
            if self.is_over:
                return
            began = self._clock()
            if self._is_held():
                self._ends, self.due = began + self._seconds, began + self._seconds * RETRY_SHARE
                return
            try:
                self._lease.extend(self._seconds)
            except LeaseLost as lost:  # the view is told by its next step, or at its end
                self.is_over = True
                self._on_lapse(lost)
            except Exception as error:
                self._note(error)
            else:
                self._ends, self._has_lapsed = began + self._seconds, False
                self.due = began + self._seconds * SHARE

    def _note(self, error: Exception) -> None:
        """Try again soon: until somebody takes over, a lease that has run out is still its holder's."""
        now = self._clock()
        self.due = now + self._seconds * RETRY_SHARE
        if now >= self._ends and not self._has_lapsed:
            self._has_lapsed = True
            self._on_lapse(error)


class Heart:
    """Renews leases, in a thread that ends when there are none. ``changed`` is what it waits on."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        changed: threading.Condition | None = None,
    ) -> None:
        self._clock, self._changed = clock, changed or threading.Condition()
        self._beats: set[Heartbeat] = set()
        self._thread: threading.Thread | None = None

    def add(self, beat: Heartbeat) -> None:
        """Renew a lease until it is removed or lost."""
        with self._changed:
            self._beats.add(beat)
            self._changed.notify()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="idempotency-heartbeat", daemon=True)
                thread.start()
                self._thread = thread

    def remove(self, beat: Heartbeat) -> None:
        """Renew a lease no more. Waits for a renewal on its way: what follows may end the lease."""
        beat.stop()
        with self._changed:
            self._beats.discard(beat)

    def _run(self) -> None:
        while (beat := self._next()) is not None:
            beat.renew()

    def _next(self) -> Heartbeat | None:
        """The lease to renew next, once it is due; None: there is none, and the thread ends."""
        with self._changed:
            while True:
                lasting = [beat for beat in self._beats if not beat.is_over]
                if not lasting:
                    self._thread = None
                    return None
                beat = min(lasting, key=lambda beat: beat.due)
                if (pause := beat.due - self._clock()) <= 0:
                    return beat
                self._changed.wait(pause)


@cache
def heart() -> Heart:
    """The one of this process. Made when needed: by then gevent has replaced what it is made of."""
    return Heart()


# In a forked child no view of the parent runs, and its thread is not there.
os.register_at_fork(after_in_child=heart.cache_clear)
