"""Requests into plain values, plain values into responses."""

from __future__ import annotations

import hashlib
import io
import json
from typing import Any, cast
from uuid import UUID

from flask import Flask, Request, Response
from flask import request as present_request
from flask.typing import ResponseReturnValue
from werkzeug.datastructures import Headers
from werkzeug.exceptions import (
    ClientDisconnected,
    HTTPException,
    LengthRequired,
    RequestEntityTooLarge,
)
from werkzeug.http import HTTP_STATUS_CODES
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder, NeedData

from . import flashes
from .config import Settings
from .core import fingerprint as fp
from .core.keys import parse_key
from .core.policy import POINTERS, REASON, reason_in, storable
from .core.records import Answer
from .errors import (
    BodyIncomplete,
    ConfigurationError,
    IdempotencyError,
    KeyMalformed,
    Problem,
    ResponseNotKept,
)
from .options import FormField, Route

REQUEST = "request"
"""What the request of a resumable operation is sealed for."""


def header_key(request: Request, settings: Settings, *, resumed: bool = False) -> str | None:
    """The key in the request's header, or None without one. Raises ``KeyMalformed``."""
    value = request.headers.get(settings.header)
    if value is None:
        return None
    if resumed:  # accepted when it came; the limits may be others by now
        return parse_key(value, len(value))
    return parse_key(value, settings.max_key_length, settings.min_key_length)


def natural_key(request: Request, route: Route, settings: Settings) -> str | None:
    """The key that ``route.key`` finds in the request. Raises ``KeyMalformed``, ``BodyMalformed``."""
    longest = settings.max_key_length
    match route.key:
        case fp.Pointer():
            value = fp.resolve(fp.parse_json(request.get_data()), route.key)
            return None if value is fp.MISSING else fp.natural_key(value, longest)
        case FormField(name):
            values = request.form.getlist(name)
            if len(values) > 1:
                raise KeyMalformed(f"The field {name} that serves as key is there more than once.")
            return fp.natural_key(values[0], longest) if values else None
        case function if callable(function):
            value = function()
            if value is None:
                return None
            # Any kind of JSON may be what a client has sent; the rest is a mistake of ours.
            if not isinstance(value, str | int | float | list | dict | UUID):
                raise ConfigurationError(
                    "The callable of the option key must return a str, int, UUID or None, not"
                    f" {type(value).__name__}."
                )
            return fp.natural_key(str(value) if isinstance(value, UUID) else value, longest)
    return header_key(request, settings)


def read_body(request: Request) -> None:
    """Read the whole body and make sure it is whole; the view finds it in ``request`` as ever.

    Servers hand a body that broke off to the application as if it were complete, and Werkzeug cuts a
    chunked body silently at ``MAX_CONTENT_LENGTH``: both would make different requests look equal.
    Raises ``BodyIncomplete``, or Werkzeug's 411 and 413.
    """
    expected = request.content_length
    chunked = "chunked" in request.environ.get("HTTP_TRANSFER_ENCODING", "").lower()
    if chunked and not request.environ.get("wsgi.input_terminated"):
        raise LengthRequired("This server cannot read a chunked body: send a Content-Length.")
    untouched = "stream" not in request.__dict__ and "form" not in request.__dict__
    try:
        body = request.get_data(cache=True)
    except ClientDisconnected as error:
        raise BodyIncomplete from error
    except HTTPException:
        raise
    except Exception as error:  # each server has errors of its own for a body that breaks off
        raise BodyIncomplete from error
    if expected and not body and not untouched:
        raise ConfigurationError(
            "something read the request's stream or form before the idempotent view could keep its"
            " body: call request.get_data() before, and let the view's decorators use functools.wraps"
        )
    if expected is not None and len(body) != expected:
        raise BodyIncomplete
    if chunked and len(body) == request.max_content_length and request.input_stream.read(1):
        raise RequestEntityTooLarge
    if untouched:  # for a view that reads the stream, or makes a request of its own out of the environ
        request.environ["wsgi.input"] = io.BytesIO(body)
        request.__dict__["stream"] = io.BytesIO(body)


def fingerprint(request: Request, route: Route) -> fp.Fingerprint:
    """What the request is compared by. Raises ``BodyMalformed`` where the body must be JSON."""
    if callable(route.fingerprint):
        return fp.by_value(route.fingerprint())
    parts = _parts(request)
    if route.fingerprint == "request":
        return fp.by_request(parts)
    if route.fingerprint == "json":
        return fp.by_json(parts)
    assert not isinstance(route.fingerprint, str)  # noqa: S101 -- read_options allows no other
    return fp.by_fields(parts, route.fingerprint)


def _parts(request: Request) -> fp.RequestParts:
    rule = request.url_rule
    by_host = rule is not None and (rule.host or rule.subdomain)
    form = _multipart(request) if request.mimetype == "multipart/form-data" else None
    return fp.RequestParts(
        method=request.method,
        host=request.host if by_host else None,
        path=request.path,
        query=request.query_string,
        media_type=request.mimetype,
        body=request.get_data() if form is None else b"",
        form=form,
    )


