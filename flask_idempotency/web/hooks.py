"""The hooks on an application, the envelope around its views, and the response to a problem.

* ``url_value_preprocessor``, before any other and all ``before_request`` functions: for a protected
  endpoint it checks the form of the key, and keeps the body from then on, whoever reads it first. It
  rejects nothing: what is wrong is raised where the view would run, after the application's own
  functions, on which their counterparts after the request rely.
* ``after_request``: marks problems and replays as not to be cached, tells receivers, and lets some
  responses be followed by a purge.
* The envelope: gives an error of the view its response above the view's decorators; rolls back and
  releases what did not finish, also when the worker has to exit in the middle of a view.
* ``teardown_request``: does that for a response that waits above its view. It is there from the first
  such response on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from flask import Flask, Request, Response, got_request_exception, request
from flask.typing import ResponseReturnValue

from flask_idempotency.core.errors import (
    ConfigurationError,
    IdempotencyError,
    NotAtomic,
    Problem,
)
from flask_idempotency.core.logs import log
from flask_idempotency.core.machine import Phase
from flask_idempotency.flask_context import functions_after_request, handle_error, present_request
from flask_idempotency.session.operation import in_thread
from flask_idempotency.session.stray import warn_undone

from .app_state import AppState
from .environment import warn_if_short
from .identity import prepare
from .options import NOT_GIVEN, SAFE_METHODS, Route
from .request import (
    Begun,
    RequestState,
    begin_request,
    existing_request,
    this_request,
)
from .response import handle_problem, is_made_from, problem_response
from .routes import (
    ROUTE,
    covering_route,
    needs_protect,
    note_registered,
    refuse_contradiction,
    refuse_hidden,
    refuse_misplaced,
    refuse_shared_name,
    refuse_unsupported,
    route_of,
)
from .signals import reject
from .views import protected

_ENVELOPE = "__idempotency_envelope__"

AfterFunction = Callable[[Response], Response]


def register(app: Flask, state: AppState, worker_timeout: float) -> None:
    """Put the hooks on ``app``; ``worker_timeout`` is the server's, in seconds, or 0."""
    hooks = Hooks(state, worker_timeout)
    for endpoint, view in app.view_functions.items():
        if (route := getattr(view, ROUTE, None)) is not None:
            refuse_unsupported(state, route, endpoint)  # for a later view, the first request does this

    # A function: in each request Flask asks whether it is async, and takes longer with a method.
    def after(response: Response) -> Response:
        current: RequestState | None = getattr(present_request(), "_flask_idempotency", None)
        return response if current is None else hooks.after(current, response, after)

    # First: whatever a function of the application reads of the body must be kept.
    app.url_value_preprocessors.setdefault(None, []).insert(0, hooks.before)
    # Flask runs these from the last to the first, so ours comes after all others.
    app.after_request_funcs.setdefault(None, []).insert(0, after)
    got_request_exception.connect(hooks.end_waiting, app)
    handlers = app.error_handler_spec[None][None]
    # On the base class: the application's own handler for any class below it is more exact and wins.
    if IdempotencyError not in handlers:
        app.register_error_handler(IdempotencyError, hooks.answer)


