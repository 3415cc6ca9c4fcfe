"""The attempt at an operation that is not atomic: its effects may be out in the world at any time.

So the response is stored even if it reports a failure, except where the view says that the operation
may be tried again (``Retryable``, its equivalent in a queue, or a response that is about the caller
and not about the operation). An operation that ends without a response is interrupted: its worker was
told to exit or ran out of time, for example.
"""

from __future__ import annotations

import sys
from logging import ERROR, INFO
from typing import NoReturn, cast

from flask import Response, got_request_exception
from werkzeug.exceptions import InternalServerError

from flask_idempotency.core.errors import (
    OperationFailed,
    OperationInterrupted,
    Problem,
    Retryable,
)
from flask_idempotency.core.machine import Phase
from flask_idempotency.core.ports import Lease
from flask_idempotency.core.records import StoredResponse
from flask_idempotency.core.storable import outcome_after
from flask_idempotency.flask_context import handle_error, log_error
from flask_idempotency.session.leftovers import end_view, waits_for_commit
from flask_idempotency.session.operation import Running

from .attempt import Attempt, raise_again
from .response import capture, lasting_response
from .signals import (
    conclude,
    note,
    operation_interrupted,
    operation_rejected,
)
from .steps import Steps

_NOT_KNOWN_YET = "The outcome is not known yet; try again with the same key."


class LeasedAttempt(Attempt):
    """Runs the view without a transaction, while the lease in the record runs."""

    _has_run = False

    @property
    def _asks(self) -> bool:
        """Whether the application finds out what became of an interrupted operation."""
        return callable(self._route.on_interrupted)

    def __enter__(self) -> Attempt:
        self._has_run = True
        return super().__enter__()

    def fail(self, error: Exception) -> Response:
        """Store the response that the application gives to ``error``, whatever it is.

        Raises ``Retryable`` and our other problems as they are. Where Flask propagates exceptions (in
        tests, for example), raises the error itself after its response is stored.
        """
        if isinstance(error, Problem):
            self._current.problem = error
        if self._stays_open_after(error):
            raise error
        try:
            result = self._handle(error)
        except Exception as unhandled:
            return self._fail_unhandled(unhandled)
        return self.respond(result, after_error=self._fail_unhandled)

    def _fail_unhandled(self, error: Exception) -> Response:
        """No error handler has taken ``error``, or it is a handler's own: what Flask does with it.

        But the response is stored before it is sent. An error in the handler of 500 goes to the server;
        stored is a problem.
        """
        if self._stays_open_after(error):
            raise error
        app = self._state.app
        try:
            result = handle_error(app, InternalServerError(original_exception=error))
        except Exception as raised:
            self._give_up(raised)
        response = self.respond(result, after_error=self._give_up, waits=False)
        propagates = app.config["PROPAGATE_EXCEPTIONS"]
        if propagates or (propagates is None and (app.testing or app.debug)):
            raise error
        got_request_exception.send(app, _async_wrapper=app.ensure_sync, exception=error)
        log_error(app, sys.exc_info())
        return response

    def _give_up(self, error: Exception) -> NoReturn:
        self.note_failure(error)
        raise error

    def note_failure(self, error: Exception) -> None:
        """Outside a request: store that the function failed, unless the error says more."""
        if not self._stays_open_after(error):
            problem = OperationFailed(f"The operation failed with {type(error).__name__}.")
            self._current.problem = problem
            response = lasting_response(self._state.app, problem, self._state.settings)
            self._complete(capture(response, self._state.settings), False)

    def _stays_open_after(self, error: Exception) -> bool:
        """Return True if ``error`` releases or interrupts the operation: no response is stored."""
        outcome = outcome_after(error)
        if outcome == "released":
            self._release()
        elif isinstance(error, OperationInterrupted) and self._route.on_interrupted != "hold":
            detail = error.detail if error.detail != OperationInterrupted().detail else _NOT_KNOWN_YET
            raise Retryable(detail, retry_after=error.retry_after) from error
        return outcome is not None

    def _abandon(self) -> None:
        if self._operation.steps is not None:
            self._let_go()
        # The call of a view that was cut off may go on at the other side for some time. Who asks there
        # before the lease has ended could be told "nothing", and call once more.
        self._execution.abandon(at_once=not (self._has_run and self._asks))

    def _let_go(self) -> None:
        """Let the operation go: what follows is no part of it."""
        self._operation.steps = None
        self._running.end()

    def _open(self) -> Response | None:
        operation, execution = self._operation, self._execution
        lease, binds = cast("Lease", execution.hold), self._route.other_binds
        steps = Steps(self._state, operation, lease, execution.claim, binds)
        operation.steps, self._steps, self._running = steps, steps, Running(operation)
        # A callable is asked about what an operator has released, too.
        is_open = execution.was_interrupted and (self._asks or not execution.was_released)
        return self._on_interrupted(steps) if is_open else None

    def _on_interrupted(self, steps: Steps) -> Response | None:
        """Treat an interrupted operation as the route says; None: run it again."""
        operation, policy = self._operation, self._route.on_interrupted
        note(self._state.app, operation_interrupted, self._current.told, attempt=operation.attempt)
        found = policy(operation) if callable(policy) else None
        if found is None:
            steps.begin_again()
            return None
        response = self.respond(found, after_error=raise_again, waits=False)
        self.abandon()
        return response

    def _complete(self, stored: StoredResponse, is_settled: bool) -> None:
        failed = stored.status >= 500
        if not is_settled:
            self._end_view(failed)
        if failed:
            self._operation.after_commit.clear()  # they were to follow a success
            if self._has_run:  # otherwise on_interrupted decided so
                steps, problem = self._steps.finished(), OperationFailed.type
                self._failure = {"level": ERROR, "problem": problem, "steps": steps or None}
        self._let_go()
        self._commit(stored)

    def _release(self) -> None:
        self._end_view(failed=True)
        if self.phase is Phase.OPEN or self._is_unknown():
            self.abandon()  # it stays interrupted
            return
        self._execution.release()
        conclude(
            self._state.app,
            operation_rejected,
            self._current.told,
            outcome="released",
            attempt=self._operation.attempt,
        )

    def _is_unknown(self) -> bool:
        """Return True if nobody knows what an earlier attempt has done, whatever this one did."""
        execution = self._execution
        return execution.was_interrupted and not execution.was_released and not self._asks

    def _end_view(self, failed: bool) -> None:
        session, in_request = self._state.sessions.present(), self._current.is_dispatched
        end_view(session, self._operation.name, in_request=in_request, failed=failed)

    def _tell_end(self) -> None:
        conclude(
            self._state.app,
            operation_interrupted,
            self._current.told,
            ERROR if self._route.on_interrupted == "hold" else INFO,
            attempt=self._operation.attempt,
            error=self._error,
        )

    def _is_settled(self) -> bool:
        return not waits_for_commit(self._state.sessions.present())
