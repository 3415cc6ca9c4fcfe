"""What is going on, looked at again and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone

from flask_idempotency.core.errors import StoreUnavailable
from flask_idempotency.stores.admin import Finding, Overview, admin_of
from flask_idempotency.web.setup.state import AppState

from .find import admin
from .words import explain


@dataclass(frozen=True, slots=True)
class Look:
    """What one look has found. ``monotonic`` is when, in seconds, for the rates of the next one."""

    at: datetime
    monotonic: float
    overview: Overview | None
    error: str | None
    redis: str
    inserted: float | None = None
    deleted: float | None = None


def look(state: AppState, before: Look | None) -> Look:
    """Look once, and compare with the look before."""
    overview, error = None, None
    try:
        overview = admin(state).overview()
    except StoreUnavailable as unavailable:
        error = explain(unavailable)
    now, rates = time.monotonic(), list[float | None]()
    if before is not None and before.overview is not None and overview is not None:
        was, seconds = before.overview, now - before.monotonic
        rates.append(per_second(was.inserted, overview.inserted, seconds))
        rates.append(per_second(was.deleted, overview.deleted, seconds))
    lock = lock_of(state)
    redis = "not used as a lock" if lock is None else "works" if lock.level == "ok" else lock.text
    return Look(datetime.now(timezone.utc), now, overview, error, redis, *rates)


def overview_of(state: AppState) -> Callable[[], Overview]:
    """Return what asks for an overview on connections of our own. Raises what :func:`admin_of` does."""
    return admin_of(state.own_records, state.settings.store).overview


def per_second(before: int | None, after: int | None, seconds: float) -> float | None:
    """Return a rate; None also if the database has reset its counters."""
    if before is None or after is None or after < before:
        return None
    return round((after - before) / seconds, 1)


def lock_of(state: AppState) -> Finding | None:
    """Check whether Redis does its part as the lock; None where it has none."""
    return next(state.lock.examine(), None)
