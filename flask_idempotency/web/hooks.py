"""The hooks on an application: where a request begins, and where it ends.

* ``url_value_preprocessor``, before any other and all ``before_request`` functions: for a protected
  endpoint it checks the form of the key. It rejects nothing: what is wrong becomes the response where
  the view would run, after the application's own functions, on which their counterparts after the
  request rely.
* ``after_request``, after all others: completes what waits for a commit above the view, and lets some
  responses be followed by a purge.

What Flask made no response of ends as Flask closes the request: see :meth:`.Request.close_with`. A
``teardown_request`` function would be called after each request, protected or not.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import flask
from flask import Flask, Response

from flask_idempotency.core.errors import ConfigurationError, Problem
from flask_idempotency.core.machine import Phase
from flask_idempotency.flask_context import present_request

from .request import Request
from .response import answer, keep_from_caches
from .routes import (
    ROUTE,
    AppState,
    covering_route,
    needs_protect,
    refuse_misplaced,
    refuse_unsupported,
    route_of,
)
from .settings import SAFE_METHODS, Route
from .signals import tell_mistake
from .views import protected


def register(app: Flask, state: AppState) -> None:
    """Put the hooks on ``app``."""
    # First: what a function of the application does may depend on the key, or be about the response.
    app.url_value_preprocessors.setdefault(None, []).insert(0, partial(before, state))
    # Flask runs these from the last to the first, so ours come after all others.
    app.after_request_funcs.setdefault(None, []).insert(0, after)
    if Problem not in app.error_handler_spec[None][None]:
        app.register_error_handler(Problem, answer)


def before(state: AppState, endpoint: str | None, _values: object) -> None:
    """Check the request to a protected endpoint, as far as that needs no user and no store."""
    request: flask.Request = present_request()
    current = Request(state, request)
    if endpoint is None or not state.settings.enabled:
        return
    place, view = (endpoint, request.method), state.app.view_functions[endpoint]
    if place not in state.known or state.known[place][0] is not view:
        state.known[place] = _find_safely(state, view, *place)
    current.dispatched = route = state.known[place][1]
    if route is None:
        return
    try:
        current.prepare(request, route)
    except Exception:
        if route.enforce:
            raise
        current.skipped = True  # nobody notices what is only observed


def after(response: Response) -> Response:
    """End an operation that waited for this; keep caches away from a replay."""
    current: Request | None = getattr(present_request(), "_flask_idempotency", None)
    if current is None:
        return response
    if current.observation is not None:
        current.end_observation(response, None)
    attempt = current.open_attempt
    if attempt is not None and attempt.phase is Phase.WAITING:
        attempt.complete(response)
    purge = current.state.purge
    if purge is not None and current.attempt is not None and purge.is_due():
        response.call_on_close(purge)
    if current.is_replay:
        keep_from_caches(response)
    return response


def _find_safely(state: AppState, view: Any, endpoint: str, method: str) -> tuple[Any, Route | None]:
    """Like :func:`_find`. A mistake is logged; what is only observed runs all the same."""
    try:
        return _find(state, view, endpoint, method)
    except ConfigurationError as error:
        tell_mistake(state, endpoint, error)
        route = route_of(state, endpoint, method) or Route()
        if route.resolved(state.settings, state.scope, endpoint).enforce:
            raise
        return state.app.view_functions[endpoint], None


def _find(state: AppState, view: Any, endpoint: str, method: str) -> tuple[Any, Route | None]:
    """The endpoint's view, and the options that protect this method of it."""
    covering = covering_route(state, endpoint)
    if covering is not None and not hasattr(view, ROUTE):
        methods = [name for name in covering.methods if needs_protect(view, name)]
        if methods:
            view = protected(view, replace(covering, methods=methods))
            state.app.view_functions[endpoint] = view
    route = route_of(state, endpoint, method)
    if (route is None or route.methods) and method not in SAFE_METHODS:
        refuse_misplaced(state, endpoint)
    if route is not None:
        route = route.resolved(state.settings, state.scope, endpoint)
        refuse_unsupported(state, route)
    return view, route
