"""One run of a view, or of a function in ``run()``: from its claim to its end, however it ends.

An atomic one runs in the transaction that holds the record's row: the view's writes and its response
commit together, or not at all.

One that is not atomic may have had effects in the world at any time. So its response is stored even
if it reports a failure, except where the view says that the operation may be tried again
(``Retryable``, its equivalent in a queue, or a response that is about the caller and not about the
operation). One that ends without a response is interrupted: its worker was told to exit or ran out of
time, for example.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from logging import ERROR, INFO
from typing import Any

from flask import Response

from flask_idempotency.core import errors
from flask_idempotency.core.engine import Execution
from flask_idempotency.core.machine import Phase, outcome_after
from flask_idempotency.core.records import StoredResponse
from flask_idempotency.session.after_commit import call_all
from flask_idempotency.session.leftovers import end_view, waits_for_commit
from flask_idempotency.session.operation import OpenTransaction, Operation, Running
from flask_idempotency.session.stray import warn_undone

from . import signals
from .request import Request
from .response import (
    capture,
    handle_problem,
    names_of,
    never_sent,
    overwrite,
    problem_response,
    respond_to,
)
from .steps import Steps

_CORS = "access-control-"
_NOT_KNOWN_YET = "The outcome is not known yet; try again with the same key."


class Attempt:
    """One run of a view, in the transaction that holds the record's row.

    A context manager: whatever leaves it ends an attempt that is not over.
    ``open`` comes first and may respond at once. The view runs in the context. ``returned`` or
    ``raised`` takes what came of it, and returns the response; :meth:`run` does all of it for a
    function. ``phase`` says where the attempt is.

    After an error of the view that Flask called, the response is what the application makes of it.
    Where a commit above the view may still follow, the response waits for ``complete``, at the end of
    the request.
    """

    _joined: OpenTransaction = None  # type: ignore[assignment]  # until it is open
    _waiting: StoredResponse  # its response, while it waits
    _has_run = False  # the view, or a part of it

    def __init__(self, current: Request, operation: Operation, execution: Execution) -> None:
        self._state, self._route, self._current = current.state, current.route, current
        self._operation, self._execution = operation, execution
        self._error: BaseException | None = None
        # What is registered with flask.after_this_request beyond these is the view's.
        self._outside = len(current.registered())
        self._own: frozenset[str] = frozenset()  # the headers of its response
        self.phase, current.open_attempt = Phase.OPEN, self
        current.attempt = operation.attempt = execution.hold.attempt

    def open(self) -> Attempt | Response:
        """Make everything ready for the view, or respond at once."""
        try:
            if self._execution.took_over:
                signals.note(signals.operation_taken_over, self._current)
            return self._open() or self
        except BaseException as error:
            self._error = error
            self.abandon()
            raise

    def __enter__(self) -> Attempt:
        self.phase, self._has_run = Phase.IN_VIEW, True
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._error = error or self._error
        try:
            if self.phase in (Phase.IN_VIEW, Phase.OPEN):
                self.abandon()
        finally:
            if self.phase is Phase.OVER:  # else an exit has struck its end, or it goes on
                self._error = None  # its traceback leads here: a cycle would keep the request alive

    def returned(self, result: Any) -> Response:
        """The view returned ``result``: store its response, release the key, or let it wait.

        Returns the response to a problem in its place. Raises our other errors.
        """
        try:
            made = self._made(result)
        except Exception as error:  # a generator, or what the view registered, fails as the view may
            return self.raised(error)
        return self._ended(*made)

    def raised(self, error: Exception) -> Response:
        """The view raised ``error``: the response, if that is a problem of ours.

        Raises all other errors: they go the way that they go in any application.
        """
        self._error = error
        signals.tell_mistake(self._state, self._current.name, error)
        try:
            try:
                self._judge(error)
            except errors.Problem as problem:
                return self._reject(problem)
            if isinstance(error, errors.Problem):
                response = self.returned(respond_to(self._state, error))
                signals.reject(self._current, error)  # unless it was stored
                return response
            if self._current.is_view:
                self.phase = Phase.AWAITING
                self._current.registered().insert(0, self._capture)  # Flask runs it before all others
                self._outside += 1
            else:
                self._lost(error)
            raise error
        finally:
            del error  # a cycle: its traceback leads here

    def _capture(self, response: Response) -> Response:
        """The application made ``response`` of the error that the view raised: it is the view's.

        Flask calls this before all that was registered with ``flask.after_this_request``, and calls it
        again after an error in what comes later.
        """
        if self.phase is not Phase.AWAITING:
            return response
        with never_sent(response, names_of(response)), self:
            try:
                response, stored, is_stored = self._made(response)
            except Exception as error:
                self._lost(error)
                raise
            # An extension may have added what is true of this request's origin alone.
            lines = [line for line in stored.headers or () if not line[0].lower().startswith(_CORS)]
            return self._ended(response, replace(stored, headers=tuple(lines)), is_stored)

    def complete(self, response: Response) -> None:
        """Store the response that waited for what the application does above its views.

        Unless that has undone the work it reports. ``response`` is what is about to be sent: a problem
        overwrites it, and so do other errors of ours that the application has a handler for.
        """
        stored = self._waiting
        with never_sent(response, self._own), self:
            try:
                if stored.status < 400 and self._route.atomic and self._is_undone(response.status_code):
                    self._release()
                else:
                    self._complete(stored, False)
            except errors.IdempotencyError as error:
                overwrite(response, self._reject(error), self._own)

    def run(self, function: Callable[[], Any]) -> Response:
        """Call the function of ``run()``; the response of its result. Raises every error."""
        with self:
            try:
                response, stored, _is_stored = self._made(function())
            except Exception as error:
                self._error = error
                self._judge(error)
                self._lost(error)
                raise
            self._complete(stored, False)
            return response

    def unanswered(self, error: BaseException | None) -> None:
        """The request ends, and the application has made no response of what ended the view."""
        if self.phase is Phase.AWAITING and (error is None or isinstance(error, Exception)):
            with suppress(errors.IdempotencyError), self:  # nobody is there to be told
                self._lost(self._error)
        self._error = error or self._error
        self.abandon()

    def abandon(self) -> None:
        """End the attempt without a response. Does nothing once it is over."""
        if self.phase is Phase.OVER:
            return
        self.phase = Phase.OPEN  # an exit may strike: whoever finds it so abandons it
        self._abandon()
        self.phase, self._current.open_attempt = Phase.OVER, None
        # A problem is told with its response, and the parent of this process goes on with the attempt.
        if not isinstance(self._error, errors.Problem) and not self._execution.claim.is_inherited():
            self._tell_end()
        self._error = None

    def _made(self, result: Any) -> tuple[Response, StoredResponse, bool]:
        """The response of what the view returned, what is to be stored of it, and whether it is."""
        response: Response = self._current.make_response(result)
        registered = self._current.registered()
        while len(registered) > self._outside:
            response = self._state.app.ensure_sync(registered.pop(self._outside))(response)
        is_stored = self._route.is_stored(response, self._error)
        return response, capture(response, self._state.settings), is_stored

    def _ended(self, response: Response, stored: StoredResponse, is_stored: bool) -> Response:
        """End the attempt, or let it wait; the response, or that to a problem."""
        try:
            if not is_stored:
                self._release(stored.status)
            elif self._current.home is None:
                self._complete(stored, False)
            elif self._is_settled():
                self._complete(stored, True)
            else:
                self._waiting, self._own = stored, names_of(response)
                self.phase = Phase.WAITING
        except errors.Problem as problem:
            return self._reject(problem)
        return response

    def _reject(self, error: errors.IdempotencyError) -> Response:
        """End the attempt with an error of ours; the response to it, or raises it."""
        self._error = error
        self.abandon()
        return handle_problem(self._current, error)

    def _commit(self, stored: StoredResponse, **failure: Any) -> None:
        """Store the response; then tell everybody who waits for that, and of the ``failure`` in it."""
        state, operation = self._state, self._operation
        if state.tracing is not None:
            stored = state.tracing.sign(stored)
        seconds = self._execution.complete(stored, waits=bool(failure))
        self.phase, self._current.open_attempt = Phase.OVER, None
        facts = {"status": stored.status, "seconds": seconds, **failure}
        signals.conclude(signals.operation_executed, self._current, **facts)
        if operation.after_commit:
            call_all(operation.after_commit, f"operation {operation.name}")

    # What another kind of attempt does otherwise.

    def _open(self) -> Response | None:
        hold = self._execution.hold
        self._joined = OpenTransaction(self._state, self._operation, hold, self._route.other_binds)
        return None

    def _judge(self, error: Exception) -> None:
        """Raise what the view's ``error`` means for the operation, if that is another error."""
        self._joined.raise_if_uncommittable(error)
        # Their 409s would be final as stored responses, and all is rolled back: nobody need decide.
        if isinstance(error, errors.OperationInterrupted):
            raise errors.Retryable(_NOT_KNOWN_YET, retry_after=error.retry_after) from error
        if isinstance(error, errors.RequestInProgress):
            raise error

    def _lost(self, error: BaseException | None) -> None:  # noqa: ARG002
        """Nothing makes a response of ``error``: say what is undone, or store that it has failed."""
        if self._current.home is not None:  # the caller of run() gets it
            self._warn_undone(None)

    def _complete(self, stored: StoredResponse, is_settled: bool) -> None:
        """End the view's part, and :meth:`_commit`. ``is_settled`` is what :meth:`_is_settled` says."""
        self._joined.let_go(stored.status, is_settled=is_settled)
        self._commit(stored)

    def _release(self, status: int | None = None) -> None:
        """End the attempt without a stored response: the same key may try again.

        ``status`` is that of a response that reports what was done all the same.
        """
        if status is not None:
            self._warn_undone(status)
        self._joined.raise_if_uncommittable(None)
        self.abandon()

    def _abandon(self) -> None:
        """Undo what can be undone, and let go of the record."""
        try:
            if self._joined is not None:
                self._joined.end()
        finally:
            self._execution.abandon()

    def _tell_end(self) -> None:
        """Tell the outcome of an attempt that was abandoned."""
        current, error = self._current, self._error
        signals.conclude(signals.operation_rejected, current, outcome="rolled_back", error=error)

    def _is_settled(self) -> bool:
        """Return True if the view has left nothing that a commit above it could be meant for."""
        return self._joined.is_settled()

    def _is_undone(self, status: int) -> bool:
        """Return True if all of the view's work was left for a commit above it, and dropped there.

        Or if nobody has committed it, and the response that is sent, of this ``status``, says so. What
        the view has committed itself stays, as without us, and with it the response.
        """
        joined = self._joined
        is_left = status >= 400 and joined.has_leftovers()
        if not joined.transaction.wrote:
            return is_left or joined.is_undone()
        if is_left:
            self._state.sessions.current().rollback()  # without us, the end of the request does that
        return False

    def _warn_undone(self, status: int | None) -> None:
        """Say that what was committed is undone."""
        if self._joined.transaction.wrote:
            warn_undone(self._operation.name, status)


