"""Times, counts, names and errors as an operator reads them."""

from __future__ import annotations

from datetime import datetime, timezone
from unicodedata import category

from flask_idempotency.core.errors import IdempotencyError, Problem
from flask_idempotency.stores.admin import reason

_UNITS = {"d": 86_400, "h": 3600, "min": 60, "s": 1}

_BLANK = "\u115f\u1160\u2800\u3164\uffa0"
"""Letters and a symbol that are drawn as nothing."""


def duration(seconds: float) -> str:
    """Return seconds in their one or two largest units: ``"3 min 20 s"``, ``"2 d 4 h"``."""
    left, parts = int(abs(seconds)), list[str]()
    for unit, size in _UNITS.items():
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}")
    return " ".join(part for part in parts[:2] if not part.startswith("0 ")) or "0 s"


def as_utc(time: datetime, between: str) -> str:
    """Return a time in UTC with milliseconds: to be compared with what another service has logged."""
    return time.astimezone(timezone.utc).isoformat(between, "milliseconds").replace("+00:00", "Z")


def records(count: int) -> str:
    """Return so many records, in words."""
    return "1 record" if count == 1 else f"{count:,} records"


def explain(error: Exception) -> str:
    """Explain an error in the driver's words, where a client only reads to try again."""
    is_mistake = isinstance(error, IdempotencyError) and not isinstance(error, Problem)
    return str(error) if is_mistake else reason(error)


def printable(text: str) -> str:
    """Return text without instructions to the terminal: whoever writes to the table is not trusted."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def is_legible(text: str, longest: int) -> bool:
    """Return True if a name or a reason can be seen, and has at most so many characters."""
    seen = (c for c in text if c.isprintable() and category(c)[0] not in "MZ" and c not in _BLANK)
    return len(text.strip()) <= longest and any(seen)


def one_line(name: str) -> str:
    """Return a person's name as it is noted, on one line; nothing if nothing of it can be seen."""
    line = "".join(c if c.isprintable() else " " for c in name).strip()
    return line if is_legible(line, len(line)) else ""
