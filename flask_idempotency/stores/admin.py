"""What an operator sees of the records and does about them, whichever store has them.

Each store gives its operator's side with the method ``admin()``: :class:`.sql_admin.SqlAdmin`, or
:class:`.redis.RedisAdmin` with the same methods. Nothing there reads a response, and of a key's hash
only as many digits as tell records apart. A stored time that Python cannot represent stays text.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal

from sqlalchemy import exc

from flask_idempotency.core.errors import RecordBroken
from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.keys import KEY_BYTES
from flask_idempotency.core.records import OBSERVED, Claim, legible

Time = datetime | str

CAPPED = 10_000
"""How far :class:`Overview` counts what should be few: leases and expired records. Enough to see that
something is wrong, in a few milliseconds."""

WAITING = ("interrupted", "failed")
"""The states of operations about which somebody must decide, as long as they do not expire."""


@dataclass(frozen=True, slots=True)
class Overview:
    """What there is at a glance, cheap enough to ask for every few seconds.

    ``counts`` has a count by state for each operation. These are estimates if ``estimated``, except
    those of records with a lease: interrupted operations are always counted. ``interrupted`` counts
    these, with failures that wait for an operator; ``interrupted_seconds`` is how long ago the first
    attempt at the oldest of them began. ``expired`` counts records that wait for a purge, the oldest
    since ``expired_seconds``. These two end at :data:`CAPPED`.
    """

    counts: dict[str, Counter[str]]
    estimated: bool
    interrupted: int
    interrupted_seconds: float | None
    expired: int
    expired_seconds: float | None

    @property
    def by_state(self) -> Counter[str]:
        """How many records each state has."""
        return sum(self.counts.values(), Counter())

    @property
    def total(self) -> int:
        """How many records there are."""
        return self.by_state.total()


@dataclass(frozen=True, slots=True)
class Line:
    """One record, without its key and its response.

    ``hash`` is the key's, by which its record is found. ``version`` is another one after each attempt,
    lease, end and decision. It holds the owner's token, so it is not shown.
    """

    hash: bytes = field(repr=False)
    operation: str
    state: str
    attempt: int
    status: int | None
    bytes: int | None
    created: Time
    completed: Time | None
    expires: Time | None
    expired: bool
    version: str = field(default="", repr=False)

    @property
    def key(self) -> str:
        """The first 16 hex digits of the hash, which stand for the record."""
        return self.hash[:8].hex()

    @property
    def waits(self) -> bool:
        """Whether it waits for an operator, or for what ``on_interrupted`` decides."""
        return self.state in WAITING and self.expires is None

    @property
    def stays(self) -> bool:
        """Whether it may not be erased: somebody works on it with a lease, or must decide about it."""
        return self.expires is None and self.state != "observed"


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """What an operator ``did`` to a record, who and why; ``at`` is None before the store notes it."""

    by: str
    did: str
    why: str
    at: Time | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, and what to do about it."""

    level: Literal["ok", "advice", "FAILED"]
    subject: str
    text: str
    remedy: str = ""


TRIAL = "flask idempotency check"
"""The name of the record that a check claims."""

_TRIAL_SECONDS = 60.0  # a check that fails or is killed leaves a record, which a purge deletes later


def trial_claim() -> Claim:
    """Return a short-lived claim to a key that nobody else uses, and that waits for nobody."""
    key, owner = secrets.token_bytes(KEY_BYTES), OBSERVED + secrets.token_urlsafe(9)
    return Claim(key, TRIAL, Fingerprint(0, bytes(16)), owner, _TRIAL_SECONDS)


def read_audit(text: str | None) -> list[AuditEntry]:
    """The entries of a stored list of them; none if it is not ours: others may write to the store."""
    with suppress(RecordBroken), legible():
        return [
            AuditEntry(str(each["by"]), str(each["did"]), str(each["why"]), read_time(each["at"]))
            for each in json.loads(text or "[]")
        ]
    return []


def read_time(text: Any) -> Any:
    """A time as text, in UTC. Falls back to the text: whoever writes to the table may write any."""
    try:
        return text and datetime.fromisoformat(text).replace(tzinfo=timezone.utc)
    except (TypeError, ValueError):
        return str(text)


MISSING = (
    "the table {} is missing or not up to date: run `flask idempotency create-table`, or make a"
    " migration (the table is part of db.metadata)"
)


def original(error: BaseException | None) -> BaseException | None:
    """Return the driver's error inside SQLAlchemy's."""
    return error.orig if isinstance(error, exc.DBAPIError) else error


def reason(error: BaseException) -> str:
    """Why something failed, in one line: the driver's own words where there are any."""
    found = original(error.__cause__) or error
    return next(iter(str(found).strip().splitlines()), type(found).__name__)
