"""What happened to an operation, in the order in which it did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from flask_idempotency.core.records import Record, State
from flask_idempotency.operate.show import Found
from flask_idempotency.stores.admin import Time

from . import labels

SHOWN = "shown"
"""What the audit says of a body and results that an operator has looked at."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One thing that happened, or will. ``kind`` is ``"person"`` if somebody did it, or ``"later"``."""

    at: Time
    what: str
    detail: str = ""
    kind: str = ""


def moments(found: Found, record: Record | None, now: datetime | None = None) -> list[Moment]:
    """The moments that a record and what belongs to it tell of; ``record`` is its row, if readable."""
    now = now or datetime.now(timezone.utc)
    told = sorted(_told(found, record, now), key=lambda moment: str(moment.at))
    return [moment for moment in told if moment.kind != "later"] + [
        moment for moment in told if moment.kind == "later"
    ]


def _is_decided(found: Found) -> bool:
    """Return True if its end was an operator's last decision, which is told already."""
    decisions = [entry.did for entry in found.audit if entry.did != SHOWN]
    return bool(decisions) and decisions[-1] in ("resolved", "failed")


def _told(found: Found, record: Record | None, now: datetime) -> Iterator[Moment]:
    line = found.line
    yield Moment(line.created, "Created", "by the first request with its key")
    for step in found.steps:
        detail = f"in attempt {step.attempt}, its result has {labels.size(step.bytes)}"
        yield Moment(step.finished, f"Step {step.name} finished", detail)
    for entry in found.audit:
        why = f": {entry.why}" if entry.why else ""
        yield Moment(entry.at or "", entry.did.capitalize(), f"by {entry.by}{why}", "person")
    if line.completed is not None and not _is_decided(found):
        detail = f"in attempt {line.attempt}, with {line.status}"
        yield Moment(line.completed, line.state.capitalize(), detail)
    if record is not None and record.lease_left is not None and record.state is State.IN_PROGRESS:
        end = _after(now, record.lease_left)
        if record.lease_left > 0:
            yield Moment(end, "Its lease ends", "unless it is renewed", "later")
        elif record.released is not None:
            yield Moment(end, "Given back", "its next request runs it again")
        else:
            yield Moment(end, "Interrupted", f"attempt {line.attempt} had not ended with its lease")
    if line.expires is not None:
        kind = "" if line.expired else "later"
        yield Moment(line.expires, "Expired" if line.expired else "Expires", kind=kind)


def _after(now: datetime, seconds: float) -> Time:
    """Return the time in so many seconds; in words where Python has none, as somebody else wrote it."""
    try:
        return now + timedelta(seconds=seconds)
    except OverflowError:
        return labels.ago(-seconds)
