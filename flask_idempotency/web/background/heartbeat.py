"""Leases that renew themselves while their views run: one thread of the process renews them all.

A process that dies or is paused renews nothing, so its leases end as any other. One that wakes up too
late finds that its operation was taken over, as the token is compared with each renewal.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from flask import Flask

from flask_idempotency.core.errors import LeaseLost, StoreUnavailable
from flask_idempotency.core.ports import Lease

from .threads import Worker, guarded, in_context

SHARE = 1 / 3
"""After which part of a lease it is renewed: two renewals may fail, and the lease still runs."""

RETRY_SHARE = 1 / 12
"""The pause after a renewal that failed, as a part of the lease: eight more tries, until it is over."""


class Heartbeat:
    """One lease of ``seconds`` that began just now, of an operation of ``app``.

    ``on_failure`` is told with the seconds that are left: of the first of several renewals that fail,
    once more if the lease has run out meanwhile, and once if it was lost (``LeaseLost``).

    While the record ``is_held`` by the transaction of a step, nobody can take over, and a renewal would
    wait for it: it comes soon after.
    """

    def __init__(
        self,
        app: Flask,
        lease: Lease,
        seconds: float,
        on_failure: Callable[[Exception, float], object],
        is_held: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._lease, self._seconds, self._clock = app, lease, seconds, clock
        self._on_failure, self._is_held = on_failure, is_held
        self._ends = clock() + seconds
        self.due = clock() + seconds * SHARE
        self.is_over = self._has_lapsed = False
        self._failure: Exception | None = None
        self._lock, self._tried = threading.Lock(), threading.Event()

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
            self.due = began + self._seconds * RETRY_SHARE
            if self._is_held():
                self._ends, self._failure = began + self._seconds, None
            else:
                self._try(began)
            self._tried.set()

    def _try(self, began: float) -> None:
        try:
            in_context(self._app, partial(self._lease.extend, self._seconds))
        except LeaseLost as lost:  # the view is told by its next step, or at its end
            self.is_over = True
            self._tell(lost, 0.0)
        except Exception as error:
            self._note(error)
        else:
            self._ends = max(self._ends, began + self._seconds)
            self._failure, self._has_lapsed = None, False
            self.due = began + self._seconds * SHARE

    def _note(self, error: Exception) -> None:
        """Try again soon: until somebody takes over, a lease that has run out is still its holder's."""
        now = self._clock()
        self.due = now + self._seconds * RETRY_SHARE
        is_first, self._failure = self._failure is None, error
        has_lapsed = now >= self._ends
        if is_first or (has_lapsed and not self._has_lapsed):
            self._tell(error, max(0.0, self._ends - now))
        self._has_lapsed = has_lapsed

    def _tell(self, error: Exception, left: float) -> None:
        tell = partial(in_context, self._app, partial(self._on_failure, error, left))
        guarded("the report of a renewal that failed", tell)

    def lasts(self, seconds: float) -> None:
        """The lease was extended in another way, just now."""
        self._ends = max(self._ends, self._clock() + seconds)

    def prove(self, beating: Heart, *, anew: bool = False) -> None:
        """Return if the last renewal did not fail, or the one that is tried now does not.

        With ``anew`` one is tried in any case. Raises ``StoreUnavailable``: who goes on all the same
        will find the operation taken over.
        """
        if self._failure is None and not anew:
            return
        self._tried.clear()
        self.due = self._clock()
        beating.begin()
        failure: BaseException | None
        if self._tried.wait(self._seconds):
            failure = self._failure
        else:
            failure = TimeoutError(f"no renewal was tried within {self._seconds:g} s")
        if failure is not None:
            raise StoreUnavailable(
                "The lease of this operation cannot be renewed, so nothing more was begun."
            ) from failure


class Heart(Worker):
    """Renews leases, in a thread that ends when there are none."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__("idempotency-heartbeat")
        self._clock = clock

    def begin_anew(self) -> None:
        """See :class:`Worker`: in a forked child no view of the parent runs."""
        super().begin_anew()
        self._beats: set[Heartbeat] = set()

    def add(self, beat: Heartbeat) -> None:
        """Renew a lease until it is removed or lost."""
        with self.lock:
            self._beats.add(beat)
        self.begin()

    def remove(self, beat: Heartbeat) -> None:
        """Renew a lease no more. Waits for a renewal on its way: what follows may end the lease."""
        beat.stop()
        with self.lock:
            self._beats.discard(beat)

    def has_work(self) -> bool:
        """See :class:`Worker`."""
        return any(not beat.is_over for beat in self._beats)

    def turn(self) -> None:
        """Renew the lease that is due, or rest until one is."""
        with self.lock:
            lasting = [beat for beat in self._beats if not beat.is_over]
        beat = min(lasting, key=lambda beat: beat.due, default=None)
        if beat is not None and (pause := beat.due - self._clock()) > 0:
            self.rest(pause)
        elif beat is not None:
            beat.renew()


HEART = Heart()
"""The one of this process."""
