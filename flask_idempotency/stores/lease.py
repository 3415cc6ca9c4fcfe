"""The hold of an operation that is not atomic: a lease in its record."""

from __future__ import annotations

from threading import Lock
from typing import Any

from flask_idempotency.core.errors import LeaseLost, StoreUnavailable, sqlstate
from flask_idempotency.core.records import Claim, State, StoredResponse, step_values, steps_of

LOCK_NOT_AVAILABLE = "55P03"

_TRIES = 4


class Lease:
    """An operation that is not atomic and ours while its lease runs. No transaction is open.

    ``messages`` sends what is in its ``sql``.
    """

    def __init__(self, messages: Any, claim: Claim, *, attempt: int) -> None:
        self.attempt = attempt
        self._messages, self._claim, self._open = messages, claim, True
        self._lock = Lock()
        self._values = claim.values()

    def complete(self, response: StoredResponse, *, waits: bool = False) -> None:
        """Store the response; as failed if its status is 500 or more."""
        state = State.FAILED if response.status >= 500 else State.COMPLETED
        self._change(self._messages.sql.finish, **response.values(state=state, waits=waits))
        self._open = False

    def abandon(self) -> None:
        """End the lease now: nobody would learn more by waiting for its end.

        An exit in the statement of an atomic step leaves the row locked until the server notices that
        the connection is gone, which takes it half a second: longer than a statement waits for a lock.
        """
        if self._open:
            self._open = False
            for _ in range(_TRIES):
                try:
                    self._change(self._messages.sql.end)
                except LeaseLost:
                    return
                except StoreUnavailable as error:
                    if sqlstate(error.__cause__) != LOCK_NOT_AVAILABLE:
                        return
                else:
                    return

    def release(self) -> None:
        """Give the operation back."""
        self._change(self._messages.sql.release)
        self._open = False

    def extend(self, seconds: float) -> None:
        """Renew the lease."""
        self._change(self._messages.sql.extend, lease=seconds)

    def steps(self) -> dict[str, bytes | None]:
        """The results of the finished steps."""
        rows = self._messages.fetch(self._messages.sql.steps, {"key": self._claim.key})
        return {name: step.result for name, step in steps_of(rows[0][0] if rows else None).items()}

    def record(self, step: str, result: bytes | None) -> None:
        """Record a finished step and renew the lease, in one statement."""
        self._change(self._messages.sql.record_step, **step_values(step, self.attempt, result))

    def _change(self, template: str, **values: Any) -> None:
        """Send a statement that changes the record if it is ours. Raises ``LeaseLost`` if not.

        One after the other, as steps of several threads would wait for the row's lock in the server,
        and give up soon.
        """
        template = self._messages.alone + template
        with self._lock:
            changed = self._messages.change(template, {**self._values, **values})
        if changed == 0:
            raise LeaseLost
