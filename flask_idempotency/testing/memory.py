"""A store with no servers, and a clock to move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

from flask import Flask

from flask_idempotency.core.ports import Lock, NoLock
from flask_idempotency.stores.memory import MemoryRecords
from flask_idempotency.stores.redis.lock import RedisLock
from flask_idempotency.web.setup.state import one_state

from .watch import ONE_BIND, ports


class Clock:
    """Seconds that go on only when a test says so."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __call__(self) -> float:
        return self._seconds

    def advance(self, seconds: float | timedelta) -> None:
        """Let time pass. Retention and leases of the ``memory`` store are counted by it."""
        self._seconds += seconds.total_seconds() if isinstance(seconds, timedelta) else seconds


@contextmanager
def memory_store(app: Flask, clock: Clock | None = None, *, redis: Any = None) -> Iterator[Clock]:
    """Let an application keep its records in memory, whatever its store is; yields the clock.

    The view's writes go to the application's own database as ever, and commit with the record. With a
    ``redis`` client the lock of the store ``hybrid`` stands before the records;
    ``fakeredis.FakeRedis()`` needs no server.
    """
    state = one_state(app, "memory_store()", ONE_BIND)
    clock = Clock() if clock is None else clock
    settings = replace(state.settings, store="memory")
    lock: Lock = NoLock()
    if redis is not None:
        lock = RedisLock(lambda: redis, "test:", probe_after=settings.probe_after)
    records = MemoryRecords(state.database, clock)
    with patch.object(state, "settings", settings), ports(state, records, lock):
        yield clock
