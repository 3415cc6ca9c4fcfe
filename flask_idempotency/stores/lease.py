"""The hold of an operation that is not atomic: a lease in its record."""

from __future__ import annotations

from typing import Any

from flask_idempotency.core.errors import LeaseLost, StoreUnavailable, sqlstate
from flask_idempotency.core.records import Claim, StoredResponse
from flask_idempotency.core.rows import claim_values, response_values

LOCK_NOT_AVAILABLE = "55P03"

_TRIES = 4


class Lease:
    """An operation that is not atomic and ours while its lease runs. No transaction is open.

    ``statements`` is the module with a store's SQL, and ``messages`` sends it.
    """

    statements: Any

    def __init__(self, messages: Any, claim: Claim, *, attempt: int) -> None:
        self.attempt = attempt
        self._messages, self._claim, self._open = messages, claim, True
        self._values = claim_values(claim)

    def complete(self, response: StoredResponse, *, waits: bool = False) -> None:
        """Store the response; as failed if its status is 500 or more."""
        self._change(self.statements.FINISH, **response_values(response, waits=waits))
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
                    self._change(self.statements.END)
                except LeaseLost:
                    return
                except StoreUnavailable as error:
                    if sqlstate(error.__cause__) != LOCK_NOT_AVAILABLE:
                        return
                else:
                    return

    def release(self) -> None:
        """Give the operation back."""
        self._change(self.statements.RELEASE)
        self._open = False

    def extend(self, seconds: float) -> None:
        """Renew the lease."""
        self._change(self.statements.EXTEND, lease=seconds)

    def steps(self) -> dict[str, bytes]:
        """The results of the finished steps."""
        rows = self._messages.fetch(self.statements.STEPS, {"key": self._claim.key})
        return {name: bytes(result) for name, result in rows}

    def _change(self, template: str, **values: Any) -> None:
        """Send a statement that changes the record if it is ours. Raises ``LeaseLost`` if not."""
        if self._messages.change(template, {**self._values, **values}) == 0:
            raise LeaseLost
