"""The attempt at an operation that is not atomic: its effects may be out in the world at any time.

So the response is stored even if it reports a failure, except where the view says that the operation
may be tried again (``Retryable``, its equivalent in a queue, or a response that is about the caller
and not about the operation). An operation that ends without a response is interrupted: its worker was
told to exit or ran out of time, for example.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from logging import ERROR, INFO
from typing import Any, cast

from flask import Response, got_request_exception
from werkzeug.exceptions import InternalServerError

from flask_idempotency.core.errors import LeaseLost, OperationFailed, Problem
from flask_idempotency.core.ports import Lease
from flask_idempotency.core.records import StoredResponse
from flask_idempotency.web.operation import Operation
from flask_idempotency.web.request.response import capture, lasting_response
from flask_idempotency.web.session.ends import end_view, is_settled_outside
from flask_idempotency.web.session.joining import parked
from flask_idempotency.web.signals import (
    conclude,
    event_of,
    note,
    operation_interrupted,
    operation_released,
    tell_failure,
    warn,
)

from .attempt import Attempt
from .heartbeat import Heartbeat, heart
from .steps import Steps

log = logging.getLogger("flask_idempotency")


class LeasedAttempt(Attempt):
    """Runs the view without a transaction, while the lease in the record runs."""

    _reconciling = False
    _beat: Heartbeat | None = None
    _found_settled = False  # just now: nothing is left that could be undone

    def fail(self, error: Exception) -> Response:
        """Store the response that the application gives to ``error``, whatever it is.

        Raises ``Retryable`` and our other problems as they are. Where Flask propagates exceptions (in
        tests, for example), raises the error itself after its response is stored.
        """
        if isinstance(error, Problem):
            self._current.problem = error
        if self._stays_open_after(error):
            raise error
        app = self._state.app
        try:
            return self.succeed(self._handle(error), handled=True)
        except Exception as unhandled:
            if unhandled is not error:
                raise
            # What Flask does with it, but the response is stored before it is sent.
            result = app.handle_user_exception(InternalServerError(original_exception=error))
            response = self.succeed(result, handled=True, waits=False)
            propagates = app.config["PROPAGATE_EXCEPTIONS"]
            if propagates or (propagates is None and (app.testing or app.debug)):
                raise
            got_request_exception.send(app, _async_wrapper=app.ensure_sync, exception=error)
            app.log_exception(sys.exc_info())
            return response

    def note_failure(self, error: Exception) -> None:
        """Outside a request: store that the function failed, unless the error says more."""
        if not self._stays_open_after(error):
            self._store(OperationFailed(f"The operation failed with {type(error).__name__}."))

    def _stays_open_after(self, error: Exception) -> bool:
        """Whether no response is stored for ``error``: the operation is released, or interrupted."""
        outcome = self._route.outcome_after(error)
        if outcome == "released":
            self._end(None)
        return outcome is not None

    def _abandon(self) -> None:
        self._stop_beating()
        if self._operation.steps is not None:
            self._operation.steps = self._current.operation = None
        self._execution.abandon()

    def _open(self, _before: object) -> Response | None:
        operation, execution = self._operation, self._execution
        self._current.operation = operation
        lease, binds = cast("Lease", execution.hold), self._route.other_binds
        steps = Steps(self._state, operation, lease, execution.claim, binds)
        operation.steps = steps
        if self._route.heartbeat:
            self._beat = Heartbeat(lease, self._route.lease, self._note_lapse, steps.is_held)
            heart().add(self._beat)
        return self._on_interrupted(steps) if execution.was_interrupted else None

    def _note_lapse(self, error: Exception) -> None:
        """The view runs, and its lease has run out or was lost all the same."""
        event = event_of(self._current, attempt=self._operation.attempt, error=error)
        if isinstance(error, LeaseLost):
            warn(event, "another request took it over, or an operator decided, while its view runs")
            return
        text = "its lease has run out, and cannot be renewed: %r"
        tell_failure(self._state.app, event, text, error)

    def _stop_beating(self) -> None:
        if self._beat is not None:
            heart().remove(self._beat)

    def _on_interrupted(self, steps: Steps) -> Response | None:
        """Treat an interrupted operation as the route says; None: run it again."""
        operation, policy = self._operation, self._route.on_interrupted
        note(self._state.app, operation_interrupted, self._current, attempt=operation.attempt)
        if policy == "fail":
            response = self._store(
                OperationFailed("The operation was interrupted, and will not be run again.")
            )
        elif callable(policy) and (found := self._ask(policy)) is not None:
            self._reconciling = True
            response = self.succeed(found, handled=True)
        else:
            steps.begin_again()
            return None
        self.end()
        return response

    def _ask(self, policy: Callable[[Operation], Any]) -> Any:
        """What the application found out. A coroutine runs in a thread, with its own event loop."""
        ask = self._state.app.ensure_sync(policy)
        if not inspect.iscoroutinefunction(policy):
            return ask(self._operation)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(copy_context().run, ask, self._operation).result()

    def _store(self, problem: Problem) -> Response:
        """Store a problem as the response."""
        self._current.problem = problem
        response = lasting_response(self._state.app, problem, self._state.settings)
        self._end(capture(response, self._state.settings, self._current.flashes))
        return response

    def _end(self, stored: StoredResponse | None) -> None:
        operation = self._operation
        if not self._found_settled:
            end_view(self._state.db, operation.name)
        with parked(self._state):
            self._stop_beating()
            if stored is None and self._reconciling:
                self.end()  # it stays interrupted, so the application is asked again
            elif stored is None:
                self._execution.release()
                conclude(
                    self._state.app,
                    operation_released,
                    self._current,
                    "released",
                    attempt=operation.attempt,
                )
            else:
                if stored.status >= 500:
                    operation.after_commit.clear()  # they were to follow a success
                operation.steps = self._current.operation = None  # what follows is no part of it
                self._complete(stored)

    def _conclude(self) -> None:
        conclude(
            self._state.app,
            operation_interrupted,
            self._current,
            "interrupted",
            ERROR if self._route.on_interrupted == "hold" else INFO,
            attempt=self._operation.attempt,
            error=self._error,
        )

    def _is_settled(self) -> bool:
        self._found_settled = is_settled_outside(self._state.db)
        return self._found_settled

    def _stores(self, status: int) -> bool:
        return status >= 500 or super()._stores(status)
