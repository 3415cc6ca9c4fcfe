"""What the commands of ``flask idempotency`` need of a store, whichever it is.

Each store gives its :class:`Admin` with the method ``admin()``.
Nothing here reads a response, and of a key's hash only as many digits as tell records apart. A stored
time that Python cannot represent stays text.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal, Protocol

from sqlalchemy import exc

from flask_idempotency.core.errors import IdempotencyError, StoreUnavailable, sqlstate
from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.keys import KEY_BYTES
from flask_idempotency.core.ports import Records
from flask_idempotency.core.records import Claim, Record, State, StoredResponse, steps_of

Time = datetime | str
Stored = bytes  # by another name: `bytes` is that of a field below
Hash = bytes


CREATE = "run `flask idempotency create-table`"
MIGRATE = "make a migration (the table is part of db.metadata)"
ADD = f"{CREATE}, or {MIGRATE}"
"""What to do when a table or an index is missing."""

REBUILD = f"{MIGRATE}; where its records are not needed, drop the table and {CREATE}"
"""What to do when a table is there, but not as it should be."""

LOCKED = "the table is locked, by an ALTER TABLE for instance"
UNLOCK = "run this again when the migration has ended; pg_stat_activity shows who holds it"
REJECTS = (
    "let the table take what a request writes: a column of your own needs a default, and no constraint"
    " or trigger may refuse a row"
)


class NothingToDo(IdempotencyError):
    """A store does this by itself. That is no failure: the command says so and succeeds."""


@dataclass(frozen=True, slots=True)
class Tally:
    """How many records one operation has in one state."""

    operation: str
    state: str
    count: int


CAPPED = 10_000
"""How far :class:`Overview` counts what should be few: leases and expired records. Enough to see that
something is wrong, in a few milliseconds."""

USUAL = 2
"""How many attempts an operation may take unnoticed: its worker died, and the next one goes on."""

WAITING = ("interrupted", "failed")
"""The states of operations about which somebody must decide, as long as they do not expire."""


@dataclass(frozen=True, slots=True)
class Overview:
    """What there is at a glance, cheap enough to ask for every few seconds.

    ``tallies`` are estimates if ``estimated``, except those of records with a lease: interrupted
    operations are always counted. ``running`` counts leases that have not ended, ``interrupted`` the
    others, with failures that wait for an operator; ``interrupted_seconds`` is how long ago the first
    attempt at the oldest of those began, or of what runs for more than the second time: no client that
    tries in vain makes it younger. ``expired`` counts records
    that wait for a purge, the oldest since ``expired_seconds``. These three end at :data:`CAPPED`.
    """

    tallies: list[Tally]
    estimated: bool
    running: int
    interrupted: int
    interrupted_seconds: float | None
    expired: int
    expired_seconds: float | None

    @property
    def total(self) -> int:
        """How many records there are."""
        return sum(tally.count for tally in self.tallies)

    @property
    def by_state(self) -> dict[str, int]:
        """How many records each state has."""
        counts: Counter[str] = Counter()
        for tally in self.tallies:
            counts[tally.state] += tally.count
        return dict(counts)


@dataclass(frozen=True, slots=True)
class Line:
    """One record, without its key and its response.

    ``hash`` is the key's, by which its record is found. ``version`` is another one after each attempt,
    lease, end and decision. It holds the owner's token, so it is not shown.
    """

    hash: Hash = field(repr=False)
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


@dataclass(frozen=True, slots=True)
class StepLine:
    """One finished step. ``result`` is as stored, sealed or not; None if it is gone."""

    name: str
    attempt: int
    bytes: int
    finished: Time
    result: Stored | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """What an operator ``did`` to a record, who and why; ``at`` is None before the store notes it."""

    by: str
    did: str
    why: str
    at: Time | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of an interrupted or failed operation, as an operator decided.

    ``response`` is stored as it is, sealed or not; None lets the operation be run again. Either lives
    for at least ``ttl_seconds``, the ``entry`` is noted, and the new ``owner`` fences off whoever held
    the record. ``seen`` is the :attr:`Line.version` about which the operator decided: what has changed
    since is left alone. ``anew``: its age begins anew.
    """

    key: bytes
    owner: str
    ttl_seconds: float
    entry: AuditEntry
    seen: str
    response: StoredResponse | None = None
    anew: bool = False

    @property
    def state(self) -> State:
        """The state in which it leaves the record."""
        if self.response is None:
            return State.IN_PROGRESS
        return State.FAILED if self.response.status >= 500 else State.COMPLETED


