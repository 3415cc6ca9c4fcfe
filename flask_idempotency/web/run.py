"""``Idempotency.run``: the same guarantee outside of requests, for webhooks, queues and scripts."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any, cast
from uuid import UUID

from flask import Response, current_app

from flask_idempotency.core import errors
from flask_idempotency.core.fingerprint import by_value
from flask_idempotency.core.keys import Scope, natural_key
from flask_idempotency.core.records import legible
from flask_idempotency.private import present_context
from flask_idempotency.session.leftovers import holds_changes, refuse_changes
from flask_idempotency.session.operation import running_operation

from .attempt import Attempt
from .request import Request, is_in_thread_of_request, new_claim
from .routes import AppState, app_state, resolved, supported
from .settings import NOT_GIVEN, Route, RunOptions, read_options
from .signals import reject
from .steps import encoded
from .views import claim_or_answer

STARTED = ("__main__", "__mp_main__")
"""The names of the module that was started: Python's, and that of multiprocessing in a new process."""


def run(
    key: str | int | UUID,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    scope: Any,
    payload: Any,
    options: RunOptions,
) -> Any:
    """See :meth:`Idempotency.run`."""
    state = app_state(current_app)
    route = _read_route(state, function, options)
    if not isinstance(key, str) or not key:
        key = natural_key(key)
    if not state.settings.enabled:
        return function(*args)
    current = Request(state)  # not the request's: what happens here is not yet its response
    current.begin(route)
    current.make_response, current.registered = partial(_response_of, state), list
    try:
        if (outer := running_operation()) is not None:
            raise errors.IdempotencyError(
                f"run() was called inside the operation {outer.operation.name}: call the function"
                " itself, as a part of that, or call run() afterwards"
            )
        with _alone_in_context():
            state.connection_of_test()  # what was written in a test's transaction is the test's
            # What its caller has begun would end with it: be lost, or commit early.
            if holds_changes(state.sessions.present()):
                refuse_changes("run()")
            sent = encoded(payload, "the payload of run()", errors.ConfigurationError, sort_keys=True)
            claimed = new_claim(state, route, _read_scope(state, scope), key, by_value(sent))
            entered = claim_or_answer(current, *claimed)
            if entered is None:  # the database is unavailable, and the settings allow going on without
                return function(*args)
            if isinstance(entered, Attempt):
                entered = entered.run(partial(function, *args))
            return _result_of(entered)
    except errors.IdempotencyError as error:
        reject(current, error)
        raise
    finally:
        if current.open_attempt is not None:
            current.open_attempt.abandon()  # an exit has struck its own end


@contextmanager
def _alone_in_context() -> Iterator[None]:
    """Let no other thread's operation use ``db.session`` meanwhile.

    Threads and tasks may share an application context, but its session is for one of them. Raises
    ``NotAtomic`` if another ``run()`` works there, or the request whose thread this is not.
    """
    context, me = present_context(), [get_ident()]
    found = None if is_in_thread_of_request() else context.setdefault(_IN_USE, me)
    if found != me:  # a run() of this thread is around this one: has committed, or made a request
        raise errors.NotAtomic(
            "run() was called in a thread or task that shares db.session with a request or another"
            " run(): call it inside `with app.app_context():`"
        )
    try:
        yield
    finally:
        if found is me:
            context.pop(_IN_USE)


_IN_USE = "_flask_idempotency_run"


def _read_route(state: AppState, function: Callable[..., Any], options: RunOptions) -> Route:
    """The options of ``run`` for a function."""
    if inspect.iscoroutinefunction(function):
        raise errors.ConfigurationError(
            "run() cannot await an async def function: pass a plain one that calls asyncio.run"
        )
    route = replace(read_options(options, RunOptions.__annotations__), enforce=True)
    return supported(state, resolved(state, route, options.get("name") or _name(function)))


def _name(function: Callable[..., Any]) -> str:
    """The function's name, the same in every process. Raises ``ConfigurationError`` if it has none."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    if module is None or module in STARTED or "<" in f"{module}.{name}":
        raise errors.ConfigurationError(
            "run() cannot name this function so that every process knows it by that name: it is a"
            " lambda, local, partial or of the program that was started. Give it name=..., one of its"
            " own"
        )
    return f"{module}.{name}"


def _read_scope(state: AppState, scope: Any) -> Scope:
    """The scope itself: the application's callable needs a request, and there may be none."""
    if scope is NOT_GIVEN and state.scope is not None:
        raise errors.ConfigurationError(
            "run() needs scope=...: whose key it is, a str, int, UUID or None"
        )
    if scope == "":
        raise errors.ScopeUnknown
    return None if scope is NOT_GIVEN else cast("Scope", scope)


def _response_of(state: AppState, result: Any) -> Response:
    """A result as it is stored. Raises ``IdempotencyError`` if it is not JSON."""
    body = encoded(result, "the function's result", errors.IdempotencyError)
    return state.app.response_class(body, mimetype="application/json")


def _result_of(response: Response) -> Any:
    """The result in it. Raises ``OperationFailed`` if it is a failure, and ``RecordBroken``."""
    with legible():
        body = json.loads(response.get_data())
    if response.status_code >= 500:
        raise errors.OperationFailed(body.get("detail") if isinstance(body, dict) else None)
    return body
