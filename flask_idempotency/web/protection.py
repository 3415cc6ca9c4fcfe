"""What a request to a protected view does: claim, run, commit; or answer at once.

Everything here happens where the view would run, innermost: a replay is given only to a request that
has passed every check of the application that a first request passes.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from flask import Response, current_app, request

from flask_idempotency.core.engine import Claimed, Gone, InProgress, Interrupted, Mismatch, Replay
from flask_idempotency.core.errors import (
    IdempotencyError,
    KeyRequired,
    KeyReused,
    LeaseLost,
    NotAtomic,
    OperationInterrupted,
    Problem,
    ReplayForbidden,
    RequestInProgress,
    ScopeUnknown,
    StoreUnavailable,
)
from flask_idempotency.core.keys import Scope
from flask_idempotency.core.machine import assert_never
from flask_idempotency.core.records import Claim
from flask_idempotency.core.storable import TypicalDuration
from flask_idempotency.web.attempt.atomic import AtomicAttempt
from flask_idempotency.web.attempt.attempt import Attempt, report
from flask_idempotency.web.attempt.leased import LeasedAttempt
from flask_idempotency.web.request import body as http
from flask_idempotency.web.request import forms
from flask_idempotency.web.request.state import (
    RequestState,
    Resuming,
    is_outermost_request,
    present_operation,
    this_request,
)
from flask_idempotency.web.session import joining as session
from flask_idempotency.web.setup.options import Route, Skip
from flask_idempotency.web.setup.routes import current_scope
from flask_idempotency.web.setup.state import AppState, app_state

from .operation import Operation
from .signals import Event, operation_interrupted, operation_replayed, send

log = logging.getLogger("flask_idempotency")


def enter(route: Route) -> Attempt | Response | None:
    """What the present request does: run in an attempt, answer at once, or (None) run unprotected.

    Raises a :class:`Problem` where the answer is one.
    """
    state = app_state(current_app)
    current = this_request()
    if current.waiting is not None or current.raised is not None:
        raise NotAtomic(
            "a second idempotent view was called in one request, before what the first one left in"
            " db.session was committed: commit it in the first"
        )
    if (
        present_operation() is not None
        or not state.settings.enabled
        or not route.applies_to(request.method)
    ):
        return None  # an idempotent function called by an idempotent view is part of it
    if current.route is not None and current.route.given is route:
        route = current.route
    else:  # a function that a view calls, or a request that the hooks have not seen
        route = route.resolved(state.settings, state.scope)
    try:
        prepare(state, route, current)
        is_skipped = route.skip is not None and _is_skipped(route.skip, current)
        if current.refusal is not None and not is_skipped:
            raise current.refusal
        operation = None if is_skipped else identify(state, route, current)
        if operation is None:
            _check_may_run_unprotected(current)
            return None
        body = _body(state, current).whole()
        claim = state.claim(route, operation, http.fingerprint(request, body, route))
        if current.resuming is not None:
            claim = _resumed(claim, current.resuming)
        if route.resumable is not None:
            form_key = current.field.key if current.field else None
            plain = http.pack_request(request, body, route, state.settings, form_key)
            claim = replace(claim, request=state.sealer.seal_bytes(plain, claim.key, http.REQUEST))
        entered = claim_or_answer(state, route, current, operation, claim)
        if isinstance(entered, Attempt):
            entered.watch_registered()
        return entered
    except Problem as problem:
        current.problem = problem
        raise


def _check_may_run_unprotected(current: RequestState) -> None:
    """Raise ``KeyRequired`` if the request was sent to resume an operation."""
    if current.resuming is not None:
        raise KeyRequired(
            "This request has no key or is skipped: it would not be resumed, but run anew."
        )


def _resumed(claim: Claim, resuming: Resuming) -> Claim:
    """The claim of a request that was sent to resume a record. Raises ``ScopeUnknown``."""
    if claim.key != resuming.key:
        raise ScopeUnknown("The kept headers do not sign in whose operation this is.")
    return replace(claim, resumes=resuming.owner)


def prepare(state: AppState, route: Route, current: RequestState) -> None:
    """Look at the header of the key, and see to it that the body is kept, whoever reads it first.

    Raises nothing: what is wrong is noted in ``now.refusal``.
    """
    current.name = route.name or request.endpoint or ""
    if current.checked or (route.skip is not None and _is_skipped(route.skip, current)):
        return
    current.checked = True
    try:
        if route.key is None:
            current.key = http.header_key(request, state.settings, resumed=current.resuming is not None)
        if current.key is not None or _may_hold_key(state, route):
            _body(state, current)
        elif route.required:
            raise KeyRequired
    except IdempotencyError as refusal:
        current.refusal = refusal


def _is_skipped(skip: Skip, current: RequestState) -> bool:
    """Whether ``protect`` was told to let this request pass; asked once for each."""
    if current.skipped is None:
        current.skipped = bool(skip(request))
    return current.skipped


def _may_hold_key(state: AppState, route: Route) -> bool:
    """Whether the key may be elsewhere than in its header."""
    return route.key is not None or forms.may_have_field(request, state.settings)


def identify(state: AppState, route: Route, current: RequestState) -> Operation | None:
    """The operation that the request is about; None if it has no key and needs none.

    Nothing is read of the body of a stranger, but where a request without a key may pass.
    """
    has_key = route.key is None and current.key is not None
    scope: Scope = current_scope(route.scope) if has_key or route.required else None
    if not has_key:
        _find_key(state, route, current)
    if current.key is None:
        if route.required:
            raise KeyRequired
        return None
    if not has_key and not route.required:
        scope = current_scope(route.scope)
    if current.field is not None:
        forms.check_owner(state.app, current.field, scope, current.name)
    return Operation(current.name, route.namespace, scope, current.key, attempt=0)


def _find_key(state: AppState, route: Route, current: RequestState) -> None:
    """Look for the key elsewhere than in its header."""
    if not _may_hold_key(state, route):
        return
    body = _body(state, current)
    body.whole()
    if route.key is not None:
        current.key = http.natural_key(request, body, route, state.settings)
    elif (field := forms.read_field(body.form(), state, route)) is not None:
        current.field, current.key = field, field.key


def _body(state: AppState, current: RequestState) -> http.Body:
    current.body = current.body or http.Body(request, state.settings)
    return current.body


def claim_or_answer(
    state: AppState,
    route: Route,
    current: RequestState,
    operation: Operation,
    claim: Claim,
) -> Attempt | Response | None:
    """Ask the engine who runs the operation, and do what it decides. None: run it unprotected."""
    if not route.atomic:
        if state.is_in_its_own_way():
            raise NotAtomic(
                f"db.session had written, but not committed, when {operation.name} began: on SQLite"
                " nobody else can write until it has, the record too: commit before the operation"
            )
        with session.parked(state.db, state.pool):
            return _decide(state, route, current, operation, claim, None)
    try:
        before = session.set_aside(state.db, state.pool, state.engines_of(route.other_binds))
    except NotAtomic:
        if is_outermost_request():
            session.drop(state.db)
        raise
    try:
        return _decide(state, route, current, operation, claim, before)
    finally:
        if before is not None:
            before.end()


def _decide(
    state: AppState,
    route: Route,
    current: RequestState,
    operation: Operation,
    claim: Claim,
    before: session.SetAside | None,
) -> Attempt | Response | None:
    settings = state.settings
    pace = state.pace[operation.name]
    try:
        decision = state.engine.decide(claim, route.wait, resume=route.on_interrupted != "hold")
    except StoreUnavailable as error:
        report(state, operation, error)
        if settings.on_store_error == "reject" or claim.resumes is not None:
            raise
        log.error("operation %s runs unprotected", operation.name)
        return None
    match decision:
        case Mismatch():
            raise KeyReused
        case InProgress(seconds):
            raise _in_progress(claim, seconds, pace)
        case Interrupted():
            send(operation_interrupted, state.app, Event(operation.name))
            raise OperationInterrupted
        case Gone():
            raise LeaseLost("What was to be resumed has expired or was taken over; nothing was done.")
        case Replay(stored, attempt):
            operation.attempt = attempt
            if route.authorize_replay and not route.authorize_replay(operation):
                raise ReplayForbidden
            response = http.replay(state.app, stored, settings)
            current.is_replay = True
            event = Event(operation.name, attempt, stored.status)
            send(operation_replayed, state.app, event)
            return response
        case Claimed(execution):
            kind = AtomicAttempt if route.atomic else LeasedAttempt
            return kind(state, route, current, operation, execution).open(before)
        case impossible:
            assert_never(impossible)


def _in_progress(claim: Claim, seconds: float | None, pace: TypicalDuration) -> RequestInProgress:
    """The refusal of a duplicate; ``seconds`` is how long the lease runs, if the record was asked."""
    if seconds is None:  # Redis knows of no leases, but only of young requests
        seconds = claim.lease_seconds
    left = pace.retry_after() if seconds is None else max(1, math.ceil(seconds))
    return RequestInProgress(retry_after=left)