@dataclass(frozen=True, slots=True)
class Belongings:
    """What belongs to a scope: the ``keys`` of records that have no lease, and the rest by state."""

    keys: list[bytes]
    left: dict[str, int]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, and what to do about it."""

    level: Literal["ok", "advice", "FAILED"]
    subject: str
    text: str
    remedy: str = ""


def finding(
    good: object,
    subject: str,
    text: str,
    bad: str,
    remedy: str,
    level: Literal["advice", "FAILED"] = "FAILED",
) -> Finding:
    """Make the finding of a check: ``text`` if it is good, otherwise what is ``bad`` and the remedy."""
    return Finding("ok", subject, text) if good else Finding(level, subject, bad, remedy)


class Admin(Protocol):
    """A store as an operator needs it, outside of any request.

    ``start`` is the beginning of a key's hash, or all of it. Everything may raise ``StoreUnavailable``,
    ``ConfigurationError``, and :class:`NothingToDo` where the store needs no such thing.
    """

    remedy: str
    """What to do if the trial finds the store unavailable."""

    def overview(self) -> Overview:
        """Return what there is at a glance. Reads no more of a large table than of a small one."""

    def newest(self, name: str | None, state: str | None, limit: int, tail: bytes = b"") -> list[Line]:
        """Return the ``limit`` newest records, of one operation and in one state if these are given.

        With ``tail`` only those whose key ends so: see :meth:`belonging`.
        """

    def leased(self, state: str, limit: int) -> list[Line]:
        """Return the ``limit`` oldest records with a lease: ``"in_progress"``, or ``"interrupted"``."""

    def starting(self, start: bytes) -> list[Line]:
        """Return the records whose key's hash starts so, at most two: two are already ambiguous."""

    def steps(self, start: bytes) -> list[StepLine]:
        """Return the finished steps of such a record, the earliest first, with their results."""

    def sealings(self) -> Counter[bytes | None]:
        """Count responses and results of steps that have not expired, by how they begin if encrypted.

        That is ``SEALED`` and the id of the key; None for those that are not encrypted. Reads all.
        """

    def audit(self, start: bytes) -> list[AuditEntry]:
        """Return what operators did to such a record since it was created, the earliest first."""

    def note(self, key: bytes, entry: AuditEntry) -> bool:
        """Note durably what an operator did to a record; False if it is gone, or somebody holds it."""

    def settle(self, verdict: Verdict) -> bool:
        """End what is interrupted or failed as an operator decided, durably.

        Returns whether it was done: not if the record is neither or has changed since it was seen, or
        if somebody works on it.
        """

    def belonging(self, tail: bytes, name: str | None) -> Belongings:
        """Return the records whose key ends with ``tail``, of one operation if it is given.

        Reads all of the table's keys: a scope has no index.
        """

    def erase(self, keys: list[bytes], seen: str | None = None) -> int:
        """Delete these records, durably and in one transaction; return how many.

        Leaves those in progress: with a lease, or held by somebody. With ``seen``, a
        :attr:`Line.version`, there is one key, and its record is left if it has another version.
        """

    def purge(self, batch: int) -> Iterator[int]:
        """Delete expired records, at most ``batch`` in each transaction, until none is left.

        Yields how many each transaction has deleted, after its commit. Skips a record that somebody
        holds.
        """

    def purge_briefly(self, batch: int) -> int | None:
        """Delete at most ``batch`` expired records, within 100 ms; return how many.

        None, and none is deleted, if that takes longer. Waits for nobody, and leaves the last
        connection of a pool to others.
        """

    def create(self) -> list[str]:
        """Create what is missing, and say what was done. Never alters or drops a column."""

    def examine(self) -> Iterator[Finding]:
        """Check the server, without writing. Ends early if it cannot be reached."""

    def trial(self) -> AbstractContextManager[Any]:
        """Claim a record of its own as a request would, and delete it at the end.

        Yields the transaction in which a view would run; None if the store has leases only.
        """


