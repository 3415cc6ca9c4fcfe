"""What the engine needs from outside, as protocols. One verb is one atomic act on a server.

Every verb may raise :class:`~flask_idempotency.StoreUnavailable`: then the outcome is unknown, and
asking again later is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, Protocol

from .records import Claim, Record, StoredResponse


class Hold(Protocol):
    """An operation that is ours until the hold ends.

    That of an atomic operation is its ``transaction``: the record's row is locked until the hold ends.
    ``complete`` commits the response together with everything written in it. It also raises
    ``NotAtomic`` if the transaction is no longer the one that holds the row, and
    ``TransactionConflict`` if the database rolled it back. After an error nothing was committed, unless
    the outcome is unknown. ``abandon`` rolls everything back and returns the connection clean.
    ``explain(error)`` returns what an error that left the view means for the operation; None: nothing
    special.
    """

    attempt: int
    """1 for the first attempt, one more for each take-over; committed before the view runs."""

    def complete(self, response: StoredResponse) -> None:
        """Store the response; returns only once that is durable.

        Raises ``RequestInProgress`` if another attempt took the operation over, and
        ``StoreUnavailable`` if the outcome is unknown. See the two kinds of holds for more.
        """

    def abandon(self) -> None:
        """End without a response. May be called at any time, and twice."""


class Lease(Hold, Protocol):
    """The hold of an operation that is not atomic: nobody else may run it while the lease runs.

    Every verb that writes compares the owner's token in the same statement, and raises ``LeaseLost``
    without writing anything if another attempt has taken the operation over. What is finished or
    released gets no lease again: then ``extend`` and ``record`` raise it, too. An expired lease that
    nobody took over is still its holder's. ``complete(response, waits=True)`` stores a failure that
    somebody must decide about: if a step has finished, it does not expire, as its lease is over.
    ``abandon`` ends the lease at once, with the outcome unknown; it never raises, and changes nothing
    after ``complete`` and ``release``.
    """

    def release(self) -> None:
        """Give the operation back without a response: the next retry runs it again.

        Attempts count on, steps stay, and the retention begins anew.
        """

    def extend(self, seconds: float) -> None:
        """Renew the lease for at least ``seconds`` from now on."""

    def steps(self) -> dict[str, bytes | None]:
        """The results of the recorded steps, by name; None for one that could not be stored."""

    def record(self, step: str, result: bytes | None) -> None:
        """Record a finished step, durably, and renew the lease. Sent twice, it is there once."""

    def open_step(self, connection: Any = None) -> Any:
        """Open a transaction for a step whose writes commit with it, or continue a connection's.

        It locks the record's row, so nobody takes over meanwhile. Its own ``record`` commits it all;
        that and ``abandon`` are as the hold's of an atomic operation. Raises ``NotAtomic`` if the store
        has leases only, and ``TransactionConflict`` if other changes of the record come in between
        again and again.
        """


class Records(Protocol):
    """The truth: one record for each key."""

    atomic: bool
    """True if there are holds of transactions: writes that commit together with a record.

    False for a store with leases only: it rejects atomic routes, so every claim names a lease.
    """

    def briefly(self) -> Records:
        """The same records for requests that are only observed: past the pool of the application.

        Nothing there waits for longer than a request could do without.
        """

    one_writer: bool
    """True if nobody else can write while somebody does, not even a record beside a view."""

    def can_hold(self, name: str) -> bool:
        """Return True if the store's encoding has all characters of ``name``."""

    def look(self, key: bytes) -> Record | None:
        """The record, without a lock, in one plain read."""

    def claim(self, claim: Claim) -> Hold | Record | None:
        """Insert the record and hold it; or the record that is there, None where that was not read.

        The hold is a :class:`Lease` if the claim names one, otherwise that of a transaction.
        """

    def take_over(self, claim: Claim, as_seen: Record) -> Hold | Record | None:
        """Lock the row ``as_seen`` if nobody holds it, and make it the next attempt.

        An expired record starts afresh, as attempt 1 and without steps. If somebody holds it, this
        returns what :meth:`claim` does then.
        """

    def admin(self) -> Any:
        """Return the operator's side: see :mod:`flask_idempotency.stores.admin`."""

    def wait(self, key: bytes, seconds: float) -> None:
        """Return when the transaction that holds the record has ended, or after ``seconds``.

        A store with leases only may return at once: the engine looks at a lease again by itself.
        """


class Glance(Enum):
    """What the fast lock knows."""

    MINE = "the lock is ours: nobody had it, and nobody finished lately"
    BUSY = "a young request of the same fingerprint is running"
    ASK = "anything else: only the records can tell"


class Lock:
    """A fast lock in front of the records. It may forget or lie; it never raises.

    This one knows nothing, and whoever asks is most likely the first: the records decide alone.
    """

    def acquire(self, claim: Claim) -> Glance:  # noqa: ARG002
        """Take the lock if it is free, in one round trip."""
        return Glance.MINE

    def release(self, claim: Claim) -> None:
        """Release the lock if it is still this claim's, in one round trip."""

    def finish(self, claim: Claim) -> Callable[[], object]:  # noqa: ARG002
        """The operation is about to have its response: retries shall go straight to the records.

        Begins one round trip; what it returns waits for its end. Between the two the response is
        stored: then the trip costs no time, and a client that has its response meets no lock.
        """
        return bool

    def forget(self, keys: Iterable[bytes]) -> None:
        """Delete what there is of some keys: of records that an operator erases."""

    def examine(self) -> Iterator[Any]:
        """Check the lock for an operator, and tell each finding; nothing where there is no lock."""
        return iter(())
