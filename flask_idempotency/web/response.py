"""From a view's response to the stored one and back, and the response to a problem."""

from __future__ import annotations

import json
import math
from typing import Any, cast

from flask import Flask, Response
from flask.typing import ResponseReturnValue

from flask_idempotency.core.engine import InProgress, Interrupted, Mismatch, Replay, Settled
from flask_idempotency.core.errors import (
    IdempotencyError,
    KeyReused,
    OperationInterrupted,
    Problem,
    ReplayForbidden,
    RequestInProgress,
    ResponseNotKept,
)
from flask_idempotency.core.machine import assert_never
from flask_idempotency.core.records import Claim, StoredResponse
from flask_idempotency.core.storable import POINTERS, REPLAYED, storable
from flask_idempotency.flask_context import present_request
from flask_idempotency.session.operation import Operation

from .options import Route
from .settings import Settings

MEDIA_TYPE = "application/problem+json"
"""That of problems (RFC 9457 section 3)."""

_SPENT = "The operation was begun too often without success; an operator must decide."


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
    response.headers.remove(REPLAYED)
    body = response.get_data()
    too_large = len(body) > settings.max_response_bytes
    headers = storable(response.headers)
    return StoredResponse(status, headers, None if too_large else body)


def replay(app: Flask, stored: StoredResponse) -> Response:
    """The stored response again. Raises ``ResponseNotKept`` if its body was too large to store."""
    # Filtered again: somebody else may have written the record.
    headers = storable(stored.headers or ())
    if stored.body is None:
        raise ResponseNotKept(headers=tuple(h for h in headers if h[0].lower() in POINTERS))
    response = app.response_class([stored.body], stored.status, content_type="")
    response.headers.clear()  # a response may have been stored without a Content-Type
    for name, value in headers:
        response.headers.add(name, value)
    response.headers.set(REPLAYED, "true")
    return response


def replayed(
    settled: Settled, route: Route, operation: Operation, claim: Claim, last_seconds: float
) -> Replay:
    """Return the replay that the request gets. Raises the :class:`Problem` that it gets otherwise.

    ``last_seconds`` are how long such an operation took, where the record does not say.
    """
    match settled:
        case Replay(_, attempt):
            operation.attempt = attempt
            if route.authorize_replay and not route.authorize_replay(operation):
                raise ReplayForbidden
            return settled
        case Mismatch():
            raise KeyReused
        case InProgress(seconds):
            if seconds is None:  # Redis knows no leases, only young requests
                seconds = claim.lease_seconds
            left = last_seconds if seconds is None else seconds
            # RFC 9110 section 10.2.3 knows no fractions.
            raise RequestInProgress(retry_after=max(1, math.ceil(left)))
        case Interrupted():  # an atomic one is rolled back: nothing but its number can end it
            raise OperationInterrupted(_SPENT if route.atomic else None)
        case impossible:
            assert_never(impossible)


def is_made_from(response: Response, stored: Response) -> bool:
    """Return True if a response contains a stored one: the same status, and its body or its JSON.

    In doubt it does: a streamed or encoded response cannot be compared.
    """
    if response is stored:
        return True
    if response.status_code != stored.status_code:
        return False
    if response.is_streamed or response.direct_passthrough or response.content_encoding:
        return True
    return stored.get_data() in response.get_data() or _holds(
        response.get_json(silent=True), stored.get_json(silent=True)
    )


def _holds(value: Any, part: Any) -> bool:
    if value == part:
        return part is not None
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_holds(each, part) for each in inner)


def handle_problem(app: Flask, problem: Problem) -> ResponseReturnValue:
    """The response of the handler that Flask would choose among those for our own classes.

    Neither a handler for all exceptions nor ``app.handle_user_exception`` is asked: frameworks replace
    the latter with one that responds to unknown exceptions with 500.
    """
    for name in (*present_request().blueprints, None):
        handlers = app.error_handler_spec[name][None]
        for each in type(problem).__mro__:
            if each in handlers and issubclass(each, IdempotencyError):
                return cast("ResponseReturnValue", app.ensure_sync(handlers[each])(problem))
    raise problem  # not possible: the application has our handler, or its own in place of it


def problem_response(app: Flask, problem: Problem, settings: Settings) -> Response:
    """The response to a problem, in the form of RFC 9457."""
    members = {
        "type": settings.problem_base + problem.type,
        "title": problem.title,
        "status": problem.status,
        "detail": problem.detail,
    }
    response = app.response_class(json.dumps(members), status=problem.status, content_type=MEDIA_TYPE)
    if isinstance(problem, ResponseNotKept):
        response.headers.extend(problem.headers)
    return response


def lasting_response(app: Flask, problem: Problem, settings: Settings) -> Response:
    """The response for a problem that is stored: replays of it are not to be cached either."""
    response = problem_response(app, problem, settings)
    response.headers["Cache-Control"] = "no-store"
    return response
