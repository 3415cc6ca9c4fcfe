"""``@idempotent``: the protection around a view, and what a request to one does.

It claims, runs and commits, or responds at once. Everything here happens where the view would run,
innermost: only a request that has passed every check of the application gets a replay, just as only
such a request runs the view.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast, overload

import flask
from flask import Response, views

from flask_idempotency.core.engine import DecisionEngine, Execution, InProgress, Interrupted, Settled
from flask_idempotency.core.errors import (
    ConfigurationError,
    NotAtomic,
    Problem,
    StoreUnavailable,
)
from flask_idempotency.core.logs import log
from flask_idempotency.core.machine import Phase
from flask_idempotency.core.ports import Records
from flask_idempotency.core.records import Claim
from flask_idempotency.flask_context import functions_after_request, needed_app, needed_request
from flask_idempotency.session.joining import joining_session, refuse_inside, to_continue
from flask_idempotency.session.leftovers import refuse_changes, undo, waits_for_commit
from flask_idempotency.session.operation import Operation, in_thread, running_operation

from . import signals
from .attempt import Attempt, LeasedAttempt
from .observe import observe
from .request import (
    Request,
    found_for_old,
    is_outermost_request,
)
from .response import handle_problem, replay, replayed
from .routes import ROUTE, AppState, app_state, note_decorated, refuse_unsupported
from .settings import Route, RouteOptions, read_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

View = TypeVar("View", bound=Callable[..., Any])

BARE = Route()
"""``@idempotent`` without options."""


@overload
def idempotent(view: View, /) -> View: ...


@overload
def idempotent(**options: Unpack[RouteOptions]) -> Callable[[View], View]: ...


def idempotent(view: Any = None, /, **options: Any) -> Any:
    """Make a view safe to retry: it runs once for each key, and every retry gets the same response.

    Works bare or with options (those of :class:`RouteOptions`), on function views, blueprint views,
    ``MethodView`` classes (``decorators = [idempotent]``) and their methods, and ``async def`` views.
    GET, HEAD and OPTIONS pass through untouched. It returns a response, so a decorator that works with
    the view's return value, such as ``marshal_with``, belongs below it.

    Raises ``ConfigurationError`` for a wrong option.
    """
    if view is not None and not callable(view):
        raise ConfigurationError("@idempotent takes a view, or options by name")
    route = read_options(options) if options else BARE
    if view is not None:
        return _decorated(view, route)
    decorator = partial(_decorated, route=route)
    setattr(decorator, ROUTE, route)
    return decorator


# For Flask-RESTful's method_decorators, which decorate a method when it is called.
setattr(idempotent, ROUTE, BARE)


def _decorated(view: View, route: Route) -> View:
    if isinstance(view, type) and issubclass(view, views.View):
        raise ConfigurationError(
            f"@idempotent stands above the class {view.__qualname__}: put it into the class, as"
            " decorators = [idempotent], or above one of its methods"
        )
    note_decorated(view)
    return protected(view, route)


def protected(view: View, route: Route) -> View:
    """The view with the protection of ``route`` around it."""
    if inspect.iscoroutinefunction(view):

        @wraps(view)
        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            entered = enter(route)
            if not isinstance(entered, Attempt):
                return await view(*args, **kwargs) if entered is None else entered
            with entered:
                try:
                    result = await view(*args, **kwargs)
                except Exception as error:
                    return await in_thread(entered.raised, error)
                # What the view registered may be async, too, and cannot run in this event loop.
                return await in_thread(entered.returned, result)

        wrapper: Callable[..., Any] = async_wrapper
    else:

        @wraps(view)
        def sync_wrapper(*args: Any, **kwargs: Any) -> Any:
            entered = enter(route)
            if not isinstance(entered, Attempt):
                return view(*args, **kwargs) if entered is None else entered
            with entered:
                try:
                    result = view(*args, **kwargs)
                except Exception as error:
                    return entered.raised(error)
                return entered.returned(result)

        wrapper = sync_wrapper
    setattr(wrapper, ROUTE, route)
    return cast("View", wrapper)


def enter(route: Route) -> Attempt | Response | None:
    """Begin the present request: return what to run in, a response, or None to run unprotected.

    A problem is a response; raises all other errors.
    """
    request = needed_request()
    current: Request = getattr(request, "_flask_idempotency", None) or Request(app_state(needed_app()))
    state = current.state
    earlier = current.open_attempt
    has_ended = earlier is not None and earlier.phase in (Phase.AWAITING, Phase.WAITING)
    if not has_ended and (running_operation() is not None or not state.settings.enabled):
        return None  # an idempotent function that an idempotent view calls is part of it
    if current.claim is not None:
        _refuse_second(current)
    is_view = current.dispatched is not None and current.dispatched.given is route
    if not is_view:  # a function that a view calls, or a request that the hooks have not seen
        if not route.applies_to(request.method):
            return None
        found = route.resolved(state.settings, state.scope, request.endpoint or "")
        if found.enforce:
            refuse_unsupported(state, found)
        current.prepare(request, found)
    if not current.route.enforce:
        observe(current, request)
        return None
    return _entered(current, request, is_view)


def _entered(current: Request, request: flask.Request, is_view: bool) -> Attempt | Response | None:
    """Claim what the request is about. ``is_view``: Flask itself has called this view."""
    try:
        operation = current.identify(request)
        if operation is None:
            if not current.skipped:
                signals.conclude(signals.operation_unprotected, current)
            return None
        claim = current.claim_for(request, operation)
        entered = claim_or_answer(current, operation, claim)
        if isinstance(entered, Attempt):
            entered.watch(functions_after_request(), is_view=is_view)
        return entered
    except Problem as problem:
        return handle_problem(current, problem)
    except Exception as error:
        signals.reject(current, error)  # such as the application's 413
        raise


def _refuse_second(current: Request) -> NoReturn:
    """Raise ``ConfigurationError``: the response of a request belongs to one operation."""
    earlier = current.open_attempt
    if earlier is not None and earlier.phase is Phase.AWAITING:
        earlier.unanswered(None)  # a decorator has caught its error
    mistake = ConfigurationError(
        "a second idempotent function was called in one request, or the same once more, whose response"
        " can be that of one operation alone: let one call the other, or use Idempotency.run() with a"
        " key for each; and let what tries again do so below @idempotent"
    )
    signals.tell_mistake(current.state, current.name, mistake)
    raise mistake


def claim_or_answer(current: Request, operation: Operation, claim: Claim) -> Attempt | Response | None:
    """Do what the engine decides: attempt, respond, or (None) let the view run unprotected."""
    state, route, current.claim = current.state, current.route, claim
    try:
        records, engine, claim = _placed(state, route, claim)
        found = found_for_old(records, route, operation, claim)
        decision = engine.decide(claim, route.wait, on_interrupted=route.on_interrupted, found=found)
    except NotAtomic:
        if route.atomic and is_outermost_request():
            undo(state.sessions.present())  # nobody commits what was to commit with the view
        raise
    except StoreUnavailable as error:
        if state.settings.on_store_error != "allow":
            raise
        signals.tell_failure(current, error)
        signals.conclude(signals.operation_unprotected, current, logging.ERROR, problem=error.type)
        current.claim = None
        return None
    if isinstance(decision, Execution):
        kind = Attempt if route.atomic else LeasedAttempt
        return kind(current, operation, decision).open()
    return _answer(current, operation, claim, decision)


def _placed(state: AppState, route: Route, claim: Claim) -> tuple[Records, DecisionEngine, Claim]:
    """Where to claim, and the connection whose transaction an atomic operation is to continue."""
    if state.app.config["TESTING"] and (test := state.of_test()) is not None:
        refuse_inside(state)
        joining_session(state.sessions)
        return *test, claim
    if not route.atomic:
        _refuse_open(state, claim)
    elif (connection := to_continue(state)) is not None:
        claim = replace(claim, connection=connection)
    return state.records, state.engine, claim


def _refuse_open(state: AppState, claim: Claim) -> None:
    """Raise ``NotAtomic`` for open work that an operation with a lease would meet or end."""
    if state.blocks_records():
        raise NotAtomic(
            f"db.session had uncommitted writes when {claim.name} began. Until they are committed,"
            " SQLite lets nobody else write, not even the record: commit them before the operation"
        )
    if not is_outermost_request():
        refuse_inside(state)
        if waits_for_commit(state.sessions.present()):
            refuse_changes(f"a view's request to its own application for {claim.name}")


def _answer(current: Request, operation: Operation, claim: Claim, settled: Settled) -> Response:
    """The response about an operation that is not ours to run. Raises a :class:`Problem` otherwise."""
    state = current.state
    match settled:
        case Interrupted():
            signals.note(signals.operation_interrupted, current, logging.ERROR)
        case InProgress(by_lock=True):
            current.decided_by = "lock"
    found = replayed(settled, current.route, operation, claim, state.last_seconds)
    if not found.is_comparable:
        log.warning(
            "operation %s: the stored fingerprint was made in another way or with another key, so the"
            " stored response is replayed",
            operation.name,
        )
    if state.tracing is not None:
        state.tracing.link(found.response)
    response = replay(state.app, found.response)
    current.is_replay = True
    signals.conclude(
        signals.operation_replayed,
        current,
        attempt=found.attempt,
        status=found.response.status,
    )
    return response
