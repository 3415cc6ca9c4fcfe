"""What a request to a protected view does: claim, run and commit, or respond at once.

Everything here happens where the view would run, innermost: only a request that has passed every check
of the application gets a replay, just as only such a request runs the view.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from flask import Request, Response

from flask_idempotency.core.engine import Claimed, DecisionEngine, InProgress, Interrupted, Settled
from flask_idempotency.core.errors import (
    ConfigurationError,
    NotAtomic,
    Problem,
    StoreUnavailable,
)
from flask_idempotency.core.logs import log
from flask_idempotency.core.machine import Phase
from flask_idempotency.core.ports import Records, Unlocked
from flask_idempotency.core.records import Claim
from flask_idempotency.flask_context import functions_after_request, needed_app, needed_request
from flask_idempotency.session.joining import connection_of_test, refuse_inside, to_continue
from flask_idempotency.session.leftovers import refuse_changes, undo, waits_for_commit
from flask_idempotency.session.operation import Operation, running_operation

from .app_state import AppState, app_state
from .atomic import AtomicAttempt
from .attempt import Attempt
from .identity import found_for_old, identify, request_claim
from .leased import LeasedAttempt
from .observe import observe
from .options import Route
from .request import RequestState, is_outermost_request, this_request
from .response import replay, replayed
from .routes import refuse_unsupported
from .signals import (
    Told,
    conclude,
    event_of,
    note,
    operation_interrupted,
    operation_replayed,
    operation_unprotected,
    reject,
    tell_failure,
    unavailable,
)


def enter(route: Route, view: object) -> Attempt | Response | None:
    """Begin the present request: return an attempt to run in, a response, or None to run unprotected.

    ``view`` is the function that ``route`` protects.

    Raises a :class:`Problem` if the response is one.
    """
    app = needed_app()
    state: AppState = app.extensions.get("idempotency") or app_state(app)
    current = this_request()
    if current.attempt is not None and current.attempt.phase in (Phase.ABOVE, Phase.WAITING):
        raise NotAtomic(
            "a second idempotent view was called in one request while the first one had left"
            " uncommitted changes in db.session: commit them in the first one"
        )
    if running_operation() is not None or not state.settings.enabled:
        return None  # an idempotent function that an idempotent view calls is part of it
    request = needed_request()
    known = current.route
    found = known if known is not None and known.given is route else _unseen(route, request, state)
    if found is None:
        return None
    route = found
    if not route.enforce:
        observe(state, route, current, request)
        return None
    try:
        operation = identify(request, state, route, current)
        if operation is None:
            _let_pass(state, current)
            return None
        if current.entered.get((operation.name, operation.key), view) != view:
            raise _shared_name(operation)
        claim = request_claim(request, state, route, current, operation)
        entered = claim_or_answer(state, route, current, operation, claim)
        if entered is not None:  # what runs unprotected may call others that do
            current.entered = {**current.entered, (operation.name, operation.key): view}
        if isinstance(entered, Attempt):
            entered.watch(functions_after_request())
        return entered
    except Exception as error:
        _note_refusal(state, current, error)
        raise


def _unseen(route: Route, request: Request, state: AppState) -> Route | None:
    """The options of a function that a view calls, or of a request that the hooks have not seen.

    None if they leave the request's method out.
    """
    if not route.applies_to(request.method):
        return None
    route = route.resolved(state.settings, state.scope, request.endpoint or "")
    if route.enforce:
        refuse_unsupported(state, route, route.name)
    return route


def _note_refusal(state: AppState, current: RequestState, error: Exception) -> None:
    """Keep a problem for the end of the request; tell other errors, such as the application's 413."""
    if isinstance(error, Problem):
        current.problem = error
    else:
        reject(state.app, current.told, error)


def _shared_name(operation: Operation) -> ConfigurationError:
    """The error for another function of this request that would be the same operation."""
    return ConfigurationError(
        f"two idempotent functions of one request are both the operation {operation.name!r}, so the"
        " second would get the first one's response: give one of them a name of its own,"
        " @idempotent(name=...)"
    )


