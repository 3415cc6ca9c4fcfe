"""The hold of an operation that is not atomic: a lease in its record."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flask_idempotency.core.errors import LeaseLost, StoreUnavailable
from flask_idempotency.core.records import Claim, StoredResponse
from flask_idempotency.stores.postgres import lease_statements

from .rows import claim_values, response_values

if TYPE_CHECKING:
    from flask_idempotency.stores.postgres.records import PostgresHold, PostgresRecords


class Lease:
    """An operation that is not atomic and ours while its lease runs. No transaction is open.

    ``statements`` is the module with a store's SQL.
    """

    statements: Any

    def __init__(self, claim: Claim, *, attempt: int) -> None:
        self.attempt = attempt
        self._open, self._claim = True, claim

    def complete(self, response: StoredResponse) -> None:
        """Store the answer, of a status of 500 or more as failed."""
        self._change(self.statements.FINISH, **response_values(response))
        self._open = False

    def abandon(self) -> None:
        """End the lease now: who would have to wait for its end knows no more then."""
        if self._open:
            self._open = False
            with suppress(LeaseLost, StoreUnavailable):
                self._change(self.statements.END)

    def release(self) -> None:
        """Give the operation back."""
        self._change(self.statements.RELEASE)
        self._open = False

    def extend(self, seconds: float) -> None:
        """Renew the lease."""
        self._change(self.statements.EXTEND, lease=seconds)

    def _change(self, template: str, **values: Any) -> None:
        """Send a statement that changes the record if it is ours. Raises ``LeaseLost`` if not."""
        raise NotImplementedError


class PostgresLease(Lease):
    """A lease in PostgreSQL."""

    statements = lease_statements

    def __init__(self, records: PostgresRecords, claim: Claim, *, attempt: int) -> None:
        super().__init__(claim, attempt=attempt)
        self._records = records

    def steps(self) -> dict[str, bytes]:
        """The results of the finished steps."""
        rows, _ = self._records.fetch(lease_statements.STEPS, {"key": self._claim.key})
        return {name: bytes(result) for name, result in rows}

    def record(self, step: str, result: bytes) -> None:
        """Record a finished step and renew the lease, in one statement."""
        self._change(lease_statements.RECORD_STEP, step=step, result=result, attempt=self.attempt)

    def open_step(self) -> PostgresHold:
        """A transaction that holds the row, for one step."""
        hold = self._records.hold(lease_statements.BEGIN_STEP, self._claim, claim_values(self._claim))
        if hold is None:
            raise LeaseLost
        return hold

    def _change(self, template: str, **values: Any) -> None:
        if self._records.run(template, {**claim_values(self._claim), **values})[1] == 0:
            raise LeaseLost
