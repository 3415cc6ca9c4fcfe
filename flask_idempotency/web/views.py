"""``@idempotent``, and a request's way: :func:`before`, :func:`enter`, :func:`after`, :func:`end`.

* ``before`` is the first ``url_value_preprocessor``, and comes before all ``before_request`` functions:
  it finds out what protects the endpoint. It rejects nothing: what is wrong becomes the response where
  the view would run, after the application's own functions, on which their counterparts after the
  request rely.
* ``enter`` is where the view would run, innermost: only a request that has passed every check of the
  application gets a replay, just as only such a request runs the view. It claims, and then the view
  runs, or responds at once.
* ``after`` follows ``Flask.process_response``, and so all ``after_request`` functions: it completes
  what waits for a commit above the view, and lets some responses be followed by a purge.
* ``end`` is the last ``teardown_request`` function: it ends what Flask made no response of.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from random import random
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast, overload

import flask
from flask import Flask, Response, views

from flask_idempotency import private
from flask_idempotency.core.engine import DecisionEngine, Execution
from flask_idempotency.core.errors import ConfigurationError, NotAtomic, Problem, StoreUnavailable
from flask_idempotency.core.machine import Phase
from flask_idempotency.core.records import Claim
from flask_idempotency.session.leftovers import refuse_changes, undo, waits_for_commit
from flask_idempotency.session.operation import (
    Operation,
    refuse_inside,
    running_operation,
    to_continue,
)

from . import signals
from .attempt import Attempt, LeasedAttempt
from .observe import Observed
from .request import Request, is_home, is_outermost_request
from .response import answer, handle_problem, keep_from_caches, replay
from .routes import (
    ROUTE,
    AppState,
    app_state,
    note_decorated,
    refuse_misplaced,
    resolved,
    route_of,
    supported,
)
from .settings import SAFE_METHODS, Route, RouteOptions, read_options

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

    Works bare or with options, on function views, ``MethodView`` classes (``decorators =
    [idempotent]``) and their methods, and ``async def`` views. It returns a response, so a decorator
    that works with the view's return value, such as ``marshal_with``, belongs below it.

    Raises ``ConfigurationError`` for a wrong option.
    """
    if view is not None and not callable(view):
        raise ConfigurationError("@idempotent takes a view, or options by name")
    route = read_options(options) if options else BARE
    if view is not None:
        return protected(view, route)
    decorator = partial(protected, route=route)
    setattr(decorator, ROUTE, route)
    return decorator


# For Flask-RESTful's method_decorators, which decorate a method when it is called.
setattr(idempotent, ROUTE, BARE)


def protected(view: View, route: Route) -> View:
    """The view with the protection of ``route`` around it."""
    if isinstance(view, type) and issubclass(view, views.View):
        raise ConfigurationError(
            f"@idempotent stands above the class {view.__qualname__}: put it into the class, as"
            " decorators = [idempotent], or above one of its methods"
        )
    if not route.methods:  # not by protect()
        note_decorated(view)
    is_async = inspect.iscoroutinefunction(view)

    @wraps(view)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_async and asyncio._get_running_loop() is not None:  # noqa: SLF001 -- in its __all__
            # Awaited, by an async decorator or view, in whose event loop the view then runs.
            from asgiref.sync import sync_to_async

            return sync_to_async(wrapper, thread_sensitive=False)(*args, **kwargs)
        entered = enter(route)
        if isinstance(entered, Response):
            return entered
        function = private.needed_app().ensure_sync(view) if is_async else view
        if entered is None:
            return function(*args, **kwargs)
        with entered:
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                return entered.raised(error)
            return entered.returned(result)

    setattr(wrapper, ROUTE, route)
    return cast("View", wrapper)


def register(app: Flask, state: AppState) -> None:
    """Put the functions of a request's way on ``app``."""
    # First: what a function of the application does may depend on the key, or be about the response.
    app.url_value_preprocessors.setdefault(None, []).insert(0, partial(before, state))
    private.override_process_response(app, after)
    # Flask runs these from the last to the first, so ours comes after all others.
    app.teardown_request_funcs.setdefault(None, []).insert(0, end)
    if Problem not in app.error_handler_spec[None][None]:
        app.register_error_handler(Problem, answer)


def before(state: AppState, endpoint: str | None, _values: object) -> None:
    """Begin the request to a protected endpoint, as far as that needs no user and no store."""
    request, context = private.present()
    current = Request(state, request, context)
    if endpoint is None or not state.settings.enabled:
        return
    place, view = (endpoint, request.method), state.app.view_functions[endpoint]
    if place not in state.known or state.known[place][0] is not view:
        with _finding:
            state.known[place] = _find(state, *place)
    current.dispatched = route = state.known[place][1]
    if route is None:
        return
    try:
        current.begin(route, request)
    except Exception:
        if route.enforce:
            raise
        current.skipped = True  # nobody notices what is only observed


_finding = Lock()
"""Two first requests would each wrap a view that ``protect`` covers, one around the other."""


