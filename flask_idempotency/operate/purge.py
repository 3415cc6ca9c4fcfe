"""Deleting what has expired, and what ended long ago."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from flask_idempotency.stores.admin import Admin

from .decide import noted, tell


def purge(
    store: Admin, stop: threading.Event, batch: int, older_than: int | None, rate: int | None
) -> Iterator[int]:
    """Purge once, until ``stop``, at most ``rate`` records a second on average.

    Deletes also what ended ``older_than`` seconds ago, which is a decision: a retry of it runs again.
    Yields how many records are gone after each transaction.
    """
    deleted, began = 0, time.monotonic()
    try:
        for count in store.purge(batch, older_than):
            deleted += count
            yield deleted
            due = began + deleted / rate if rate else 0.0
            if stop.wait(max(due - time.monotonic(), 0.0)):
                return
    finally:
        if older_than is not None and deleted:
            tell(noted("purged", "", None), "cli", records=deleted, older_than=older_than)
