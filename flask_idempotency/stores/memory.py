"""Records in the memory of one process: for tests and first steps.

They are lost when the process ends, and no other process sees them. Inside it everything works as with
the other stores: the view's writes commit together with the response, in the application's database.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from sqlalchemy import Connection, Engine

from flask_idempotency.core.errors import LeaseLost
from flask_idempotency.core.machine import Situation, situation
from flask_idempotency.core.records import Claim, Record, State, StoredResponse

from .admin import OutOfReach
from .engine_transaction import BorrowedTransaction

Clock = Callable[[], float]


@dataclass
class _Entry:
    """A record, when it began, expires and was released, its lease, finished steps, and holder."""

    record: Record
    began: float
    expires: float
    lease: float | None = None
    released: float | None = None
    steps: dict[str, bytes] = field(default_factory=dict)
    holder: weakref.ref[Any] | None = None

    def is_held(self) -> bool:
        holder = self.holder() if self.holder else None
        return holder is not None and holder.is_open


class MemoryAdmin:
    """What an operator, who is in another process, can do with records in memory: nothing."""

    def __init__(self, records: MemoryRecords) -> None:
        self.purge_alone = records.purge

    def __getattr__(self, verb: str) -> NoReturn:
        raise OutOfReach(
            "the store 'memory' keeps its records in the process that serves the requests, where a"
            " command, which is another process, cannot reach them: set IDEMPOTENCY_STORE"
        )


class MemoryRecords:
    """The records of one process. ``clock`` gives seconds that never go back."""

    atomic = True
    can_observe = True

    def __init__(self, engine: Engine, clock: Clock = time.monotonic) -> None:
        self.engine, self.clock = engine, clock
        self._entries: dict[bytes, _Entry] = {}
        self.changed = threading.Condition()

    def admin(self) -> Any:
        """Return the operator's side."""
        return MemoryAdmin(self)

    def look(self, key: bytes) -> Record | None:
        """The record."""
        with self.changed:
            entry = self._entries.get(key)
            return None if entry is None else self.seen(entry)

    def claim(self, claim: Claim) -> MemoryHold | MemoryLease | None:
        """Insert the record and hold it."""
        with self.changed:
            if claim.key in self._entries:
                return None
            entry = self._entries[claim.key] = _Entry(_new(claim, attempt=1), self.clock(), 0.0)
            hold = self._hold(entry, claim)
        return hold.opened()

    def take_over(self, claim: Claim, as_seen: Record) -> MemoryHold | MemoryLease | None:
        """Hold a record that nobody else does, as its next attempt."""
        with self.changed:
            entry = self._entries.get(claim.key)
            if entry is None or entry.record.owner != as_seen.owner or entry.is_held():
                return None
            now = self.seen(entry)
            if situation(now) in (Situation.LEASED, Situation.COMPLETED):
                return None
            if now.expired:
                entry.steps.clear()
                entry.began = self.clock()
            entry.record = _new(claim, attempt=1 if now.expired else now.attempt + 1)
            hold = self._hold(entry, claim)
        return hold.opened()

    def wait(self, key: bytes, seconds: float) -> None:
        """Return when the record's present holder has ended."""
        with self.changed:
            entry = self._entries.get(key)
            if entry is not None:
                self.changed.wait_for(lambda: not entry.is_held(), seconds)

    def purge(self, batch: int) -> Iterator[int]:
        """Forget expired records, at most ``batch`` at once, until none is left; how many each time."""
        while deleted := self._purge(batch):
            yield deleted

    def _purge(self, batch: int) -> int:
        with self.changed:
            expired = [
                key
                for key, entry in self._entries.items()
                if self.seen(entry).expired and not entry.is_held()
            ][:batch]
            for key in expired:
                del self._entries[key]
        return len(expired)

    def seen(self, entry: _Entry) -> Record:
        """The record as it is now."""
        now = self.clock()
        expired = entry.expires <= now and entry.lease is None
        left = None if entry.lease is None else entry.lease - now
        released = None if entry.released is None else now - entry.released
        age = now - entry.began
        return replace(entry.record, expired=expired, lease_left=left, age=age, released=released)

    def _hold(self, entry: _Entry, claim: Claim) -> MemoryHold | MemoryLease:
        entry.expires = self.clock() + claim.ttl_seconds
        entry.lease = entry.released = None
        if claim.lease_seconds is not None:
            entry.lease = self.clock() + claim.lease_seconds
            return MemoryLease(self, entry, claim)
        hold = MemoryHold(self, entry, claim)
        entry.holder = weakref.ref(hold)
        return hold


