"""The purge without a person: a thread of each process that deletes expired records from time to time.

Never in a request's time, which only starts the thread: once, with the first request to each endpoint
that this process serves. So a process that forks, such as gunicorn with ``--preload``, leaves none
behind, and each worker has its own.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator

from flask_idempotency.core.errors import StoreUnavailable

log = logging.getLogger("flask_idempotency")

BATCH = 500
"""The most records of one transaction: some milliseconds of the server's time."""

REST_SECONDS = 0.1
"""The pause after each batch: at most 5,000 records a second, which leaves the disk to the requests."""

JITTER = 0.2
"""How far a pause may be from its length: or else all workers would begin together for ever."""


class BackgroundPurge:
    """Calls ``purge(BATCH)`` every ``interval_seconds``, in a thread of its own.

    ``purge`` deletes expired records and yields after each transaction, as ``Admin.purge`` does.
    """

    def __init__(
        self,
        purge: Callable[[int], Iterator[int]],
        interval_seconds: float,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._purge, self._interval, self._sleep = purge, interval_seconds, sleep
        self._threads: dict[int, threading.Thread] = {}  # by process: a fork leaves threads behind

    def start(self) -> None:
        """Start the thread, unless this process has one. It ends with the process, at once."""
        thread = threading.Thread(target=self._run, name="idempotency-purge", daemon=True)
        if self._threads.setdefault(os.getpid(), thread) is thread:
            thread.start()

    def _run(self) -> None:
        # Asked for now: gevent may have replaced it since the import.
        sleep = self._sleep or time.sleep
        sleep(random.uniform(0, self._interval))  # noqa: S311 -- spreads processes, protects nothing
        while True:
            self._purge_once(sleep)
            sleep(self._interval * random.uniform(1 - JITTER, 1 + JITTER))  # noqa: S311

    def _purge_once(self, sleep: Callable[[float], object]) -> None:
        try:
            for _deleted in self._purge(BATCH):
                sleep(REST_SECONDS)
        except StoreUnavailable as error:
            log.warning("the background purge goes on later: %r", error.__cause__ or error)
        except Exception:
            log.exception("the background purge failed, and goes on later")