TRIAL = "flask idempotency check"
"""The name of the record that a check claims."""

_TRIAL_SECONDS = 60.0  # a check that is killed leaves a record, which a purge deletes later


def trial_claim() -> Claim:
    """Return a short-lived claim to a key that nobody else uses."""
    key, owner = secrets.token_bytes(KEY_BYTES), secrets.token_urlsafe(16)
    return Claim(key, TRIAL, Fingerprint(0, bytes(16)), owner, _TRIAL_SECONDS)


@contextmanager
def trying(records: Records, forget: Callable[[Claim], object]) -> Iterator[tuple[Claim, Any]]:
    """Claim a record of its own as a request would; end the hold and ``forget`` the record afterwards.

    Raises what a request would raise.
    """
    claim = trial_claim()
    try:
        hold = records.claim(claim)
        if hold is None or isinstance(hold, Record):
            raise StoreUnavailable(LOCKED)
        try:
            yield claim, hold
        finally:
            hold.abandon()
    finally:
        with suppress(StoreUnavailable):
            forget(claim)


def step_lines(text: str | None) -> list[StepLine]:
    """The finished steps of a stored text of them, the earliest first. Raises ``RecordBroken``."""
    found = [
        StepLine(name, step.attempt, len(step.result or b""), read_time(step.at), step.result)
        for name, step in steps_of(text).items()
    ]
    return sorted(found, key=lambda step: str(step.finished))


def read_audit(text: str | bytes | None) -> list[AuditEntry]:
    """The entries of a stored list of them.

    Whoever writes to the store may write anything there: what is no entry is left out, alone.
    """
    try:
        entries = json.loads(text or "[]", parse_int=float)  # int() refuses some thousand digits
    except (RecursionError, ValueError):
        return []
    found = map(_entry, entries if isinstance(entries, list) else ())
    return [entry for entry in found if entry is not None]


def _entry(stored: Any) -> AuditEntry | None:
    with suppress(KeyError, TypeError, ValueError):
        entry = AuditEntry(stored["by"], stored["did"], stored["why"], read_time(stored["at"]))
        "".join([entry.by, entry.did, entry.why, str(entry.at)]).encode()  # texts that can be shown
        return entry
    return None


def read_time(text: Any) -> Time:
    """A time as text, in UTC. Falls back to the text: whoever writes to the table may write any."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)
    except (TypeError, ValueError):
        return str(text)


def original(error: BaseException | None) -> BaseException | None:
    """Return the driver's error inside SQLAlchemy's."""
    return error.orig if isinstance(error, exc.DBAPIError) else error


def remedy_of(error: BaseException, allow: str) -> str:
    """Say what to do about a write that failed; ``allow`` if perhaps only a right is missing."""
    code = sqlstate(original(error.__cause__)) or ""
    if code == "55P03":  # lock not available
        return UNLOCK
    return REJECTS if code.startswith(("22", "23", "P0")) else allow  # data, constraints, PL/pgSQL


def reason(error: BaseException) -> str:
    """Why something failed, in one line: the driver's own words where there are any."""
    found = original(error.__cause__) or error
    return next(iter(str(found).strip().splitlines()), type(found).__name__)