def _find(state: AppState, endpoint: str, method: str) -> tuple[Any, Route | None]:
    """The endpoint's view, and the options that protect this method of it.

    What ``protect`` covers gets its protection here. A mistake is logged; what is only observed runs
    all the same.
    """
    views, found = state.app.view_functions, None
    try:
        found = route_of(state, endpoint, method)
        if found is not None and found.methods and not hasattr(views[endpoint], ROUTE):
            methods = [name for name in found.methods if route_of(state, endpoint, name) is found]
            found = replace(found, methods=methods)
            views[endpoint] = protected(views[endpoint], found)
        if (found is None or found.methods) and method not in SAFE_METHODS:
            refuse_misplaced(state, endpoint)
        route = None if found is None else supported(state, resolved(state, found, endpoint))
    except ConfigurationError as error:
        signals.tell_mistake(state, endpoint, error)
        if resolved(state, found or BARE).enforce:
            raise
        route = None
    return views[endpoint], route


def after(process: Callable[..., Response], *given: Any) -> Response:
    """End an operation that waited for this; keep caches away from a replay."""
    response, request = process(*given), private.needed_request()
    if "_flask_idempotency" not in request.__dict__:
        return response
    current: Request = request._flask_idempotency  # type: ignore[attr-defined]  # noqa: SLF001
    if current.observation is not None:
        current.observation.finish(response, None)
    attempt = current.open_attempt
    if attempt is not None and attempt.phase is Phase.WAITING:
        attempt.complete(response)
    purge = current.state.purge
    # At random, so that workers do not meet.
    if purge is not None and current.attempt is not None and random() * purge.every < 1:  # noqa: S311
        response.call_on_close(purge)
    if current.is_replay:
        keep_from_caches(response)
    return response


def end(error: BaseException | None) -> None:
    """End what the request leaves open, also when the worker has to exit.

    A copy of its context, in a thread that the view started, ends nothing.
    """
    request = private.needed_request()
    if "_flask_idempotency" not in request.__dict__:
        return
    current: Request = request._flask_idempotency  # type: ignore[attr-defined]  # noqa: SLF001
    if not (current.open_attempt or current.observation) or not is_home(current):
        return
    if current.open_attempt is not None:
        current.open_attempt.unanswered(error)
    if current.observation is not None:
        current.observation.finish(None, error)


def enter(route: Route) -> Attempt | Response | None:
    """Begin the present request: return what to run in, a response, or None to run unprotected.

    A problem is a response; raises all other errors.
    """
    request = private.needed_request()
    found: Request | None = getattr(request, "_flask_idempotency", None)
    current = found or Request(app_state(private.needed_app()))
    earlier, turn = current.open_attempt, object()
    has_ended = earlier is not None and earlier.phase in (Phase.AWAITING, Phase.WAITING)
    if not has_ended and (running_operation() is not None or not current.state.settings.enabled):
        return None  # an idempotent function that an idempotent view calls is part of it
    # A thread of the view may enter on a copy of the request's context.
    if current.claim is not None or vars(current).setdefault("turn", turn) is not turn:
        _refuse_second(current, earlier)
    try:
        return _entered(current, request, route)
    finally:
        del vars(current)["turn"]


def _entered(current: Request, request: flask.Request, route: Route) -> Attempt | Response | None:
    """Find out what the request is about, and claim that."""
    state = current.state
    current.is_view = current.dispatched is not None and current.dispatched.given is route
    if not current.is_view:  # a function that a view calls, or a request that the hooks have not seen
        if not route.applies_to(request.method):
            return None
        found = resolved(state, route, request.endpoint or "")
        current.begin(supported(state, found) if found.enforce else found, request)
    if current.skipped:
        return None
    if not current.route.enforce:
        if current.observation is None:
            current.observation = Observed(current, request)
        return None
    try:
        claimed = current.claim_for(request)
        if claimed is not None:
            return claim_or_answer(current, *claimed)
        signals.conclude(signals.operation_unprotected, current)
        return None
    except Problem as problem:
        return handle_problem(current, problem)
    except Exception as error:
        signals.reject(current, error)  # such as the application's 413
        raise


def _refuse_second(current: Request, earlier: Attempt | None) -> NoReturn:
    """Raise ``ConfigurationError``: the response of a request belongs to one operation."""
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
        engine, claim = _placed(state, route, claim)
        decision = engine.decide(claim, route.wait, on_interrupted=route.on_interrupted)
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
    if state.tracing is not None:
        state.tracing.link(decision.response)
    response = replay(current, operation, decision)
    current.is_replay = True
    facts = {"attempt": decision.attempt, "status": decision.response.status}
    signals.conclude(signals.operation_replayed, current, **facts)
    return response


def _placed(state: AppState, route: Route, claim: Claim) -> tuple[DecisionEngine, Claim]:
    """Where to claim, and the connection whose transaction an atomic operation is to continue.

    Raises ``NotAtomic`` for open work that an operation with a lease would meet or end.
    """
    if state.app.config["TESTING"] and (engine := state.of_test()) is not None:
        refuse_inside(state)
        state.sessions.joining()
        return engine, claim
    if route.atomic:
        if (connection := to_continue(state)) is not None:
            claim = replace(claim, connection=connection)
        return state.engine, claim
    if state.blocks_records():
        raise NotAtomic(
            f"db.session had uncommitted writes when {claim.name} began. Until they are committed,"
            " SQLite lets nobody else write, not even the record: commit them before the operation"
        )
    if not is_outermost_request():
        refuse_inside(state)
        if waits_for_commit(state.sessions.present()):
            refuse_changes(f"a view's request to its own application for {claim.name}")
    return state.engine, claim
