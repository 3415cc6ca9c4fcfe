"""From a view's response to the stored one and back, and the response to a problem."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from flask import Response
from werkzeug import Response as BaseResponse
from werkzeug.exceptions import InternalServerError

from flask_idempotency.core.engine import Replay
from flask_idempotency.core.errors import (
    IdempotencyError,
    Problem,
    ReplayForbidden,
    ResponseNotKept,
)
from flask_idempotency.core.records import POINTERS, REPLAYED, StoredResponse, storable
from flask_idempotency.private import needed_app, present_request
from flask_idempotency.session.operation import Operation

from .request import Request
from .routes import AppState, app_state
from .settings import Settings
from .signals import reject

MEDIA_TYPE = "application/problem+json"
"""That of problems (RFC 9457 section 3)."""


def capture(response: Response, settings: Settings) -> StoredResponse:
    """The response to store.

    Reads a generator's body to its end; the response keeps what it gave.
    Removes the mark of a replay if the view passed one on from elsewhere. Raises ``IdempotencyError``
    for a status that no client understands.
    """
    status = response.status_code
    if not 100 <= status <= 599:
        raise IdempotencyError(f"the view returned the status {status}; allowed: 100 to 599")
    response.direct_passthrough = False
    response.make_sequence()  # get_data() would not, of a class that says so
    response.headers.remove(REPLAYED)
    body = b"".join(response.iter_encoded())
    too_large = len(body) > settings.max_response_bytes
    return StoredResponse(status, storable(response.headers), None if too_large else body)


def replay(current: Request, operation: Operation, found: Replay) -> Response:
    """The stored response again.

    Raises ``ReplayForbidden``, or ``ResponseNotKept`` if its body was too large to store.
    """
    operation.attempt, stored = found.attempt, found.response
    authorize = current.route.authorize_replay
    if authorize is not None and not authorize(operation):
        raise ReplayForbidden
    # Filtered again: somebody else may have written the record.
    headers = storable(stored.headers or ())
    if stored.body is None:
        problem = ResponseNotKept()
        problem.headers = tuple(line for line in headers if line[0].lower() in POINTERS)
        raise problem
    response = current.state.app.response_class([stored.body], stored.status, content_type="")
    response.headers.clear()  # a response may have been stored without a Content-Type
    for name, value in headers:
        response.headers.add(name, value)
    response.headers.add(REPLAYED, "true")
    return response


def handle_problem(current: Request, problem: IdempotencyError) -> Response:
    """The response to a problem, which ends the request; tells its event.

    Raises what :func:`respond_to` does.
    """
    response = respond_to(current.state, problem)
    reject(current, problem, response.status_code)
    return response


def respond_to(state: AppState, problem: IdempotencyError) -> Response:
    """The response to a problem, by the application's handler for it if it has one.

    Asked are the handlers for our own classes, as Flask would choose among them. Neither a handler for
    all exceptions nor ``app.handle_user_exception`` is: frameworks replace the latter with one that
    responds to unknown exceptions with 500. Another error of ours is raised if the application has no
    handler for it.
    """
    app = state.app
    for name in (*present_request().blueprints, None):
        handlers = app.error_handler_spec[name][None]
        for each in type(problem).__mro__:
            handler = handlers.get(each)
            if handler is not None and handler is not answer and issubclass(each, IdempotencyError):
                return _completed(app.make_response(app.ensure_sync(handler)(problem)), problem)
    if not isinstance(problem, Problem):
        raise problem
    return _completed(problem_response(state, problem), problem)


def _completed(response: Response, problem: IdempotencyError) -> Response:
    """With the headers that every response to a problem has."""
    keep_from_caches(response)
    headers = getattr(problem, "headers", ())  # such as where to look for the result
    if problem.retry_after is not None:
        headers = (*headers, ("Retry-After", str(problem.retry_after)))
    response.headers.extend([line for line in headers if line[0] not in response.headers])
    return response


def answer(problem: Problem) -> Response:
    """Our own error handler, for a problem that is raised where no wrapper of ours returns it."""
    return respond_to(app_state(needed_app()), problem)


def keep_from_caches(response: Response) -> None:
    """Say that no cache may keep a response, unless it says itself what one may do."""
    # Not setdefault: Werkzeug raises and catches an error for a header that is not there.
    if not response.headers.getlist("Cache-Control"):
        response.headers.add("Cache-Control", "no-store")


def overwrite(response: Response, problem: BaseResponse, own: Collection[str]) -> None:
    """Turn a response that is about to be sent into that to a problem.

    The headers ``own`` were the view's, and go; what the application has added above stays.
    """
    kept = [line for line in response.headers if line[0].lower() not in own]
    response.direct_passthrough = False
    response.set_data(problem.get_data())
    response.status = problem.status
    response.headers.clear()
    response.headers.extend([*kept, *problem.headers])


def names_of(response: Response) -> frozenset[str]:
    """The names of a response's headers, in lower case."""
    return frozenset(name.lower() for name, _ in response.headers)


@contextmanager
def never_sent(response: Response, own: Collection[str]) -> Iterator[None]:
    """A plain 500 takes the place of a response if anything is raised.

    Flask swallows that while it handles an exception, and sends the response as it is.
    """
    try:
        yield
    except Exception:
        overwrite(response, InternalServerError().get_response(), own)
        raise


def problem_response(state: AppState, problem: Problem) -> Response:
    """The response to a problem, in the form of RFC 9457."""
    members = {
        "type": state.settings.problem_base + problem.type,
        "title": problem.title,
        "status": problem.status,
        "detail": problem.detail,
    }
    text, status = json.dumps(members), problem.status
    return state.app.response_class(text, status, problem.headers, content_type=MEDIA_TYPE)
