"""The holds of operations in SQLite: the one transaction that writes, or a lease."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, exc

from flask_idempotency.core.errors import LeaseLost, NotAtomic, StoreUnavailable
from flask_idempotency.core.records import Claim, Record, StoredResponse
from flask_idempotency.core.rows import claim_values, record_of, response_values
from flask_idempotency.session.transaction import FIRST, OperationTransaction
from flask_idempotency.stores.admin import original
from flask_idempotency.stores.lease import Lease

from . import statements
from .messages import Messages
from .transaction import Writing


def seen(row: Sequence[Any]) -> Record:
    """A row of ``statements.LOOK``. Raises ``RecordBroken``."""
    return record_of(row[0], dict(zip(statements.FIELDS, row[1:], strict=True)))


class SqliteHold:
    """An atomic operation that is ours, or a step: the one transaction that writes."""

    def __init__(self, messages: Messages, claim: Claim, writing: Writing, *, attempt: int) -> None:
        self.attempt, self._open = attempt, True
        self._messages, self._claim = messages, claim
        self.transaction = OperationTransaction(writing.connection, writing.raw)

    @classmethod
    def open(
        cls, messages: Messages, claim: Claim, connection: Connection | None = None
    ) -> SqliteHold | None:
        """Begin the transaction in which a view or a step runs, if the record is still this claim's."""
        writing = messages.begin(connection)
        hold = None
        try:
            cursor = messages.execute(writing, statements.ATTEMPT, claim_values(claim))
            if (row := cursor.fetchone()) is not None:
                writing.execute(f"SAVEPOINT {FIRST}", {})
                writing.raw.guard()
                hold = cls(messages, claim, writing, attempt=row[0])
        finally:
            if hold is None:
                writing.abandon()
        return hold

    @property
    def connection(self) -> Connection:
        """The transaction's."""
        return self.transaction.connection

    def explain(self, error: BaseException | None) -> Exception | None:  # noqa: ARG002
        """Return what makes the operation void, whatever the error says."""
        transaction = self.transaction
        if transaction.broken is None and transaction.is_lost():
            return StoreUnavailable()
        if transaction.broken is None and not transaction.raw.driver.in_transaction:
            return NotAtomic(ENDED_BY_STATEMENT)
        return transaction.broken

    def complete(self, response: StoredResponse) -> None:
        """Store the response and commit."""
        self._finish((statements.FINISH, response_values(response)))

    def record(self, step: str, result: bytes) -> None:
        """Record the step and commit."""
        values = {"step": step, "attempt": self.attempt, "result": result}
        self._finish((statements.EXTEND, {}), (statements.RECORD_STEP, values))

    def abandon(self) -> None:
        """Roll back."""
        if self._open:
            self._open = False
            self.transaction.end()

    def _finish(self, *changes: tuple[str, dict[str, Any]]) -> None:
        messages, transaction = self._messages, self.transaction
        try:
            if found := self.explain(None):
                raise found
            transaction.flush()
            for template, values in changes:
                every = {**claim_values(self._claim), **values}
                if transaction.raw.send(messages.prepared(template), every).rowcount == 0:
                    raise LeaseLost
            transaction.commit("", {})
        except (exc.SQLAlchemyError, sqlite3.Error) as error:
            raise messages.error(original(error)) from error  # type: ignore[arg-type]
        finally:
            self.abandon()


ENDED_BY_STATEMENT = (
    "a statement of the view, or a trigger, ended the operation's transaction: inside an atomic"
    " operation use db.session.commit() and rollback(), and roll back after an error"
)


class SqliteLease(Lease):
    """A lease in SQLite."""

    statements = statements

    def record(self, step: str, result: bytes) -> None:
        """Record a finished step and renew the lease, in one transaction."""
        self.open_step().record(step, result)

    def open_step(self, connection: Connection | None = None) -> SqliteHold:
        """Begin a transaction for one step, on a session's connection or a new one."""
        hold = SqliteHold.open(self._messages, self._claim, connection)
        if hold is None:
            raise LeaseLost
        return hold
