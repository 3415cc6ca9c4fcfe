"""What happened to an operation, in the order in which it did."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

from flask_idempotency.operate.show import Found
from flask_idempotency.operate.words import duration
from flask_idempotency.stores.admin import Time

_FAR = 1e9
"""Seconds, some thirty years: whoever wrote a lease that ends later was not us."""


Moment = tuple[Time, str, str, str]
"""When, what, a detail, and a kind: ``"person"`` if somebody did it, ``"later"`` if it is to come."""


def moments(found: Found) -> list[Moment]:
    """Return the moments that a record and what belongs to it tell of."""
    return sorted(_told(found), key=lambda moment: (moment[-1] == "later", str(moment[0])))


def _told(found: Found) -> Iterator[Moment]:
    line, record = found.line, found.record
    yield line.created, "Created", "by the first request with its key", ""
    for step in found.steps:
        detail = f"in attempt {step['attempt']}, its result has {step['bytes']:,} bytes"
        yield step["finished"], f"Step {step['name']} finished", detail, ""
    for entry in found.audit:
        why = f": {entry.why}" if entry.why else ""
        yield entry.at or "", entry.did.capitalize(), f"by {entry.by}{why}", "person"
    if line.completed is not None:
        detail = f"in attempt {line.attempt}, with {line.status}"
        yield line.completed, line.state.capitalize(), detail, ""
    if record is not None and record.lease_left is not None and record.released is None:
        left = min(max(record.lease_left, -_FAR), _FAR)
        end = datetime.now(timezone.utc) + timedelta(seconds=left)
        if left > 0:
            yield end, "Its lease ends", "unless it is renewed", "later"
        else:
            yield end, "Interrupted", f"attempt {line.attempt} had not ended with its lease", ""
    if line.expires is not None:
        yield line.expires, *(("Expired", "", "") if line.expired else ("Expires", "", "later"))


def ago(time: datetime) -> str:
    """How long ago, or in how long."""
    seconds = (datetime.now(timezone.utc) - time).total_seconds()
    if -1 < seconds < 1:
        return "now"
    return f"{duration(seconds)} ago" if seconds > 0 else f"in {duration(seconds)}"
