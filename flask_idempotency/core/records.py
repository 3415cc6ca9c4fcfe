"""The values that everything else is made of: a record, a stored response, a claim."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from os import getpid, register_at_fork
from typing import Any

from .errors import LeaseLost
from .fingerprint import Fingerprint

SEALED = b"\x01"
"""The first byte of everything stored encrypted: its format. No text begins with it."""

OBSERVED = "observed:"
"""What the owner of a record begins with whose operation was only observed."""

Headers = tuple[tuple[str, str], ...]
"""Header lines as pairs, in order; several of one name stay several."""


class Process:
    """The present process. What was begun under another ``number`` is its parent's."""

    number = getpid()  # kept, as each statement asks for it


register_at_fork(after_in_child=lambda: setattr(Process, "number", getpid()))


class State(str, Enum):
    """What a record says about its operation."""

    IN_PROGRESS = "in_progress"
    """Claimed. Only the row's lock tells whether somebody still works on it."""

    COMPLETED = "completed"
    """The response is stored; it committed together with the operation's writes."""

    FAILED = "failed"
    """The stored response, which replays, says that an operation that is not atomic failed."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An HTTP response as it is stored.

    ``headers`` is None if the response is sealed (``body`` then holds headers and body, encrypted);
    ``body`` is None if it was too large to store.
    """

    status: int
    headers: Headers | None = field(repr=False)
    body: bytes | None = field(repr=False)

    def is_sealed(self) -> bool:
        """Return True if this is encrypted."""
        return self.headers is None and (self.body or b"").startswith(SEALED)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request asks for: to be the one that runs this operation.

    ``key`` is the hash over scope and key (23 bytes, the last 7 the scope's), ``name`` the route's,
    ``owner`` a random token of this attempt, ``ttl_seconds`` how long the finished record replays.
    ``lease_seconds`` is how long an operation that is not atomic may go without renewing its lease, and
    None for an atomic one.
    ``max_attempts`` is after how many attempts an operation is given up. ``retried_seconds`` is how
    long after its first attempt an interrupted operation may run again, if its route says "retry".
    ``pid`` is the process that made the claim: no child takes part in it. ``connection`` is what an
    atomic operation is to continue the transaction of, in place of one of its own.
    """

    key: bytes
    name: str
    fingerprint: Fingerprint
    owner: str
    ttl_seconds: float
    lease_seconds: float | None = None
    max_attempts: int | None = None
    retried_seconds: float = math.inf
    pid: int = field(default_factory=getpid, repr=False, compare=False)
    connection: Any = field(default=None, repr=False, compare=False)

    def is_inherited(self) -> bool:
        """Return True in a process that was forked since the claim was made: it is the parent's."""
        return self.pid != Process.number

    def refuse_in_child(self) -> None:
        """Raise ``LeaseLost`` in a process that was forked since the claim was made."""
        if self.pid != Process.number:
            raise LeaseLost(
                "This process was forked inside the operation: it can neither end it nor take a step."
            )


@dataclass(frozen=True, slots=True)
class Record:
    """A record as the store shows it.

    ``owner`` is the token of its latest attempt. The database's clock decides about ``expired`` and
    ``lease_left``: seconds, 0 or less if the lease is over, None if there is none.
    ``released_attempt`` is the attempt after which an operator released it, if one did.
    ``age`` is the seconds since its first attempt began. ``released`` is the seconds since its view or
    an operator gave it back to be run again, where that does not end it: it waits, and does not expire.
    """

    key: bytes
    name: str
    state: State
    fingerprint: Fingerprint
    attempt: int
    owner: str = ""
    expired: bool = False
    lease_left: float | None = None
    response: StoredResponse | None = None
    released_attempt: int | None = None
    age: float = field(default=0.0, compare=False)
    released: float | None = field(default=None, compare=False)
