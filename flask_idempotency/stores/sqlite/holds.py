"""The holds of operations in SQLite: the one transaction that writes, or a lease."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection

from flask_idempotency.core.errors import LeaseLost
from flask_idempotency.core.machine import Situation, situation
from flask_idempotency.core.records import Claim, Record, StoredResponse
from flask_idempotency.core.rows import claim_values, record_of, response_values
from flask_idempotency.stores.engine_transaction import BorrowedTransaction
from flask_idempotency.stores.lease import Lease

from . import statements
from .messages import Messages


def seen(row: Sequence[Any]) -> Record:
    """A row of ``statements.LOOK``. Raises ``RecordBroken``."""
    return record_of(row[0], dict(zip(statements.FIELDS, row[1:], strict=True)))


class SqliteHold:
    """An atomic operation that is ours, or a step: the one transaction that writes."""

    def __init__(
        self, messages: Messages, claim: Claim, transaction: BorrowedTransaction, *, attempt: int
    ) -> None:
        self.attempt = attempt
        self._messages, self._claim, self._transaction = messages, claim, transaction

    @classmethod
    def open(cls, messages: Messages, claim: Claim) -> SqliteHold | None:
        """Begin the transaction in which a view or a step runs, if the record is still this claim's."""
        transaction = messages.begin()
        hold = None
        try:
            cursor = messages.execute(transaction, statements.ATTEMPT, claim_values(claim))
            if (row := cursor.fetchone()) is not None:
                transaction.guard()
                hold = cls(messages, claim, transaction, attempt=row[0])
        finally:
            if hold is None:
                transaction.abandon()
        return hold

    @property
    def connection(self) -> Connection:
        """The transaction's."""
        return self._transaction.connection

    def explain(self, error: BaseException | None) -> Exception | None:  # noqa: ARG002
        """No error means more than it says."""
        return None

    def complete(self, response: StoredResponse) -> None:
        """Store the response and commit."""
        self._finish((statements.FINISH, response_values(response)))

    def record(self, step: str, result: bytes) -> None:
        """Record the step and commit."""
        values = {"step": step, "attempt": self.attempt, "result": result}
        self._finish((statements.EXTEND, {}), (statements.RECORD_STEP, values))

    def hold_items(self, claims: Sequence[Claim]) -> dict[bytes, tuple[Record, bool]]:
        """Insert what is missing. This is the one transaction that writes, so it holds all of them."""
        found = {}
        for claim in claims:
            values = {**claim_values(claim), "seen": None}
            record = self._look(values)
            if record is not None and record.expired:
                self._run(statements.ERASE_STEPS, values)
                self._run(statements.ERASE, values)
            self._run(statements.INSERT, values)
            if self._run(statements.TOO_LATE, values).fetchone() is not None:
                self._run(statements.ERASE, values)
            record = self._look(values)
            if record is not None:
                found[claim.key] = record, situation(record) is Situation.IN_PROGRESS
        return found

    def complete_items(self, items: Sequence[tuple[Claim, Record, StoredResponse]]) -> None:
        """Store their responses."""
        for claim, record, response in items:
            values = {**claim_values(claim), **response_values(response), "seen": record.owner}
            if record.owner != claim.owner:
                self._run(statements.TAKE_OVER, values)
            self._run(statements.FINISH, values)

    def _look(self, values: dict[str, Any]) -> Record | None:
        row = self._run(statements.LOOK, values).fetchone()
        return None if row is None else seen(row)

    def _run(self, template: str, values: dict[str, Any]) -> Any:
        return self._messages.execute(self._transaction, template, values)

    def abandon(self) -> None:
        """Roll back."""
        self._transaction.abandon()

    def _finish(self, *changes: tuple[str, dict[str, Any]]) -> None:
        try:
            self._transaction.raise_if_ended()
            for template, values in changes:
                if self._run(template, {**claim_values(self._claim), **values}).rowcount == 0:
                    raise LeaseLost
            self._transaction.commit()
        finally:
            self.abandon()


class SqliteLease(Lease):
    """A lease in SQLite."""

    statements = statements

    def record(self, step: str, result: bytes) -> None:
        """Record a finished step and renew the lease, in one transaction."""
        self.open_step().record(step, result)

    def open_step(self) -> SqliteHold:
        """Begin a transaction for one step."""
        hold = SqliteHold.open(self._messages, self._claim)
        if hold is None:
            raise LeaseLost
        return hold
