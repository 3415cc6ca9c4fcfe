"""What a request to a protected view does: claim, run, commit; or answer at once.

Everything here happens where the view would run, innermost: a replay is given only to a request that
has passed every check of the application that a first request passes.
"""

from __future__ import annotations

import logging
import math

from flask import Response, current_app, request

from flask_idempotency.core.engine import (
    Claimed,
    Gone,
    InProgress,
    Interrupted,
    Mismatch,
    Replay,
    Settled,
)
from flask_idempotency.core.errors import (
    KeyRequired,
    KeyReused,
    LeaseLost,
    NotAtomic,
    OperationInterrupted,
    Problem,
    ReplayForbidden,
    RequestInProgress,
    StoreUnavailable,
)
from flask_idempotency.core.machine import assert_never
from flask_idempotency.core.records import Claim
from flask_idempotency.web.attempt.atomic import AtomicAttempt
from flask_idempotency.web.attempt.attempt import Attempt, report
from flask_idempotency.web.attempt.leased import LeasedAttempt
from flask_idempotency.web.request.identity import identify, is_skipped, prepare, request_claim
from flask_idempotency.web.request.response import replay
from flask_idempotency.web.request.state import (
    RequestState,
    is_outermost_request,
    this_request,
)
from flask_idempotency.web.session.ends import blocks_records, drop, present_session
from flask_idempotency.web.session.joining import parked, set_aside
from flask_idempotency.web.setup.options import Route
from flask_idempotency.web.setup.routes import refuse_unsupported
from flask_idempotency.web.setup.state import AppState, app_state

from .operation import Operation, running_operation
from .signals import Event, operation_interrupted, operation_replayed, send

log = logging.getLogger("flask_idempotency")


def enter(route: Route) -> Attempt | Response | None:
    """What the present request does: run in an attempt, answer at once, or (None) run unprotected.

    Raises a :class:`Problem` where the answer is one.
    """
    state: AppState = current_app.extensions.get("idempotency") or app_state(current_app)
    current = this_request()
    if current.waiting is not None or current.raised is not None:
        raise NotAtomic(
            "a second idempotent view was called in one request, before what the first one left in"
            " db.session was committed: commit it in the first"
        )
    if running_operation() is not None or current.operation is not None or not state.settings.enabled:
        return None  # an idempotent function called by an idempotent view is part of it
    if current.route is not None and current.route.given is route:
        route = current.route
    elif not route.applies_to(request.method):
        return None
    else:  # a function that a view calls, or a request that the hooks have not seen
        refuse_unsupported(state, route, route.name or request.endpoint or "")
        route = route.resolved(state.settings, state.scope)
    try:
        prepare(state, route, current)
        operation = None if is_skipped(route, current) else identify(state, route, current)
        if operation is None:
            _check_may_run_unprotected(current)
            return None
        claim = request_claim(state, route, current, operation)
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


def claim_or_answer(
    state: AppState,
    route: Route,
    current: RequestState,
    operation: Operation,
    claim: Claim,
) -> Attempt | Response | None:
    """Ask the engine who runs the operation, and do what it decides. None: run it unprotected."""
    if not route.atomic:
        if blocks_records(state):
            raise NotAtomic(
                f"db.session had written, but not committed, when {operation.name} began: on SQLite"
                " nobody else can write until it has, the record too: commit before the operation"
            )
        with parked(state):
            decided = _decide(state, route, current, operation, claim)
        if isinstance(decided, Attempt):
            return decided.open()
        return _answer(state, route, current, operation, claim, decided)
    try:
        aside = set_aside(state, route.other_binds)
    except NotAtomic:
        if is_outermost_request():
            drop(present_session(state.db))
        raise
    with aside as before:
        decided = _decide(state, route, current, operation, claim)
        if isinstance(decided, Attempt):
            return decided.open(before)
    return _answer(state, route, current, operation, claim, decided)


def _decide(
    state: AppState, route: Route, current: RequestState, operation: Operation, claim: Claim
) -> Attempt | Settled | None:
    """What the engine decides; None: the operation runs unprotected."""
    try:
        decision = state.engine.decide(claim, route.wait, resume=route.on_interrupted != "hold")
    except StoreUnavailable as error:
        report(state, operation, error)
        if state.settings.on_store_error == "reject" or claim.resumes is not None:
            raise
        log.error("operation %s runs unprotected", operation.name)
        return None
    if not isinstance(decision, Claimed):
        return decision
    kind = AtomicAttempt if route.atomic else LeasedAttempt
    return kind(state, route, current, operation, decision.execution)


def _answer(
    state: AppState,
    route: Route,
    current: RequestState,
    operation: Operation,
    claim: Claim,
    settled: Settled | None,
) -> Response | None:
    """Do what was decided about an operation that is not ours to run."""
    match settled:
        case None:
            return None
        case Mismatch():
            raise KeyReused
        case InProgress(seconds):
            raise _in_progress(claim, seconds, state.typical_seconds[operation.name])
        case Interrupted():
            send(operation_interrupted, state.app, Event(operation.name))
            raise OperationInterrupted
        case Gone():
            raise LeaseLost("What was to be resumed has expired or was taken over; nothing was done.")
        case Replay():
            return _replay(state, route, current, operation, claim, settled)
        case impossible:
            assert_never(impossible)


def _replay(
    state: AppState,
    route: Route,
    current: RequestState,
    operation: Operation,
    claim: Claim,
    decision: Replay,
) -> Response:
    """The stored response again. Raises ``ReplayForbidden``, and ``ResponseNotKept``."""
    if decision.incomparable is not None:
        log.warning(
            "operation %s: the stored fingerprint is of %s, this one of %s; they cannot be compared, so"
            " the stored response is replayed",
            operation.name,
            decision.incomparable.origin,
            claim.fingerprint.origin,
        )
    operation.attempt = decision.attempt
    if route.authorize_replay and not route.authorize_replay(operation):
        raise ReplayForbidden
    response = replay(state.app, decision.response, state.settings)
    current.is_replay = True
    event = Event(operation.name, decision.attempt, decision.response.status)
    send(operation_replayed, state.app, event)
    return response


def _in_progress(claim: Claim, seconds: float | None, typical: float) -> RequestInProgress:
    """The refusal of a duplicate; ``seconds`` is how long the lease runs, if the record was asked."""
    if seconds is None:  # Redis knows of no leases, but only of young requests
        seconds = claim.lease_seconds
    left = typical if seconds is None else seconds  # RFC 9110 section 10.2.3 knows no fractions
    return RequestInProgress(retry_after=max(1, math.ceil(left)))
