"""What is private in Flask or SQLAlchemy, or differs between releases of Flask. No other names these.

Seen in Flask 3.0, 3.1 and the main branch that becomes 3.2:

* ``_cv_app`` holds the application's context, whose ``g`` is public.
* ``_cv_request`` holds the request's context with its ``request``. From 3.2 on there is one context for
  both, in ``_cv_app``. ``_request`` is None in one of the application alone, also in one that is pushed
  inside a request; what was there before, its ``_cv_token`` knows.
* ``_after_request_functions`` of the request's context is the list for ``flask.after_this_request``.

Seen in SQLAlchemy 2.0.26, 2.0.58 and 2.1.9: ``_connections`` of a session's transaction has, for each
engine or connection that it was asked for with, the connection, the transaction on it, whether to
commit that, and whether to close the connection. ``_savepoint`` of a nested transaction is its name.
``_trans_context_manager`` of a connection is the transaction of the innermost ``with`` that goes on.

``tests/unit/test_private.py`` fails when a release changes it.
"""

# ruff: noqa: SLF001 -- this is what the file is for

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from functools import partial
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

import flask.globals
from flask.globals import _cv_app
from sqlalchemy import Connection, NestedTransaction
from sqlalchemy.orm import Session, SessionTransaction

_cv_request: ContextVar[Any] = getattr(flask.globals, "_cv_request", _cv_app)
_is_merged = _cv_request is _cv_app


def _request_around(context: Any) -> Any:
    """The request of a merged context, or of the one in which that was pushed: as before 3.2."""
    while context._request is None:
        token = context._cv_token
        if token is None or token.old_value is Token.MISSING:
            return None
        context = token.old_value
    return context._request


_request_of: Callable[[Any], Any] = _request_around if _is_merged else attrgetter("request")

needed_request: Callable[[], flask.Request] = flask.request._get_current_object  # type: ignore[attr-defined]
"""The present request. Raises Flask's ``RuntimeError`` outside one."""

needed_app: Callable[[], flask.Flask] = flask.current_app._get_current_object  # type: ignore[attr-defined]
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
    functions: list[Callable[[Any], Any]] = _cv_request.get()._after_request_functions
    return functions


def override_process_response(app: flask.Flask, function: Callable[..., flask.Response]) -> None:
    """Let ``function`` make the response: given ``process_response``, and what that is given.

    Flask says that this method may be overridden. It has the context in front from 3.2 on. A function
    for ``after_request`` would cost each request of the application ten calls more.
    """
    app.process_response = partial(function, app.process_response)  # type: ignore[method-assign]


# Of SQLAlchemy.

_CONNECTION = itemgetter(0)


def connections(session: Session) -> set[Connection]:
    """The connections of the session's present transaction."""
    transaction = session.get_transaction()
    return set() if transaction is None else set(map(_CONNECTION, transaction._connections.values()))


savepoint_of: Callable[[NestedTransaction], Any] = attrgetter("_savepoint")
"""The name of its savepoint."""


def is_block(nested: NestedTransaction) -> bool:
    """Return True if the innermost ``with`` block ends it: until then, nothing may come behind it."""
    return nested.connection._trans_context_manager is nested


def begun_by(session: Session) -> list[SessionTransaction]:
    """The transactions that the session has open, each inside the next one.

    A listener that calls ``begin_nested()`` when one ends may leave one behind whose root is gone.
    """
    found, transaction = [], session.get_nested_transaction()
    while transaction is not None:
        found.append(transaction)
        transaction = transaction.parent
    root = session.get_transaction()
    if found and found[-1] is root:
        return found
    return [] if root is None else [root]


def continue_nested(session: Session, connection: Connection) -> None:
    """Let the session's transactions go on in savepoints of ``connection``, which they are in.

    When one ends, its savepoint ends, and neither the connection's transaction nor its time with us.
    """
    for each in reversed(begun_by(session)):
        if connection in each._connections:
            nested: Any = (connection, connection.begin_nested(), True, False)
            for bind, found in list(each._connections.items()):
                if found[0] is connection:
                    each._connections[bind] = nested
