"""What is private in Flask, or differs between its releases. No other file uses any of that.

Seen in Flask 3.0, 3.1 and the main branch that becomes 3.2:

* ``_cv_app`` holds the application's context, whose ``g`` is public.
* ``_cv_request`` holds the request's context with its ``request``. From 3.2 on there is one context for
  both, in ``_cv_app``. ``_request`` is None in one of the application alone, also in one that is pushed
  inside a request; what was there before, its ``_cv_token`` knows.
* ``_after_request_functions`` of the request's context is the list for ``flask.after_this_request``.

``tests/unit/test_private_flask.py`` fails when a release changes this.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import flask.globals
from flask.globals import _cv_app

_cv_request: ContextVar[Any] = getattr(flask.globals, "_cv_request", _cv_app)
_is_merged = _cv_request is _cv_app


def _request_around(context: Any) -> Any:
    """The request of a merged context, or of the one in which that was pushed: as before 3.2."""
    while context._request is None:  # noqa: SLF001
        token = context._cv_token  # noqa: SLF001
        if token is None or token.old_value is Token.MISSING:
            return None
        context = token.old_value
    return context._request  # noqa: SLF001


_request_of: Callable[[Any], Any] = _request_around if _is_merged else attrgetter("request")

needed_request: Callable[[], flask.Request] = flask.request._get_current_object  # type: ignore[attr-defined]  # noqa: SLF001
"""The present request. Raises Flask's ``RuntimeError`` outside one."""

needed_app: Callable[[], flask.Flask] = flask.current_app._get_current_object  # type: ignore[attr-defined]  # noqa: SLF001
"""The present application. Raises Flask's ``RuntimeError`` outside its context."""

behind: Callable[[Any], Any] = methodcaller("_get_current_object")
"""What a proxy such as ``flask.request`` stands for."""


# Asked so often that Flask's proxies, and asking whether they are bound, would be felt.


def present_request() -> Any:
    """The present request, or None. Whoever pushes an application context in it is still in it."""
    context = _cv_request.get(None)
    return None if context is None else _request_of(context)


def present() -> tuple[Any, Any]:
    """The present request, and what identifies the present application context: None if none is."""
    request, context = _cv_request.get(None), _cv_app.get(None)
    return request and _request_of(request), context and context.g


def present_context() -> Any:
    """Return what identifies the present application context: its ``flask.g``, or None."""
    context = _cv_app.get(None)
    return None if context is None else context.g


def functions_after_request() -> list[Callable[[Any], Any]]:
    """Return Flask's own list of what ``flask.after_this_request`` has registered."""
    functions: list[Callable[[Any], Any]] = _cv_request.get()._after_request_functions  # noqa: SLF001
    return functions


def override_process_response(app: flask.Flask, function: Callable[..., flask.Response]) -> None:
    """Let ``function`` make the response: given ``process_response``, and what that is given.

    Flask says that this method may be overridden. It has the context in front from 3.2 on. A function
    for ``after_request`` would cost each request of the application ten calls more.
    """
    app.process_response = partial(function, app.process_response)  # type: ignore[method-assign]
