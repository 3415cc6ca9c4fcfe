"""The hooks on an application: where a request begins, and where it ends.

* ``url_value_preprocessor``, before any other and all ``before_request`` functions: for a protected
  endpoint it checks the form of the key. It rejects nothing: what is wrong becomes the response where
  the view would run, after the application's own functions, on which their counterparts after the
  request rely.
* ``after_request``, after all others: completes what waits for a commit above the view, and lets some
  responses be followed by a purge.
* ``got_request_exception``: what waits there is not stored after an error that nobody handled.
* ``teardown_request``: ends what Flask made no response of, also when the worker has to exit
  (:func:`~.request.watch_end`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flask
from flask import Flask, Response, got_request_exception

from flask_idempotency.core.errors import ConfigurationError, IdempotencyError
from flask_idempotency.core.machine import Phase
from flask_idempotency.flask_context import present_request

from .identity import prepare
from .request import Request, begin_request, existing_request
from .response import answer
from .routes import (
    ROUTE,
    AppState,
    covering_route,
    needs_protect,
    refuse_contradiction,
    refuse_misplaced,
    refuse_unsupported,
    route_of,
)
from .settings import SAFE_METHODS, Route
from .signals import tell_mistake
from .views import protected


def register(app: Flask, state: AppState) -> None:
    """Put the hooks on ``app``."""
    hooks = Hooks(state)

    # A function: in each request Flask asks whether it is async, and takes longer with a method.
    def after(response: Response) -> Response:
        current: Request | None = getattr(present_request(), "_flask_idempotency", None)
        return response if current is None else hooks.after(current, response)

    # First: what a function of the application does may depend on the key, or be about the response.
    app.url_value_preprocessors.setdefault(None, []).insert(0, hooks.before)
    # Flask runs these from the last to the first, so ours come after all others.
    app.after_request_funcs.setdefault(None, []).insert(0, after)
    got_request_exception.connect(end_waiting, app)
    handlers = app.error_handler_spec[None][None]
    # On the base class: the application's own handler for any class below it is more exact and wins.
    if IdempotencyError not in handlers:
        app.register_error_handler(IdempotencyError, answer)


def end_waiting(_app: Flask, **_what: Any) -> None:
    """Do not store a waiting response: there was an error that nobody handled."""
    current = existing_request()
    attempt = None if current is None else current.open_attempt
    if attempt is not None and attempt.phase is Phase.WAITING:
        attempt.abandon()


class Hooks:
    """The hooks of one application."""

    def __init__(self, state: AppState) -> None:
        self._state = state

    def before(self, endpoint: str | None, _values: dict[str, Any] | None) -> None:
        """Check the request to a protected endpoint, as far as that needs no user and no store."""
        request: flask.Request = present_request()
        state = self._state
        current = begin_request(request, state)
        if endpoint is None or not state.settings.enabled:
            return
        place, view = (endpoint, request.method), state.app.view_functions[endpoint]
        if place not in state.known or state.known[place][0] is not view:
            state.known[place] = self._find_safely(view, *place)
        route = state.known[place][1]
        if route is None:
            return
        current.dispatched = route
        try:
            prepare(request, state, route, current)
        except Exception as error:
            if route.enforce:
                raise
            current.refusal = error

    def after(self, current: Request, response: Response) -> Response:
        """End an operation that waited for this; keep caches away from a replay."""
        if current.observation is not None:
            current.end_observation(response, None)
        attempt = current.open_attempt
        if attempt is not None and attempt.phase is Phase.WAITING:
            attempt.complete(response)
        purge = self._state.purge
        if purge is not None and current.attempt is not None and purge.is_due():
            response.call_on_close(purge)
        headers = response.headers
        # Not setdefault: Werkzeug raises and catches an error for a header that is not there.
        if current.is_replay and not headers.getlist("Cache-Control"):
            headers.add("Cache-Control", "no-store")
        return response

    def _find_safely(self, view: Any, endpoint: str, method: str) -> tuple[Any, Route | None]:
        """Like :meth:`_find`. A mistake is logged; what is only observed runs all the same."""
        state = self._state
        try:
            return self._find(view, endpoint, method)
        except ConfigurationError as error:
            tell_mistake(state.app, endpoint, error)
            route = route_of(state, endpoint, method) or Route()
            if route.resolved(state.settings, state.scope, endpoint).enforce:
                raise
            return state.app.view_functions[endpoint], None

    def _find(self, view: Any, endpoint: str, method: str) -> tuple[Any, Route | None]:
        """The endpoint's view, and the options that protect this method of it."""
        state = self._state
        refuse_contradiction(state, endpoint)
        covering = covering_route(state, endpoint)
        if covering is not None and not hasattr(view, ROUTE):
            methods = frozenset(name for name in covering.methods if needs_protect(view, name))
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
