"""One run of a view, from the claim to its end: what every kind of attempt has in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn

from flask import Response

from flask_idempotency.core.engine import Execution
from flask_idempotency.core.errors import Problem
from flask_idempotency.core.records import StoredResponse
from flask_idempotency.core.storable import is_stored_by_default
from flask_idempotency.session.after_commit import call_all
from flask_idempotency.session.before_view import SetAside
from flask_idempotency.session.flask_context import functions_after_request, handle_error
from flask_idempotency.session.operation import Operation
from flask_idempotency.session.undone import warn_undone
from flask_idempotency.web.request.response import capture, handle_problem
from flask_idempotency.web.request.state import RequestState
from flask_idempotency.web.setup.options import Route
from flask_idempotency.web.setup.state import AppState
from flask_idempotency.web.signals import conclude, note, operation_executed, operation_taken_over

WEIGHT = 0.2
"""That of one execution in a route's typical duration: the last ten make nine tenths of it."""


def raise_again(error: Exception) -> NoReturn:
    """Leave an error to the caller."""
    try:
        raise error
    finally:
        del error  # a cycle: its traceback leads here


class Attempt:
    """One run of the view: from the claim to its end, however it ends. A context manager.

    ``open`` comes first and may respond at once. The view runs in the context; ``succeed`` or ``fail``
    takes its result, and returns the response.
    """

    def __init__(
        self,
        state: AppState,
        route: Route,
        current: RequestState,
        operation: Operation,
        execution: Execution,
    ) -> None:
        self._state, self._route, self._current = state, route, current
        self._operation, self._execution = operation, execution
        self._started = time.monotonic()
        self._in_view = self._is_over = False
        self._waiting: StoredResponse | None = None
        self._is_above = False  # an error of the view is on its way through the decorators
        self._error: BaseException | None = None
        self._registered: list[Any] = []  # with flask.after_this_request
        self._outside = 0  # how many of these before the view
        current.clean_up = self.clean_up
        current.attempt = operation.attempt = execution.hold.attempt

    def open(self, before: SetAside | None = None) -> Attempt | Response:
        """Make everything ready for the view, or respond at once.

        ``before`` is what ``db.session`` was in the middle of.
        """
        try:
            if self._execution.took_over:
                note(
                    self._state.app,
                    operation_taken_over,
                    self._current,
                    attempt=self._operation.attempt,
                )
            return self._open(before) or self
        except BaseException as error:
            self._note_error(error)
            self.end()
            raise

    def watch_registered(self) -> None:
        """From now on, what is registered with ``flask.after_this_request`` is the view's."""
        self._registered = functions_after_request()
        self._outside = len(self._registered)

    def __enter__(self) -> Attempt:
        self._in_view = True
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            self._note_error(error)
        self._in_view = False
        self.clean_up()

    def clean_up(self) -> None:
        """End the attempt, unless its response or error waits for what the application does above it.

        Not while the view runs: then a copy of the request's context ends, in a thread of the view.
        """
        if not (self._is_over or self._in_view or self._is_above or self._waiting is not None):
            self.end()

    def end(self) -> None:
        """End the attempt without a response. Does nothing once it is over."""
        if not self._is_over:
            self._waiting, self._is_above = None, False
            self._abandon()
            self._note_end()
            # Otherwise the request is rejected, or the parent of this process goes on with it.
            if self._current.problem is None and not self._execution.process.is_parent:
                self._conclude()
            self._error = None  # its traceback leads here: a cycle would keep the request alive

    def _note_error(self, error: BaseException) -> None:
        self._error = error
        if isinstance(error, Problem):
            self._current.problem = error

    def _conclude(self) -> None:
        """Tell the outcome of an attempt that has ended without a stored response."""
        raise NotImplementedError

    def _note_end(self) -> None:
        self._is_over, self._current.clean_up = True, None

    def succeed(
        self,
        result: Any,
        *,
        after_error: Callable[[Exception], Response] | None = None,
        waits: bool = True,
    ) -> Response:
        """The view returned ``result``: store the response, or release the key.

        ``after_error`` is given an error in making the response of it, in place of :meth:`fail`;
        ``waits`` says that a commit above the view may follow.
        """
        app = self._state.app
        try:
            response: Response = app.make_response(result)
            while len(self._registered) > self._outside:
                response = app.ensure_sync(self._registered.pop(self._outside))(response)
            stored = capture(response, self._state.settings, self._operation.flashes)
            is_stored = (
                self._route.store(response) if self._route.store else self._stores(stored.status)
            )
        except Exception as error:
            # A generator, or what the view registered, fails as the view may.
            return (after_error or self.fail)(error)
        if waits and is_stored and self._current.is_dispatched:
            self._current.response = response
            if not self._is_settled():
                self._waiting, self._current.waiting = stored, self
                return response
        if not is_stored and stored.status < 500 and self.has_committed():
            warn_undone(self._operation.name, stored.status)
        self._end(stored if is_stored else None)
        return response

    def finish(self) -> None:
        """Store the response that waited for what the application does above its views.

        Unless that has undone the work it reports. Raises what :meth:`succeed` would have raised.
        """
        stored, self._waiting = self._waiting, None
        with self:
            if stored is not None:
                self._end(None if stored.status < 400 and self._is_undone() else stored)

    def hand_up(self) -> bool:
        """Let an error of the view pass the decorators above it, if it comes back to ``respond_to``."""
        self._is_above = self._current.is_dispatched
        if self._is_above:
            self._current.raised = self
        return self._is_above

    def respond_to(self, error: Exception) -> Response:
        """The error came out above all decorators."""
        self._is_above = False
        with self:
            return self.fail(error)

    def has_committed(self) -> bool:
        """Return True if :meth:`end` undoes something that the view has committed."""
        return False

    def fail(self, error: Exception) -> Response:
        """The view raised ``error``."""
        raise NotImplementedError

    def _handle(self, error: Exception) -> Any:
        """Return what the application's error handlers do. Raises what they leave unhandled."""
        if isinstance(error, Problem):
            self._current.problem = error
            return handle_problem(self._state.app, error)
        try:
            raise error  # Flask raises it again, and in a thread of an async view it is not present
        except Exception:
            return handle_error(self._state.app, error)

    def note_failure(self, error: Exception) -> None:
        """The function of :meth:`Idempotency.run` raised ``error``, which goes to its caller."""
        raise NotImplementedError

    def _open(self, before: SetAside | None) -> Response | None:
        raise NotImplementedError

    def _end(self, stored: StoredResponse | None) -> None:
        """Store the response, or (None) release the key."""
        raise NotImplementedError

    def _abandon(self) -> None:
        """Undo what can be undone, and let go of the record."""
        raise NotImplementedError

    def _is_undone(self) -> bool:
        """Return True if what the view left for a commit above it was dropped there."""
        return False

    def _is_settled(self) -> bool:
        """Return True if the view has left nothing that a commit above it could be meant for."""
        raise NotImplementedError

    def _stores(self, status: int) -> bool:
        """Return True if a response of this status is stored, if the route does not say."""
        return is_stored_by_default(status)

    def _complete(self, stored: StoredResponse) -> None:
        """Store the response; then tell everybody who waits for that."""
        if (tracing := self._state.tracing) is not None:
            stored = tracing.sign(stored)
        self._execution.complete(stored)
        self._note_end()
        app, operation = self._state.app, self._operation
        seconds = time.monotonic() - self._started
        typical = self._state.typical_seconds
        typical[operation.name] += WEIGHT * (seconds - typical[operation.name])
        conclude(
            app,
            operation_executed,
            self._current,
            "executed",
            attempt=operation.attempt,
            status=stored.status,
            seconds=seconds,
        )
        call_all(operation.after_commit, f"operation {operation.name}")
