"""The records in a transaction of somebody else's: of a test of the application, which rolls it back.

Everything is sent on the test's one connection and commits nothing; an operation is a savepoint.
Nothing locks against itself there, so a set of keys says which run.
"""

from __future__ import annotations

from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection

from flask_idempotency.core.records import Claim
from flask_idempotency.core.rows import claim_values
from flask_idempotency.drivers.any import statements as parts_of
from flask_idempotency.drivers.raw_connection import raw_of
from flask_idempotency.session.transaction import OperationTransaction

from .failures import record_error
from .holds import PostgresHold, PostgresLease
from .messages import Messages
from .store import PostgresRecords

_OURS = ("BEGIN", "COMMIT", "SET LOCAL", "SET TRANSACTION")
_SAVEPOINT = "idempotency_operation"
_LOCKED = (
    """SELECT owner, attempt, txid_current() FROM {table} WHERE key = %(key)s AND owner = %(owner)s"""
)

_running: WeakKeyDictionary[Connection, set[bytes]] = WeakKeyDictionary()


class MessagesInTest(Messages):
    """Sends statements of our own on one connection, each message in a savepoint."""

    def __init__(self, usual: Messages, connection: Connection) -> None:
        super().__init__(usual.engine, usual.table)
        self._own, self._usual, self._connection = self, usual, connection
        self._lock = RLock()

    def facts(self) -> Any:
        """Those of the application's database."""
        return self._usual.facts()

    def send(self, template: str, values: Any = None) -> tuple[list[tuple[Any, ...]], int]:
        """See :class:`Messages`."""
        raw = raw_of(self._connection.connection, self._connection.dialect)
        raw.continues = raw.is_unsure = True  # beside whoever has taken it
        text = ";\n".join(
            part for part, _ in parts_of(self.prepared(template)) if not part.startswith(_OURS)
        )
        with self._lock:
            raw.send("SAVEPOINT idempotency_message")
            try:
                answer = raw.send(text, values)
                raw.send("RELEASE idempotency_message")
            except self.Error as error:
                raw.send("ROLLBACK TO idempotency_message")
                raise record_error(error, self.table.fullname, self.Error) from error
        return answer


class HoldInTest(PostgresHold):
    """An operation, or a step, as a savepoint of a test's transaction."""

    def __init__(
        self, messages: MessagesInTest, claim: Claim, connection: Connection, attempt: int, xid: int
    ) -> None:
        self._messages, self._claim, self.attempt = messages, claim, attempt
        self._began, self._open, self._is_done = 0.0, True, False
        self._values = {**claim_values(claim), "xid": xid, "synchronous_commit": "on"}
        raw = raw_of(connection.connection, connection.dialect)
        raw.take(continues=True)
        raw.send(f"SAVEPOINT {_SAVEPOINT}")
        self.transaction = OperationTransaction(
            connection, raw, deferred=messages.facts().deferred, first=None
        )
        self._key = claim.key

    @classmethod
    def of(cls, messages: MessagesInTest, claim: Claim, connection: Connection) -> HoldInTest | None:
        """Hold a record that is this claim's, if nobody in this test does."""
        running = _running.setdefault(connection, set())
        rows = messages.fetch(_LOCKED, claim_values(claim))
        if not rows or claim.key in running:
            return None
        running.add(claim.key)
        return cls(messages, claim, connection, int(rows[0][1]), int(rows[0][2]))

    def _finish(self, template: str, values: dict[str, Any]) -> None:
        try:
            if found := self.explain(None):
                raise found
            self.transaction.flush()
            self._messages.change(template, {**self._values, **values})
            self._is_done = True
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Undo what the view did, unless it is done. Its savepoint stays: others may be open in it."""
        if self._open:
            self._open = False
            connection, raw = self.transaction.connection, self.transaction.raw
            self.transaction.leave()
            if not (self._is_done or self.transaction.is_lost()):
                raw.send(f"ROLLBACK TO {_SAVEPOINT}")
            raw.leave()
            _running[connection].discard(self._key)


class _LeaseInTest(PostgresLease):
    def open_step(self, connection: Connection | None = None) -> PostgresHold:  # noqa: ARG002
        """See :class:`PostgresLease`."""
        hold = HoldInTest.of(self._for_steps, self._claim, self._for_steps._connection)  # type: ignore[attr-defined, arg-type]  # noqa: SLF001
        assert hold is not None  # noqa: S101 -- a test takes nothing over in the middle of a step
        return hold


class RecordsInTest(PostgresRecords):
    """The records of an application whose session is bound to a test's connection."""

    def __init__(self, records: PostgresRecords, connection: Connection) -> None:
        messages = MessagesInTest(records.messages, connection)
        self._find = lambda: messages
        self._in_test, self._connection = messages, connection

    def _hold(self, claim: Claim, first: str, **more: Any) -> PostgresHold | None:
        if claim.key in _running.get(self._connection, ()):
            return None
        self._in_test.change(first, {**claim_values(claim), **more})
        return HoldInTest.of(self._in_test, claim, self._connection)

    def lease_of(self, claim: Claim, attempt: int) -> PostgresLease:
        """See :class:`PostgresRecords`."""
        return _LeaseInTest(self._in_test, claim, attempt=attempt)
