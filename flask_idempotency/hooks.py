"""The three hooks on an application, and the answer for a problem.

* ``before_request``, first of all: for a protected endpoint it looks at the key's form and reads the
  body, before anybody else can. It answers nothing: what is wrong is told where the view would run,
  after the application's own functions, whose counterparts after the request rely on them.
* ``after_request``: problems are not cached; receivers hear of them.
* ``teardown_request``: whatever did not finish is rolled back and released, also when the worker is
  told to exit in the middle of a view.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flask import Flask, Response, request
from flask.typing import ResponseReturnValue

from .begin import prepare
from .decorator import protected
from .errors import IdempotencyError, Problem
from .http import problem_response
from .operation import known_state, request_state
from .options import Route
from .routes import ROUTE, covering_route, is_open, refuse_shared_name, route_of
from .server import warn_if_short
from .signals import Event, operation_rejected, send
from .state import AppState


def register(app: Flask, state: AppState, worker_timeout: float) -> None:
    """Put the hooks on ``app``; ``worker_timeout`` is the server's, in seconds, or 0."""
    hooks = Hooks(state, worker_timeout)
    for endpoint, view in app.view_functions.items():
        if (route := getattr(view, ROUTE, None)) is not None:
            state.refuse(route, endpoint)  # of a view that comes later the first request tells
    # First: a function of the application that parses the body may not come before its check.
    app.before_request_funcs.setdefault(None, []).insert(0, hooks.before)
    app.after_request(hooks.after)
    app.teardown_request(hooks.teardown)
    handlers = app.error_handler_spec[None][None]
    # On the base class: a handler of the application's own for any class of ours is more exact and
    # wins, and one for this class takes the place.
    if IdempotencyError not in handlers:
        app.register_error_handler(IdempotencyError, hooks.answer)


class Hooks:
    """The hooks of one application."""

    def __init__(self, state: AppState, worker_timeout: float) -> None:
        self._state, self._worker_timeout = state, worker_timeout
        self._known: dict[tuple[str, str], tuple[Any, Route | None]] = {}

    def before(self) -> None:
        """Check the request to a protected endpoint, as far as that needs nobody and nothing."""
        if request.endpoint is None or not self._state.settings.enabled:
            return
        route = self._route(request.endpoint, request.method)
        if route is not None:
            prepare(self._state, route, request_state())

    def after(self, response: Response) -> Response:
        """Mark a problem as not to be cached, whoever formatted it."""
        now = known_state()
        if now is None or now.problem is None:
            return response
        problem = now.problem
        response.headers.setdefault("Cache-Control", "no-store")
        if problem.retry_after is not None:
            response.headers.setdefault("Retry-After", str(problem.retry_after))
        event = Event(now.name, status=response.status_code, problem=problem.type, error=problem)
        send(operation_rejected, self._state.app, event)
        return response

    def teardown(self, _error: BaseException | None) -> None:
        """Roll back what is still open."""
        now = known_state()
        if now is not None and now.clean_up is not None:
            now.clean_up()

    def answer(self, error: IdempotencyError) -> ResponseReturnValue:
        """A problem's answer; other errors of ours are the application's mistakes, a plain 500."""
        if isinstance(error, Problem):
            now = request_state()
            now.problem = now.problem or error  # run() in a view raises some that no attempt has seen
            return problem_response(self._state.app, error, self._state.settings)
        raise error

    def _route(self, endpoint: str, method: str) -> Route | None:
        """The options the endpoint is protected with, if it is; protects it now if it ought to be."""
        view = self._state.app.view_functions[endpoint]
        known = self._known.get((endpoint, method))
        if known is None or known[0] is not view:
            known = self._known[endpoint, method] = self._find(endpoint, method)
        return known[1]

    def _find(self, endpoint: str, method: str) -> tuple[Any, Route | None]:
        """The endpoint's view, and the options that this method of it is protected with."""
        view = self._state.app.view_functions[endpoint]
        covering = covering_route(self._state, endpoint)
        if covering is not None and not hasattr(view, ROUTE):
            refuse_shared_name(self._state, covering)
            methods = frozenset(name for name in covering.methods or () if is_open(view, name))
            if methods:
                view = protected(view, replace(covering, methods=methods))
                self._state.app.view_functions[endpoint] = view
        route = route_of(self._state, endpoint, method)
        if route is not None and route.lease is not None:
            warn_if_short(route.lease, self._worker_timeout, f"the one of {endpoint}")
        return view, route
