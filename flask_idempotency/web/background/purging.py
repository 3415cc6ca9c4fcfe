"""The purge without a person: a thread of each process that deletes expired records from time to time.

Never in a request's time, which only starts the thread, if there is none. So a process that forks, such
as gunicorn with ``--preload``, leaves none behind, and each worker has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import SystemRandom

from flask import Flask

from flask_idempotency.core.errors import StoreUnavailable
from flask_idempotency.core.logs import log

from .threads import Worker, guarded, in_context

BATCH = 500
"""The most records of one transaction: some milliseconds of the server's time."""

REST_SECONDS = 0.1
"""The pause after each batch: at most 5,000 records a second, which leaves the disk to the requests."""

JITTER = 0.2
"""How far a pause may be from its length: or else all workers would begin together for ever."""


class BackgroundPurge(Worker):
    """Calls ``purge(BATCH)`` every ``interval_seconds``, in a thread of its own.

    ``purge`` deletes expired records and yields after each transaction, as ``Admin.purge`` does.
    """

    def __init__(
        self, app: Flask, purge: Callable[[int], Iterator[int]], interval_seconds: float
    ) -> None:
        super().__init__("idempotency-purge")
        self._app, self._purge, self._interval = app, purge, interval_seconds
        self._pause = 0.0

    def start(self) -> None:
        """Start the thread, unless this process has one. No request fails because of it."""
        if self._thread is None:
            self._pause = SystemRandom().uniform(0, self._interval)  # processes spread
            guarded("the start of the background purge", self.begin)

    def has_work(self) -> bool:
        """See :class:`Worker`: it ends with the process, at once."""
        return True

    def turn(self) -> None:
        """Rest, and purge."""
        self.rest(self._pause)
        self._pause = self._interval * SystemRandom().uniform(1 - JITTER, 1 + JITTER)
        try:
            in_context(self._app, self._purge_once)
        except StoreUnavailable as error:
            log.warning("the background purge goes on later: %r", error.__cause__ or error)
        except Exception:
            log.exception("the background purge failed, and goes on later")

    def _purge_once(self) -> None:
        for _deleted in self._purge(BATCH):
            self.rest(REST_SECONDS)

    def attempt(self) -> None:
        """Do what a purge does, and delete nothing."""
        for _deleted in self._purge(0):
            break