def _multipart(request: Request) -> tuple[fp.FormPart, ...] | None:
    """The parts of the body, undecoded, or None if it is no form: then it counts by its bytes.

    Werkzeug's ``request.form`` will not do: it leaves out what it cannot read, and replaces what is
    not UTF-8, so that different bodies would look equal.
    """
    boundary = request.mimetype_params.get("boundary", "").encode("latin-1", "replace")
    decoder = MultipartDecoder(boundary)
    decoder.receive_data(request.get_data())
    decoder.receive_data(None)
    parts: list[fp.FormPart] = []
    head: tuple[str, str | None, str] = ("", None, "")
    digest = hashlib.sha256()
    try:
        while not isinstance(event := decoder.next_event(), Epilogue):
            if isinstance(event, NeedData):
                return None
            if isinstance(event, (Field, File)):
                filename = event.filename if isinstance(event, File) else None
                head = (event.name, filename, event.headers.get("Content-Type", ""))
                digest = hashlib.sha256()
            elif isinstance(event, Data):
                digest.update(event.data)
                if not event.more_data:
                    parts.append(fp.FormPart(*head, digest.digest()))
    except (ValueError, HTTPException):
        return None
    return tuple(parts)


def packed(request: Request, route: Route, settings: Settings, form_key: str | None) -> bytes:
    """What it takes to send the request again: method, URL, headers that the route names, body.

    ``form_key`` is the key that came from a form's field: it goes into the header, as the field may
    be too old by then.
    """
    names = {"content-type", settings.header.lower(), *map(str.lower, route.resumable or ())}
    head: dict[str, Any] = {
        "method": request.method,
        "base_url": request.root_url,
        "path": request.path,
        "query": request.query_string.decode("latin-1"),
        "headers": [(n, v) for n, v in request.headers.items() if n.lower() in names],
    }
    if form_key is not None:
        head["headers"] += [(settings.header, form_key)]
    return json.dumps(head).encode() + b"\n" + request.get_data()


def capture(response: Response, settings: Settings) -> Answer:
    """The answer to store. Reads a generator's body to its end; the response keeps what it gave.

    Only a replay is marked as one: a mark that the view has passed on from elsewhere is taken off.
    Raises ``IdempotencyError`` for a status that no client understands.
    """
    if not 100 <= response.status_code <= 599:
        raise IdempotencyError(
            f"the view answered with the status {response.status_code}; allowed: 100 to 599"
        )
    response.direct_passthrough = False
    response.headers.remove(settings.replayed_header)
    body = response.get_data()
    too_large = len(body) > settings.max_response_bytes
    headers = storable(response.headers.items(), settings.unstored_headers) + flashes.stored()
    _, _, reason = response.status.partition(" ")
    if reason != HTTP_STATUS_CODES.get(response.status_code, "Unknown").upper():
        headers += ((REASON, reason),)
    return Answer(response.status_code, headers, None if too_large else body)


def replay(app: Flask, answer: Answer, settings: Settings) -> Response:
    """The stored answer again. Raises ``ResponseNotKept`` if its body was too large to keep."""
    # Somebody else may have written the record.
    headers = storable(answer.headers or (), settings.unstored_headers)
    if answer.body is None:
        raise ResponseNotKept(headers=tuple(h for h in headers if h[0].lower() in POINTERS))
    response = app.response_class(answer.body, status=answer.status)
    if reason := reason_in(answer.headers or ()):
        response.status = f"{answer.status} {reason}"
    response.headers = Headers(headers)
    flashes.flash_again(answer.headers or ())
    response.headers[settings.replayed_header] = "true"
    return response


def is_made_from(response: Response, stored: Response) -> bool:
    """Whether a response has what a stored one says: its status, and its body or JSON, perhaps inside.

    In doubt it has: what is streamed cannot be looked at, and what is encoded not be read.
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
    """What the handler answers that Flask would find for a problem, among those for our own classes.

    A handler for all exceptions does not get it, nor does ``app.handle_user_exception``: frameworks
    replace that with one that answers 500 to what it does not know.
    """
    ours = [each for each in type(problem).__mro__ if issubclass(each, IdempotencyError)]
    handlers = (
        app.error_handler_spec[name][None].get(each)
        for name in (*present_request.blueprints, None)
        for each in ours
    )
    handler = next(filter(None, handlers))  # the application has ours, or one in its place
    return cast("ResponseReturnValue", app.ensure_sync(handler)(problem))


def problem_response(app: Flask, problem: Problem, settings: Settings) -> Response:
    """The answer for a problem, as RFC 9457 has it."""
    members = {
        "type": settings.problem_base + problem.type,
        "title": problem.title,
        "status": problem.status,
        "detail": problem.detail,
    }
    response = app.response_class(
        json.dumps(members), status=problem.status, content_type="application/problem+json"
    )
    if isinstance(problem, ResponseNotKept):
        response.headers.extend(problem.headers)
    return response