def _let_pass(state: AppState, current: RequestState) -> None:
    """A request that ``protect(skip=...)`` leaves out, or that has no key and needs none."""
    if not current.presented.skipped:
        conclude(state.app, operation_unprotected, current.told)


def claim_or_answer(
    state: AppState,
    route: Route,
    current: RequestState,
    operation: Operation,
    claim: Claim,
) -> Attempt | Response | None:
    """Do what the engine decides: attempt, respond, or (None) let the view run unprotected."""
    current.told.claim = claim
    try:
        records, engine, claim = _placed(state, route, operation, claim)
        found = found_for_old(records, route, operation, claim)
        decision = engine.decide(claim, route.wait, on_interrupted=route.on_interrupted, found=found)
    except NotAtomic:
        if route.atomic and is_outermost_request():
            undo(state.sessions.present())  # nobody commits what was to commit with the view
        raise
    except StoreUnavailable as error:
        if state.settings.on_store_error != "allow":
            raise
        _go_unprotected(state, current.told, error)
        return None
    if isinstance(decision, Claimed):
        kind = AtomicAttempt if route.atomic else LeasedAttempt
        return kind(state, route, current, operation, decision.execution).open()
    return _answer(state, route, current, operation, claim, decision)


def _placed(
    state: AppState, route: Route, operation: Operation, claim: Claim
) -> tuple[Records, DecisionEngine, Claim]:
    """Where to claim, and the connection whose transaction an atomic operation is to continue."""
    if state.in_test is not None and (test := connection_of_test(state)) is not None:
        records = state.in_test(test)
        engine = DecisionEngine(records, Unlocked(), state.sealer, time)
        return records, engine, replace(claim, connection=test)
    if state.sessions.engines[state.bind_key] is not state.database:
        state.refuse_replaced()
    return state.records, state.engine, _continuing(state, route, operation, claim)


def _continuing(state: AppState, route: Route, operation: Operation, claim: Claim) -> Claim:
    if route.atomic:
        connection = to_continue(state, route.other_binds)
        return claim if connection is None else replace(claim, connection=connection)
    if state.blocks_records():
        raise NotAtomic(
            f"db.session had uncommitted writes when {operation.name} began. Until they are committed,"
            " SQLite lets nobody else write, not even the record: commit them before the operation"
        )
    if not is_outermost_request():
        refuse_inside(state)
        if waits_for_commit(state.sessions.present()):
            refuse_changes(f"a view's request to its own application for {operation.name}")
    return claim


def _go_unprotected(state: AppState, told: Told, error: StoreUnavailable) -> None:
    """The settings let the operation run without protection while the store is unavailable."""
    tell_failure(state.app, event_of(told, error=error), *unavailable(error))
    conclude(state.app, operation_unprotected, told, logging.ERROR, problem=error.type)


def _answer(
    state: AppState,
    route: Route,
    current: RequestState,
    operation: Operation,
    claim: Claim,
    settled: Settled,
) -> Response:
    """The response about an operation that is not ours to run. Raises a :class:`Problem` otherwise."""
    told = current.told
    match settled:
        case Interrupted():
            note(state.app, operation_interrupted, told, logging.ERROR)
        case InProgress(by_lock=True):
            told.decided_by = "lock"
    found = replayed(settled, route, operation, claim, state.last_seconds.get(operation.name, 0.0))
    if found.incomparable is not None:
        log.warning(
            "operation %s: the stored fingerprint is of %s, this one of %s; they cannot be compared, so"
            " the stored response is replayed",
            operation.name,
            found.incomparable.origin,
            claim.fingerprint.origin,
        )
    if state.tracing is not None:
        state.tracing.link(found.response)
    response = replay(state.app, found.response)
    current.is_replay = True
    conclude(state.app, operation_replayed, told, attempt=found.attempt, status=found.response.status)
    return response
