"""One run of a view, from the claim to its end: what every kind of attempt has in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn

from flask import Response

from flask_idempotency.core.engine import Execution
from flask_idempotency.core.errors import Problem
from flask_idempotency.core.machine import FOLLOWS, IllegalPhase, Phase
from flask_idempotency.core.process import this_process
from flask_idempotency.core.records import StoredResponse
from flask_idempotency.core.storable import is_stored_by_default
from flask_idempotency.flask_context import handle_error
from flask_idempotency.session.after_commit import call_all
from flask_idempotency.session.operation import Operation
from flask_idempotency.session.stray import warn_undone

from .app_state import AppState
from .options import Route
from .request import RequestState
from .response import capture, handle_problem
from .signals import conclude, note, operation_executed, operation_taken_over


def raise_again(error: Exception) -> NoReturn:
    """Leave an error to the caller."""
    try:
        raise error
    finally:
        del error  # a cycle: its traceback leads here


class Attempt:
    """One run of the view: from the claim to its end, however it ends. A context manager.

    ``open`` comes first and may respond at once. The view runs in the context; ``respond`` or ``fail``
    takes its result, and returns the response. It ends with ``complete`` or ``release``, or somebody
    calls ``abandon``. ``phase`` says where it is: :data:`~flask_idempotency.core.machine.FOLLOWS`.
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
        self._waiting: StoredResponse | None = None  # its response, for as long as it waits
        self._error: BaseException | None = None
        self._failure: dict[str, Any] = {}  # if that is what is stored: what to tell besides
        self._registered: list[Any] = []  # with flask.after_this_request
        self._outside = 0  # how many of these before the view
        self.phase, current.attempt = Phase.OPEN, self
        current.told.attempt = operation.attempt = execution.hold.attempt

    def open(self) -> Attempt | Response:
        """Make everything ready for the view, or respond at once."""
        try:
            if self._execution.took_over:
                note(
                    self._state.app,
                    operation_taken_over,
                    self._current.told,
                    attempt=self._operation.attempt,
                )
            return self._open() or self
        except BaseException as error:
            self._note_error(error)
            self.abandon()
            raise

    def watch(self, registered: list[Any]) -> None:
        """From now on, what is ``registered`` with ``flask.after_this_request`` is the view's."""
        self._registered, self._outside = registered, len(registered)

    def __enter__(self) -> Attempt:
        self._go(Phase.IN_VIEW)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            self._note_error(error)
        try:
            if self.phase in (Phase.IN_VIEW, Phase.OPEN):
                self.abandon()
        finally:
            if self.phase is Phase.OVER:
                self._error = None  # an exit has struck its end

    def _go(self, phase: Phase) -> None:
        if phase not in FOLLOWS[self.phase]:
            raise IllegalPhase(f"{phase.name} after {self.phase.name}")
        self.phase, current = phase, self._current
        if phase is not Phase.OVER:
            current.attempt = self
        elif current.attempt is self:
            current.attempt = None

    def abandon(self) -> None:
        """End the attempt without a response. Does nothing once it is over."""
        if self.phase is Phase.OVER:
            return
        self.phase = Phase.OPEN  # an exit may strike: whoever finds it so abandons it
        self._abandon()
        self._go(Phase.OVER)
        self._waiting = None
        # Otherwise the request is rejected, or the parent of this process goes on with it.
        if self._current.problem is None and self._execution.pid == this_process():
            self._tell_end()
        self._error = None  # its traceback leads here: a cycle would keep the request alive

    def _note_error(self, error: BaseException) -> None:
        self._error = error
        if isinstance(error, Problem):
            self._current.problem = error

    def respond(
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
        app, current, status = self._state.app, self._current, 0
        try:
            response: Response = app.make_response(result)
            while len(self._registered) > self._outside:
                response = app.ensure_sync(self._registered.pop(self._outside))(response)
            stored = capture(response, self._state.settings)
            status = stored.status
            store = self._route.store
            is_stored = store(response) if store else is_stored_by_default(status, self._route.atomic)
        except Exception as error:
            # A generator, or what the view registered, fails as the view may.
            return (after_error or self.fail)(error)
        if not is_stored:
            if status < 500 and self.has_committed():
                warn_undone(self._operation.name, status)
            self._release()
            return response
        is_settled = False
        if waits and current.is_dispatched:
            current.response, is_settled = response, self._is_settled()
            if not is_settled:
                self._waiting = stored
                self._go(Phase.WAITING)
                return response
        self._complete(stored, is_settled)
        return response

    def complete(self) -> None:
        """Store the response that waited for what the application does above its views.

        Unless that has undone the work it reports. Raises what :meth:`respond` would have raised.
        """
        stored, self._waiting = self._waiting, None
        if stored is None:
            return
        with self:
            if stored.status < 400 and self._is_undone():
                self._release()
            else:
                self._complete(stored, False)

    def hand_up(self) -> bool:
        """Let an error of the view pass the decorators above it, if it comes back to ``respond_to``."""
        if self._current.is_dispatched:
            self._go(Phase.ABOVE)
        return self._current.is_dispatched

    def respond_to(self, error: Exception) -> Response:
        """The error came out above all decorators."""
        with self:
            return self.fail(error)

    def has_committed(self) -> bool:
        """Return True if :meth:`abandon` undoes something that the view has committed."""
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

    def _open(self) -> Response | None:
        raise NotImplementedError

    def _complete(self, stored: StoredResponse, is_settled: bool) -> None:
        """End the view's part, and :meth:`_commit`. ``is_settled`` is what :meth:`_is_settled` says."""
        raise NotImplementedError

    def _release(self) -> None:
        """End the attempt without a stored response: the same key may try again."""
        raise NotImplementedError

    def _abandon(self) -> None:
        """Undo what can be undone, and let go of the record."""
        raise NotImplementedError

    def _tell_end(self) -> None:
        """Tell the outcome of an attempt that was abandoned."""
        raise NotImplementedError

    def _is_undone(self) -> bool:
        """Return True if what the view left for a commit above it was dropped there."""
        return False

    def _is_settled(self) -> bool:
        """Return True if the view has left nothing that a commit above it could be meant for."""
        raise NotImplementedError

    def _commit(self, stored: StoredResponse) -> None:
        """Store the response; then tell everybody who waits for that."""
        state, operation = self._state, self._operation
        if state.tracing is not None:
            stored = state.tracing.sign(stored)
        self._execution.complete(stored, waits=bool(self._failure))
        self._go(Phase.OVER)
        seconds = time.monotonic() - self._started
        state.last_seconds[operation.name] = seconds
        conclude(
            state.app,
            operation_executed,
            self._current.told,
            attempt=operation.attempt,
            status=stored.status,
            seconds=seconds,
            **self._failure,
        )
        if operation.after_commit:
            call_all(operation.after_commit, f"operation {operation.name}")