class Hooks:
    """The hooks of one application."""

    def __init__(self, state: AppState, worker_timeout: float) -> None:
        self._state, self._worker_timeout = state, worker_timeout
        self._known = state.known
        self._warned: set[str] = set()
        self._watches_end = False

    def before(self, endpoint: str | None, _values: dict[str, Any] | None) -> None:
        """Check the request to a protected endpoint, as far as that needs no user and no store."""
        request: Request = present_request()
        current = begin_request(request)
        route = None
        if endpoint is not None and self._state.settings.enabled:
            route = self._route(endpoint, request.method)
        if route is not None:
            current.route = route
            try:
                prepare(request, self._state, route, current)
            except Exception as error:
                if route.enforce:
                    raise
                current.presented.refusal = error

    def after(self, current: RequestState, response: Response, hook: AfterFunction) -> Response:
        """End an operation that waited for this; keep caches away from a replay or a problem."""
        if current.observation is not None:
            current.end_observation(response)
        if (attempt := current.attempt) is not None and attempt.phase is Phase.WAITING:
            response = self._complete(attempt, response, hook)
        purge = self._state.purge
        if purge is not None and current.told.attempt is not None and purge.is_due():
            response.call_on_close(purge)
        problem, headers = current.problem, response.headers
        current.problem = None  # its traceback leads back here: a cycle would keep the request alive
        # Not setdefault: Werkzeug raises and catches an error for a header that is not there.
        if (problem is not None or current.is_replay) and not headers.getlist("Cache-Control"):
            headers.add("Cache-Control", "no-store")
        if problem is None:
            return response
        if problem.retry_after is not None and not headers.getlist("Retry-After"):
            headers.add("Retry-After", str(problem.retry_after))
        reject(self._state.app, current.told, problem, response.status_code)
        return response

    def _complete(self, attempt: Begun, response: Response, hook: AfterFunction) -> Response:
        """Store the response of a view whose work was committed, or not, above it.

        An error of ours gets its response as if the view had raised it, and the application's
        ``after_request`` functions run again on that one; those that the view registered do not, nor
        does our own ``hook``. Other errors go to Flask, and so does one that nobody handles.
        """
        try:
            attempt.complete()
        except IdempotencyError as error:
            app = self._state.app
            if isinstance(error, Problem):
                response = app.make_response(handle_problem(app, error))
            else:
                response = app.make_response(handle_error(app, error))
            functions = [*functions_after_request()]
            for name in (*request.blueprints, None):
                functions += reversed(app.after_request_funcs.get(name, ()))
            for function in functions:
                if function is not hook:
                    response = app.ensure_sync(function)(response)
        return response

    def end_waiting(self, _app: Flask, **_what: Any) -> None:
        """Do not store a waiting response: there was an error that nobody handled."""
        if (current := existing_request()) is not None:
            current.abandon(Phase.WAITING)

    def _enveloped(self, view: Any) -> Any:
        """The view, watched for errors that leave its decorators.

        An error of the view itself has passed them, as it does without us, and gets its response now.
        After an error of theirs, a waiting response is not stored.
        """
        if inspect.iscoroutinefunction(view):

            @wraps(view)
            async def async_envelope(*args: Any, **kwargs: Any) -> Any:
                current = this_request()
                current.is_dispatched = True
                try:
                    result = await view(*args, **kwargs)
                except BaseException as error:
                    return await in_thread(self._answer, error)
                return self._after_view(current, result)

            envelope: Any = async_envelope
        else:

            @wraps(view)
            def sync_envelope(*args: Any, **kwargs: Any) -> Any:
                current = this_request()
                current.is_dispatched = True
                try:
                    result = view(*args, **kwargs)
                except BaseException as error:
                    return self._answer(error)
                return self._after_view(current, result)

            envelope = sync_envelope
        setattr(envelope, _ENVELOPE, True)
        return envelope

    def _answer(self, error: BaseException) -> Any:
        """The response to an error of the view, and to any problem; raises other errors."""
        current = this_request()
        if current.observation is not None:
            current.observation.error = error
        attempt = current.attempt
        try:
            if attempt is not None and attempt.phase is Phase.ABOVE and isinstance(error, Exception):
                response = attempt.respond_to(error)
                if current.attempt is not None:
                    self._watch_end()
                return response
            # An open one: an exit has struck its own end.
            current.abandon(Phase.WAITING, Phase.ABOVE, Phase.OPEN, Phase.IN_VIEW)
            raise error
        except Problem as problem:
            current.problem = problem  # no attempt has seen that of run(), or of the view itself
            return handle_problem(self._state.app, problem)
        finally:
            del error  # a cycle: its traceback leads here

    def _after_view(self, current: RequestState, result: Any) -> Any:
        """The result that left the view's decorators."""
        if (attempt := current.attempt) is not None:
            if attempt.phase is Phase.ABOVE:
                return self._after_error(current.told.name, attempt, result)
            self._watch_end()
        if current.response is not None and current.response is not result:
            self._warn_if_replaced(current.told.name, current.response, result)
        return result

    def _warn_if_replaced(self, name: str, stored: Response, result: Any) -> None:
        """Log, once for each view, that a decorator replaced the stored response."""
        if name in self._warned or self._route(request.endpoint or "", request.method) is None:
            return  # a view that calls a protected function makes a response of its own
        try:
            response = self._state.app.make_response(result)
        except Exception:  # no response, as Flask will say
            return
        if not is_made_from(response, stored):
            self._warned.add(name)
            log.warning(
                "the stored response of %s (%d) is not the one that left the view's decorators (%d):"
                " one of them, such as marshal_with, replaced it. Put that decorator below @idempotent",
                name,
                stored.status_code,
                response.status_code,
            )

    def _after_error(self, name: str, attempt: Begun, result: Any) -> Any:
        """Do not store a response that a decorator made of the view's error.

        Raises ``NotAtomic`` if it reports success although the view's commits are rolled back.
        """
        try:
            response = self._state.app.make_response(result)
        finally:
            has_committed = attempt.has_committed()
            attempt.abandon()
        if response.status_code < 400 and has_committed:
            raise NotAtomic(
                f"a decorator above the view of {name} responded with {response.status_code} to"
                " an error of the view, which rolls back everything that the view committed: put the"
                " decorator below @idempotent"
            )
        if response.status_code < 500 and has_committed:
            warn_undone(name, response.status_code)
        return response

    def _watch_end(self) -> None:
        """Let each request's end be watched, from the first on whose response waits above its view.

        Not before: most applications have none, and Flask asks a lot about each function it calls.
        """
        if not self._watches_end:
            self._watches_end = True
            functions = self._state.app.teardown_request_funcs
            functions[None] = [self._teardown, *functions[None]]  # a thread may be in the list itself

    def _teardown(self, error: BaseException | None) -> None:
        """Roll back what still waits after an exit of the worker.

        Without an error, a waiting response goes on waiting: what ends here is a copy of the request's
        context, in a thread that the view started.
        """
        if (current := existing_request()) is None:
            return
        if error is None:
            current.abandon(Phase.OPEN)
            return
        current.abandon(Phase.OPEN, Phase.WAITING)
        if current.observation is not None:
            current.observation.error = error
            current.end_observation(None)

    def answer(self, error: IdempotencyError) -> ResponseReturnValue:
        """The response to a problem. Our other errors go where they would without this handler."""
        app = self._state.app
        if isinstance(error, Problem):
            this_request().problem = error  # it may come from a function before the view
            return problem_response(app, error, self._state.settings)
        handlers = app.error_handler_spec[None][None]
        for kind in type(error).__mro__:
            handler = handlers.get(kind)
            if handler is not None and handler != self.answer:
                return app.ensure_sync(handler)(error)  # type: ignore[no-any-return]
        raise error

    def _route(self, endpoint: str, method: str) -> Route | None:
        """The endpoint's options if it is protected; protects it now if ``protect`` covers it."""
        view = self._state.app.view_functions[endpoint]
        if (endpoint, method) not in self._known or self._known[endpoint, method][0] is not view:
            self._known[endpoint, method] = self._find_safely(endpoint, method)
        return self._known[endpoint, method][1]

    def _find_safely(self, endpoint: str, method: str) -> tuple[Any, Route | None]:
        """Like :meth:`_find`; a mistake in what is only observed is logged."""
        try:
            return self._find(endpoint, method)
        except ConfigurationError as error:
            route = route_of(self._state, endpoint, method) or Route()
            if route.resolved(self._state.settings, self._state.scope, endpoint).enforce:
                raise
            log.error("%s is not observed: %s", endpoint, error)
            return self._state.app.view_functions[endpoint], None

    def _find(self, endpoint: str, method: str) -> tuple[Any, Route | None]:
        """The endpoint's view, and the options that protect this method of it."""
        self._state.has_served = True
        refuse_contradiction(self._state, endpoint)
        view = self._state.app.view_functions[endpoint]
        covering = covering_route(self._state, endpoint)
        if covering is not None and not hasattr(view, ROUTE):
            refuse_shared_name(self._state, covering)
            methods = frozenset(name for name in covering.methods or () if needs_protect(view, name))
            if methods:
                view = protected(view, replace(covering, methods=methods))
                self._state.app.view_functions[endpoint] = view
        route = route_of(self._state, endpoint, method)
        if route is not None and route.methods is None:
            note_registered(view)
        elif method not in SAFE_METHODS:
            refuse_misplaced(self._state, endpoint)
            if route is not None:
                refuse_hidden(self._state, endpoint, method, route)
        if not hasattr(view, _ENVELOPE):
            # Every view: below a decorator that hides it, a protected one cannot be recognised.
            view = self._enveloped(view)
            self._state.app.view_functions[endpoint] = view
        if route is not None:
            if route.lease is not NOT_GIVEN:
                warn_if_short(route.lease, self._worker_timeout, f"the option lease of {endpoint}")
            route = route.resolved(self._state.settings, self._state.scope, endpoint)
            refuse_unsupported(self._state, route, route.name)
            if not route.enforce:
                self._watch_end()
        return view, route
