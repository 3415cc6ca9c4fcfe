"""The holds of operations in SQLite: the one transaction that writes, or a lease."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection

from flask_idempotency.core.errors import LeaseLost
from flask_idempotency.core.records import Claim, Record, StoredResponse
from flask_idempotency.core.rows import claim_values, record_of, response_values
from flask_idempotency.stores.lease import Lease

from . import statements
from .messages import Messages
from .transaction import BorrowedTransaction


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