class LeasedAttempt(Attempt):
    """Runs the view without a transaction, while the lease in the record runs."""

    def _open(self) -> Response | None:
        """An interrupted operation is treated as the route says."""
        operation, execution, policy = self._operation, self._execution, self._route.on_interrupted
        steps = Steps(self._state, operation, execution, self._route.other_binds)
        operation.steps, self._steps, self._running = steps, steps, Running(operation)
        self._asks = callable(policy)  # what became of an interrupted operation
        if operation.attempt > 1:
            steps.recorded()  # else its writes would be repeated up to its first step
        # A callable is asked about what an operator has released, too.
        if not execution.was_interrupted or (execution.was_released and not self._asks):
            return None
        signals.note(signals.operation_interrupted, self._current)
        try:
            found = policy(operation) if callable(policy) else None
        except errors.OperationInterrupted as error:  # the next request asks again
            raise errors.Retryable(_NOT_KNOWN_YET, retry_after=error.retry_after) from error
        steps.begin_again()
        if found is None:
            return None
        response, stored, is_stored = self._made(found)
        if is_stored:
            self._complete(stored, False)
        else:
            self._release()
        return response

    def _judge(self, error: Exception) -> None:
        outcome = outcome_after(error)
        if outcome is None:
            return
        if outcome == "released":
            self._release()
        elif isinstance(error, errors.OperationInterrupted) and self._route.on_interrupted != "hold":
            raise errors.Retryable(_NOT_KNOWN_YET, retry_after=error.retry_after) from error
        raise error

    def _lost(self, error: BaseException | None) -> None:
        problem = errors.OperationFailed(f"The operation failed with {type(error).__name__}.")
        self._complete(capture(problem_response(self._state, problem), self._state.settings), False)

    def _complete(self, stored: StoredResponse, is_settled: bool) -> None:
        failed, failure = stored.status >= 500, {}
        if not is_settled:
            self._end_view(failed)
        if failed:
            self._operation.after_commit.clear()  # they were to follow a success
            if self._has_run:  # otherwise on_interrupted decided so
                steps, problem = sorted(self._steps.finished) or None, errors.OperationFailed.type
                failure = {"level": ERROR, "problem": problem, "steps": steps}
        self._let_go()
        self._commit(stored, **failure)

    def _release(self, _status: int | None = None) -> None:
        self._end_view(failed=True)
        execution = self._execution
        # Nobody knows what an earlier attempt has done, whatever this one did.
        is_unknown = execution.was_interrupted and not execution.was_released
        if self.phase is Phase.OPEN or is_unknown:
            self._asks = False  # no call of this attempt goes on
            self.abandon()  # it stays interrupted
            return
        execution.release()
        signals.conclude(signals.operation_rejected, self._current, outcome="released")

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

    def _end_view(self, failed: bool) -> None:
        session, in_request = self._state.sessions.present(), self._current.home is not None
        end_view(session, self._operation.name, in_request=in_request, failed=failed)

    def _tell_end(self) -> None:
        level = ERROR if self._route.on_interrupted == "hold" else INFO
        signals.conclude(signals.operation_interrupted, self._current, level, error=self._error)

    def _is_settled(self) -> bool:
        return not waits_for_commit(self._state.sessions.present())
