"""What a request to a protected view does: claim, run, commit; or answer at once.

Everything here happens where the view would run, innermost: a replay is given only to a request that
has passed every check of the application that a first request passes.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

from flask import Response, current_app, request
from sqlalchemy.exc import SQLAlchemyError
from werkzeug.exceptions import HTTPException

from . import http, session
from .core.keys import Scope, hash_key
from .core.machine import assert_never
from .core.policy import Pace, is_kept
from .core.records import Claim
from .engine import Claimed, Execution, InProgress, Mismatch, Replay
from .errors import (
    IdempotencyError,
    KeyRequired,
    KeyReused,
    Problem,
    ReplayForbidden,
    RequestInProgress,
    ScopeUnknown,
    StoreUnavailable,
)
from .operation import Operation, RequestState, Running, request_state, running_operation
from .options import Route
from .signals import (
    Event,
    operation_executed,
    operation_replayed,
    operation_taken_over,
    send,
    store_failed,
)
from .state import AppState, app_state

log = logging.getLogger("flask_idempotency")


def begin(route: Route) -> Attempt | Response | None:
    """What the present request does: run in an attempt, answer at once, or (None) run unprotected.

    Raises a :class:`Problem` where the answer is one.
    """
    state = app_state(current_app)
    now = request_state()
    if (
        running_operation() is not None
        or not state.settings.enabled
        or not route.applies_to(request.method)
    ):
        return None  # an idempotent function called by an idempotent view is part of it
    try:
        prepare(state, route, now)
        if now.refusal is not None:
            raise now.refusal
        operation = identify(state, route, now)
        return None if operation is None else _claim(state, route, now, operation)
    except Problem as problem:
        now.problem = problem
        raise


def prepare(state: AppState, route: Route, now: RequestState) -> None:
    """Check what needs no database and no user: the key's form and the body's completeness.

    Raises nothing: what is wrong is noted in ``now.refusal``.
    """
    now.name = route.name or request.endpoint or ""
    if now.checked:
        return
    now.checked = True
    try:
        if route.key is None:
            now.key = http.header_key(request, state.settings)
            if now.key is None:
                if route.is_required(state.settings):
                    raise KeyRequired
                return  # unprotected: the body is the view's business alone
        http.read_body(request)
    except (IdempotencyError, HTTPException) as refusal:
        now.refusal = refusal


def identify(state: AppState, route: Route, now: RequestState) -> Operation | None:
    """The operation that the request is about; None if it has no key and needs none."""
    if route.key is not None:
        now.key = http.natural_key(request, route, state.settings)
        if now.key is None and route.is_required(state.settings):
            raise KeyRequired
    if now.key is None:
        return None
    scope_of = route.scope if route.has_scope else state.scope
    scope: Scope = None
    if scope_of is not None:
        scope = scope_of()
        if scope is None or scope == "":
            raise ScopeUnknown
    namespace = state.settings.namespace if route.namespace is None else route.namespace
    return Operation(now.name, namespace, scope, now.key, attempt=0)


def _claim(
    state: AppState, route: Route, now: RequestState, operation: Operation
) -> Attempt | Response | None:
    """Ask the engine who runs the operation, and do what it decides."""
    settings = state.settings
    claim = Claim(
        key=hash_key(operation.namespace, operation.name, operation.scope, operation.key),
        name=operation.name,
        fingerprint=http.fingerprint(request, route),
        owner=secrets.token_urlsafe(16),
        ttl_seconds=settings.ttl if route.ttl is None else route.ttl,
    )
    session.end_earlier_work(state.db)
    pace = state.pace[operation.name]
    try:
        decision = state.engine.begin(claim, settings.wait if route.wait is None else route.wait)
    except StoreUnavailable as error:
        _report(state, operation, error)
        if settings.on_store_error == "reject":
            raise
        log.error("operation %s runs unprotected", operation.name)
        return None
    match decision:
        case Mismatch():
            raise KeyReused
        case InProgress():
            raise RequestInProgress(retry_after=pace.retry_after())
        case Replay(answer, attempt):
            operation.attempt = attempt
            if route.authorize_replay and not route.authorize_replay(operation):
                raise ReplayForbidden
            response = http.replay(state.app, answer, settings)
            event = Event(operation.name, attempt, answer.status)
            send(operation_replayed, state.app, event)
            return response
        case Claimed(execution):
            return Attempt(state, route, now, operation, execution, pace)
        case impossible:
            assert_never(impossible)


class Attempt:
    """The view's run: from the claim to its end, however it ends. A context manager."""

    def __init__(
        self,
        state: AppState,
        route: Route,
        now: RequestState,
        operation: Operation,
        execution: Execution,
        pace: Pace,
    ) -> None:
        self._state, self._route, self._now = state, route, now
        self._operation, self._execution, self._pace = operation, execution, pace
        self._started = time.monotonic()
        self._running: Running | None = None
        self._in_view = False
        try:
            now.clean_up = self.clean_up
            operation.attempt = execution.hold.attempt
            self._running = Running(
                operation,
                execution.hold.connection,
                execution.hold.expose,
                state.engines_of(route.other_binds),
            )
            state.prove_join(self._running)
            if execution.took_over:
                event = Event(operation.name, operation.attempt)
                send(operation_taken_over, state.app, event)
        except BaseException:
            self.abandon()
            raise

    def __enter__(self) -> Attempt:
        self._in_view = True
        return self

    def __exit__(self, *exc: object) -> None:
        self._in_view = False
        self.abandon()
        if self._running is not None:
            self._running.leave_context()  # an async view's end ran in a copy of this context

    def clean_up(self) -> None:
        """Abandon what the wrapper around the view could not.

        Not while the view runs: then a copy of the request's context ends, in a thread of the view.
        """
        if not self._in_view:
            self.abandon()

    def succeed(self, result: Any, *, handled: bool = False) -> Response:
        """The view returned ``result``: keep the answer and commit, or roll both back.

        ``handled`` says that an error handler made it.
        """
        app, operation = self._state.app, self._operation
        try:
            response: Response = app.make_response(result)
            answer = http.capture(response, self._state.settings)
            kept = self._route.store(response) if self._route.store else is_kept(answer.status)
        except Exception as error:
            if handled:
                raise
            return self.fail(error)  # a generator's body may fail as well as the view
        self._raise_if_void(None)
        if not kept:
            self.abandon()
            return response
        if self._running is not None:
            try:
                session.leave(self._running)
            except SQLAlchemyError as error:  # the connection is lost: nothing can be undone or kept
                self._raise_if_void(error)
                raise
            self._running.end()
        try:
            self._execution.complete(answer)
        except Problem as problem:
            self._now.problem = problem
            if isinstance(problem, StoreUnavailable):
                _report(self._state, operation, problem)
            raise
        seconds = time.monotonic() - self._started
        self._pace.note(seconds)
        event = Event(operation.name, operation.attempt, answer.status, seconds)
        send(operation_executed, app, event)
        return response

    def fail(self, error: Exception) -> Response:
        """The view raised ``error``: answer as the application's error handlers do.

        Raises what they leave unhandled, after everything is rolled back.
        """
        self._raise_if_void(error)
        try:
            raise error
        except Exception:
            handled = self._state.app.handle_user_exception(error)
        return self.succeed(handled, handled=True)

    def _raise_if_void(self, error: Exception | None) -> None:
        """Raise what makes the whole operation void: whatever the view answered, it cannot commit."""
        broken = self._running.broken if self._running is not None else None
        found = broken or self._execution.hold.explain(error)
        if found is None or found is error:
            return
        if isinstance(found, Problem):
            self._now.problem = found
        raise found from error

    def abandon(self) -> None:
        """Roll back whatever is open and let the key go. Does nothing after the end."""
        try:
            if self._running is not None and self._running.is_open:
                session.undo(self._running)
        finally:
            if self._running is not None:
                self._running.end()
            self._execution.abandon()


def _report(state: AppState, operation: Operation, error: StoreUnavailable) -> None:
    """Log and signal that Postgres did not do what was asked; the answer does not say why."""
    log.error("operation %s: the store is unavailable: %r", operation.name, error.__cause__)
    send(store_failed, state.app, Event(operation.name, operation.attempt or None, error=error))
