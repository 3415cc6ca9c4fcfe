"""The values everything else is made of: a record, an answer, a claim."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .fingerprint import Fingerprint

Headers = tuple[tuple[str, str], ...]
"""Header lines as pairs, in order; several of one name stay several."""


class State(str, Enum):
    """What a record says of its operation."""

    IN_PROGRESS = "in_progress"
    """Claimed. Whether somebody still works on it only the row's lock can tell."""

    COMPLETED = "completed"
    """The answer is stored; it committed together with the operation's writes."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer as it is stored.

    ``headers`` is None when the answer is sealed (``body`` then holds headers and body, encrypted);
    ``body`` is None when it was too large to keep.
    """

    status: int
    headers: Headers | None
    body: bytes | None


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request asks for: to be the one that runs this operation.

    ``key`` is the hash over scope and key (32 bytes), ``name`` the route's, ``owner`` a random
    token of this attempt, ``ttl_seconds`` how long the finished record replays.
    """

    key: bytes
    name: str
    fingerprint: Fingerprint
    owner: str
    ttl_seconds: float


@dataclass(frozen=True, slots=True)
class Record:
    """A record as the store shows it.

    ``owner`` is the token of its latest attempt; ``expired`` is judged by the database's clock.
    """

    key: bytes
    name: str
    state: State
    fingerprint: Fingerprint
    attempt: int
    owner: str = ""
    expired: bool = False
    answer: Answer | None = None