class _Held:
    """What both kinds of holds have in common."""

    def __init__(self, records: MemoryRecords, entry: _Entry, claim: Claim) -> None:
        self.attempt = entry.record.attempt
        self._records, self._entry, self._claim = records, entry, claim

    def _store(self, response: StoredResponse, state: State) -> None:
        """Finish the record, if it is still ours. The caller has the lock."""
        self._check()
        entry, claim = self._entry, self._claim
        entry.record = replace(entry.record, state=state, response=response)
        entry.expires, entry.lease = self._records.clock() + claim.ttl_seconds, None
        entry.released = None
        self._records.changed.notify_all()

    def _check(self) -> None:
        record = self._entry.record
        if record.owner != self._claim.owner or record.state is not State.IN_PROGRESS:
            raise LeaseLost


class MemoryHold(_Held):
    """An atomic operation, or a step: a transaction on the application's database."""

    is_open = True
    _transaction: Any = None  # until it has begun

    def opened(self) -> MemoryHold:
        """Begin the transaction; not while the records are locked, as it may have to wait."""
        try:
            self._transaction = BorrowedTransaction(self._records.engine)
            self._transaction.guard()
        except BaseException:
            self.abandon()
            raise
        return self

    @property
    def connection(self) -> Connection:
        """The transaction's."""
        connection: Connection = self._transaction.connection
        return connection

    def explain(self, error: BaseException | None) -> Exception | None:  # noqa: ARG002
        """No error means more than it says."""
        return None

    def complete(self, response: StoredResponse) -> None:
        """Commit, then store the response: nobody takes over between, as the record is held."""
        self._commit(lambda: self._store(response, State.COMPLETED))

    def record(self, step: str, result: bytes) -> None:
        """Commit, then record the step."""

        def keep() -> None:
            self._entry.steps[step] = result
            self._entry.lease = self._records.clock() + (self._claim.lease_seconds or 0)

        self._commit(keep)

    def abandon(self) -> None:
        """Roll back, and let the record go."""
        if self._transaction is not None:
            self._transaction.abandon()
        with self._records.changed:
            self.is_open = False
            self._records.changed.notify_all()

    def _commit(self, then: Callable[[], None]) -> None:
        try:
            self._transaction.raise_if_ended()
            self._transaction.commit()
            with self._records.changed:
                then()
        finally:
            self.abandon()


class MemoryLease(_Held):
    """An operation that is not atomic."""

    _open = True

    def opened(self) -> MemoryLease:
        """There is nothing to begin."""
        return self

    def complete(self, response: StoredResponse, *, waits: bool = False) -> None:
        """Store the response."""
        with self._records.changed:
            self._store(response, State.FAILED if response.status >= 500 else State.COMPLETED)
            if waits and self._entry.steps:
                self._entry.lease = self._records.clock()
            self._open = False

    def release(self) -> None:
        """Give the operation back."""
        with self._records.changed:
            self._check()
            now, entry, self._open = self._records.clock(), self._entry, False
            entry.lease = entry.released = now if entry.steps else None
            entry.expires = now + self._claim.ttl_seconds
            self._records.changed.notify_all()

    def abandon(self) -> None:
        """End the lease now."""
        with self._records.changed:
            if self._open and self._entry.record.owner == self._claim.owner:
                self._entry.lease = self._records.clock()
            self._open = False

    def extend(self, seconds: float) -> None:
        """Renew the lease."""
        with self._records.changed:
            self._check_lease()
            self._entry.lease = max(self._entry.lease or 0.0, self._records.clock() + seconds)

    def steps(self) -> dict[str, bytes]:
        """The finished steps."""
        with self._records.changed:
            return dict(self._entry.steps)

    def record(self, step: str, result: bytes) -> None:
        """Record a finished step."""
        with self._records.changed:
            self.extend(self._claim.lease_seconds or 0.0)
            self._entry.steps[step] = result

    def open_step(self) -> MemoryHold:
        """A transaction for one step; nobody takes over meanwhile."""
        with self._records.changed:
            self._check_lease()
            hold = MemoryHold(self._records, self._entry, self._claim)
            self._entry.holder = weakref.ref(hold)
        return hold.opened()

    def _check_lease(self) -> None:
        """Raise ``LeaseLost`` also for what was released: it gets no lease again."""
        self._check()
        if self._entry.lease is None or self._entry.released is not None:
            raise LeaseLost


def _new(claim: Claim, *, attempt: int) -> Record:
    return Record(claim.key, claim.name, State.IN_PROGRESS, claim.fingerprint, attempt, claim.owner)
