"""The attempt at an atomic operation: the view's writes and its response commit together, or not."""

from __future__ import annotations

from flask import Response

from flask_idempotency.core.errors import NotAtomic, Problem
from flask_idempotency.core.records import StoredResponse
from flask_idempotency.core.storable import is_stored_by_default
from flask_idempotency.session.operation import OpenTransaction

from .attempt import Attempt, raise_again
from .signals import conclude, operation_rejected


class AtomicAttempt(Attempt):
    """Runs the view inside the transaction that holds the record's row."""

    _joined: OpenTransaction = None  # type: ignore[assignment]  # until it is open

    def fail(self, error: Exception) -> Response:
        """Respond as the application's error handlers do.

        Raises what they leave unhandled, after everything is rolled back.
        """
        self.note_failure(error)
        try:
            result = self._handle(error)
        except Exception as left:
            self._refuse_outside(left)
            raise
        return self.respond(result, after_error=raise_again)

    def _refuse_outside(self, error: Exception) -> None:
        """Raise ``NotAtomic`` if the view has committed, and a response is made of its error elsewhere.

        So it is in Connexion, which makes Flask let its own HTTP errors out, too.
        """
        if not (self._state.app.config["TRAP_HTTP_EXCEPTIONS"] and self.has_committed()):
            return
        status = getattr(error, "status_code", None)
        if isinstance(status, int) and is_stored_by_default(status):
            raise NotAtomic(
                f"the view of {self._operation.name} committed, and then its {type(error).__name__}"
                f" becomes a {status} outside of Flask, which cannot be stored: the commit is rolled"
                " back. Give the application an error handler that makes the response inside of"
                " Flask (the HTTP reference has one for Connexion)"
            ) from error

    def note_failure(self, error: Exception) -> None:
        """Raise what makes the whole operation void: whatever the view returned, it cannot commit."""
        self._error = error
        try:
            self._joined.raise_if_uncommittable(error)
        except Problem as problem:
            self._current.problem = problem
            raise

    def has_committed(self) -> bool:
        """See :class:`Attempt`."""
        return bool(self._joined.transaction.wrote)

    def _open(self) -> None:
        hold = self._execution.hold
        self._joined = OpenTransaction(self._state, self._operation, hold, self._route.other_binds)

    def _complete(self, stored: StoredResponse, is_settled: bool) -> None:
        self._joined.let_go(stored.status, is_settled=is_settled)
        self._commit(stored)

    def _release(self) -> None:
        self._joined.raise_if_uncommittable(None)
        self.abandon()

    def _abandon(self) -> None:
        try:
            if self._joined is not None:
                self._joined.end()
        finally:
            self._execution.abandon()

    def _tell_end(self) -> None:
        conclude(
            self._state.app,
            operation_rejected,
            self._current.told,
            outcome="rolled_back",
            attempt=self._operation.attempt,
            error=self._error,
        )

    def _is_settled(self) -> bool:
        return self._joined.is_settled()

    def _is_undone(self) -> bool:
        return self._joined.is_undone()
