"""Times, counts and sizes as a person reads them."""

from __future__ import annotations

from datetime import datetime, timezone

from markupsafe import Markup, escape

from flask_idempotency.operate.words import as_utc, duration
from flask_idempotency.stores.admin import Time

NONE = "\N{EN DASH}"


def ago(seconds: float) -> str:
    """How long ago, or in how long."""
    if -1 < seconds < 1:
        return "now"
    return f"{duration(seconds)} ago" if seconds > 0 else f"in {duration(seconds)}"


def moment(time: Time | None, now: datetime | None = None) -> str:
    """A time in UTC with how long ago it was; what is no time (somebody else wrote it) as it is."""
    if not isinstance(time, datetime):
        return NONE if time is None else escape(time)
    seconds = ((now or datetime.now(timezone.utc)) - time).total_seconds()
    element = '<time datetime="{}"><span class="clock">{}</span> <span class="soft">{}</span></time>'
    text = as_utc(time, " ")
    return Markup(element).format(as_utc(time, "T"), text, ago(seconds))  # noqa: S704


def size(count: int | None) -> str:
    """Bytes."""
    if count is None:
        return NONE
    if count < 1024:
        return f"{count} B"
    return f"{count / 1024:,.1f} KiB" if count < 1024**2 else f"{count / 1024**2:,.1f} MiB"


def number(count: int) -> str:
    """A count, its thousands apart."""
    return f"{count:,}"
