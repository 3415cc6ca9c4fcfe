"""One run of a view, from the claim to its end: what every kind of attempt has in common."""

from __future__ import annotations

import logging
import time
from typing import Any

from flask import Response

from . import http
from .core.records import Answer
from .engine import Execution
from .errors import Problem, StoreUnavailable
from .operation import Operation, RequestState
from .options import Route
from .signals import Event, operation_executed, operation_taken_over, send, store_failed
from .state import AppState

log = logging.getLogger("flask_idempotency")


class Attempt:
    """The view's run: from the claim to its end, however it ends. A context manager.

    ``begin`` comes first and may answer at once; in the context the view runs, and ``succeed`` or
    ``fail`` is told what it did and gives the response.
    """

    def __init__(
        self,
        state: AppState,
        route: Route,
        now: RequestState,
        operation: Operation,
        execution: Execution,
    ) -> None:
        self._state, self._route, self._now = state, route, now
        self._operation, self._execution = operation, execution
        self._started = time.monotonic()
        self._in_view = False
        now.clean_up = self.clean_up
        operation.attempt = execution.hold.attempt

    def begin(self) -> Attempt | Response:
        """Make everything ready for the view. What is answered at once is a response."""
        try:
            if self._execution.took_over:
                event = Event(self._operation.name, self._operation.attempt)
                send(operation_taken_over, self._state.app, event)
            return self._begin() or self
        except BaseException:
            self.abandon()
            raise

    def __enter__(self) -> Attempt:
        self._in_view = True
        return self

    def __exit__(self, *exc: object) -> None:
        self._in_view = False
        self.abandon()

    def clean_up(self) -> None:
        """Abandon what the wrapper around the view could not.

        Not while the view runs: then a copy of the request's context ends, in a thread of the view.
        """
        if not self._in_view:
            self.abandon()

    def succeed(self, result: Any, *, handled: bool = False) -> Response:
        """The view returned ``result``: keep the answer, or give the key back.

        ``handled`` says that an error handler made it.
        """
        app = self._state.app
        try:
            response: Response = app.make_response(result)
            answer = http.capture(response, self._state.settings)
            kept = self._route.store(response) if self._route.store else self._is_kept(answer.status)
        except Exception as error:
            if handled:
                raise
            return self.fail(error)  # a generator's body may fail as well as the view
        try:
            self._end(answer if kept else None)
        except Problem as problem:
            self._now.problem = problem
            if isinstance(problem, StoreUnavailable):
                report(self._state, self._operation, problem)
            raise
        return response

    def fail(self, error: Exception) -> Response:
        """The view raised ``error``."""
        raise NotImplementedError

    def note_failure(self, error: Exception) -> None:
        """The function of :meth:`Idempotency.run` raised ``error``, which goes to its caller."""
        raise NotImplementedError

    def abandon(self) -> None:
        """End the attempt without an answer. Does nothing after the end."""
        raise NotImplementedError

    def _begin(self) -> Response | None:
        raise NotImplementedError

    def _end(self, answer: Answer | None) -> None:
        """Store the answer, or (None) give the key back."""
        raise NotImplementedError

    def _is_kept(self, status: int) -> bool:
        """Whether an answer of this status is kept, if the route does not say."""
        raise NotImplementedError

    def _complete(self, answer: Answer) -> None:
        """Store the answer; then tell everybody who waits for that."""
        self._execution.complete(answer)
        app, operation = self._state.app, self._operation
        seconds = time.monotonic() - self._started
        self._state.pace[operation.name].note(seconds)
        event = Event(operation.name, operation.attempt, answer.status, seconds)
        send(operation_executed, app, event)
        for function in operation.afterwards:
            try:
                function()
            except Exception:  # the operation has been committed: its answer stands
                log.exception("operation %s: a function failed after the commit", operation.name)


def report(state: AppState, operation: Operation, error: StoreUnavailable) -> None:
    """Log and signal that Postgres did not do what was asked; the answer does not say why."""
    log.error("operation %s: the store is unavailable: %r", operation.name, error.__cause__)
    send(store_failed, state.app, Event(operation.name, operation.attempt or None, error=error))
