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
from werkzeug.datastructures import Headers, MultiDict
from werkzeug.exceptions import (
    ClientDisconnected,
    HTTPException,
    LengthRequired,
    RequestEntityTooLarge,
)
from werkzeug.http import HTTP_STATUS_CODES
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder, NeedData
from werkzeug.wsgi import get_input_stream

from flask_idempotency.core import fingerprint as fp
from flask_idempotency.core.errors import (
    BodyIncomplete,
    ConfigurationError,
    IdempotencyError,
    KeyMalformed,
    Problem,
    ResponseNotKept,
)
from flask_idempotency.core.keys import parse_key
from flask_idempotency.core.records import StoredResponse
from flask_idempotency.core.storable import POINTERS, REASON, reason_in, storable
from flask_idempotency.web.setup.options import FormField, Route
from flask_idempotency.web.setup.settings import Settings

from . import flashes

CHUNK_BYTES = 64 * 1024
"""How much of a body is asked for at once."""

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


def natural_key(request: Request, body: Body, route: Route, settings: Settings) -> str | None:
    """The key that ``route.key`` finds in the request. Raises ``KeyMalformed``, ``BodyMalformed``."""
    longest = settings.max_key_length
    match route.key:
        case fp.Pointer():
            text = body.whole()
            value = fp.resolve(fp.parse_json(text), route.key) if text else fp.MISSING
            return None if value is fp.MISSING else fp.natural_key(value, longest)
        case FormField(name):
            values = body.form().getlist(name)
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


_PARSED = frozenset({"stream", "form", "files", "values", "_cached_data"})
"""What a request remembers once it was parsed."""


class Body(io.RawIOBase):
    """The body of a request, in place of the server's input: read when it is needed, and kept.

    The application's own functions may come first and parse it as ever. What they have read can still
    be compared, and whoever reads learns that the body breaks off or is too long: servers hand over a
    body that broke off as if it were complete, and Werkzeug cuts a chunked one silently at
    ``MAX_CONTENT_LENGTH``. Both would make different requests look equal.
    """

    def __init__(self, request: Request, settings: Settings) -> None:
        self._request, self._default_limit = request, settings.max_request_bytes
        self._is_late = not {"stream", "form"}.isdisjoint(request.__dict__)
        self._input = get_input_stream(request.environ)
        self._expected = request.content_length
        self._kept: bytes | bytearray = bytearray()
        self._position = 0  # up to which others have read
        self._is_broken = self._is_at_end = False
        self._whole: bytes | None = None
        if not self._is_late:
            request.environ["wsgi.input"] = self

    def whole(self) -> bytes:
        """All of it, as it came; the application finds it unread, as far as it has not read it itself.

        Raises ``BodyIncomplete``, or Werkzeug's 411 and 413.
        """
        if self._whole is None:
            self._whole = self._read_late() if self._is_late else self._read()
        return self._whole

    def form(self) -> MultiDict[str, str]:
        """The form in it. Raises Werkzeug's 413."""
        self.whole()
        request, known = self._request, {*self._request.__dict__}
        form = request.form
        if request.environ["wsgi.input"] is self and known.isdisjoint(_PARSED):
            for name in _PARSED & request.__dict__.keys():
                del request.__dict__[name]
            self._position = 0
        return form

    def readable(self) -> bool:
        """It is there to be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read on, for the application."""
        if self._position == len(self._kept):
            self._read_on(len(buffer))
        data = self._kept[self._position : self._position + len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def readall(self) -> bytes:
        """Read to the end, for the application."""
        while self._read_on(CHUNK_BYTES):
            pass
        data = bytes(self._kept[self._position :])
        self._position = len(self._kept)
        return data

    def _read(self) -> bytes:
        if self._is_chunked() and not self._request.environ.get("wsgi.input_terminated"):
            raise LengthRequired("This server cannot read a chunked body: send a Content-Length.")
        while self._read_on(CHUNK_BYTES):
            pass
        self._kept = body = bytes(self._kept)  # which frees the other copy
        return body

    def _read_late(self) -> bytes:
        """The body of a request that somebody has read from before this was there."""
        body = self._request.get_data(cache=True)
        if not body and (self._expected or self._is_chunked()):
            raise ConfigurationError(
                "something read the request's stream or form before the idempotent view could keep its"
                " body: call request.get_data() before, and let the view's decorators use"
                " functools.wraps"
            )
        is_decoded = (
            self._request.content_encoding is not None
        )  # perhaps, and then it has another length
        if self._expected is not None and len(body) != self._expected and not is_decoded:
            raise BodyIncomplete
        if len(body) > self._limit():
            raise RequestEntityTooLarge
        return body

    def _read_on(self, size: int) -> bool:
        """Take up to ``size`` bytes from the server, or (False) there are no more."""
        limit = self._limit()
        if max(self._expected or 0, len(self._kept)) > limit:
            raise RequestEntityTooLarge
        if self._is_broken:
            raise BodyIncomplete
        end = limit + 1 if self._expected is None else self._expected
        if self._is_at_end or len(self._kept) == end:
            return False
        data = self._take(min(size, end - len(self._kept)))
        self._kept += data
        if len(self._kept) > limit:
            raise RequestEntityTooLarge
        self._is_at_end = not data
        if not data and self._expected is not None:
            self._is_broken = True
            raise BodyIncomplete
        return bool(data)

    def _take(self, size: int) -> bytes:
        try:
            return self._input.read(size)
        except Exception as error:  # each server has errors of its own for a body that breaks off
            if isinstance(error, HTTPException) and not isinstance(error, ClientDisconnected):
                raise
            self._is_broken = True
            raise BodyIncomplete from error

    def _limit(self) -> int:
        """How long the body may be, in bytes. The application may change it at any time."""
        limit = self._request.max_content_length
        return self._default_limit if limit is None else limit

    def _is_chunked(self) -> bool:
        return "chunked" in self._request.environ.get("HTTP_TRANSFER_ENCODING", "").lower()


def fingerprint(request: Request, body: bytes, route: Route) -> fp.Fingerprint:
    """What the request is compared by.

    Raises ``BodyMalformed`` where the body must be JSON, and Werkzeug's 413 for too large a form.
    """
    if callable(route.fingerprint):
        return fp.by_value(route.fingerprint())
    parts = _parts(request, body)
    if route.fingerprint == "request":
        return fp.by_request(parts)
    if route.fingerprint == "json":
        return fp.by_json(parts)
    assert not isinstance(route.fingerprint, str)  # noqa: S101 -- read_options allows no other
    return fp.by_fields(parts, route.fingerprint)


def _parts(request: Request, body: bytes) -> fp.RequestParts:
    rule = request.url_rule
    by_host = rule is not None and (rule.host or rule.subdomain)
    form = _multipart(request, body) if request.mimetype == "multipart/form-data" else None
    return fp.RequestParts(
        method=request.method,
        host=request.host if by_host else None,
        path=request.path,
        query=request.query_string,
        media_type=request.mimetype,
        body=body if form is None else b"",
        form=form,
    )


def _multipart(request: Request, body: bytes) -> tuple[fp.FormPart, ...] | None:
    """The parts of the body, undecoded, or None if it is no form: then it counts by its bytes.

    Werkzeug's ``request.form`` will not do: it leaves out what it cannot read, and replaces what is
    not UTF-8, so that different bodies would look equal. Its limits hold here too: raises its 413.
    """
    boundary = request.mimetype_params.get("boundary", "").encode("latin-1", "replace")
    decoder = MultipartDecoder(boundary, max_parts=request.max_form_parts)
    decoder.receive_data(body)
    decoder.receive_data(None)
    longest = request.max_form_memory_size
    parts: list[fp.FormPart] = []
    head: tuple[str, str | None, str] = ("", None, "")
    digest = hashlib.sha256()
    size = 0
    try:
        while not isinstance(event := decoder.next_event(), Epilogue):
            if isinstance(event, NeedData):
                return None
            if isinstance(event, (Field, File)):
                filename = event.filename if isinstance(event, File) else None
                head = (event.name, filename, event.headers.get("Content-Type", ""))
                digest, size = hashlib.sha256(), 0
            elif isinstance(event, Data):
                size += len(event.data)
                if head[1] is None and longest is not None and size > longest:
                    raise RequestEntityTooLarge
                digest.update(event.data)
                if not event.more_data:
                    parts.append(fp.FormPart(*head, digest.digest()))
    except ValueError:
        return None
    return tuple(parts)


def pack_request(
    request: Request, body: bytes, route: Route, settings: Settings, form_key: str | None
) -> bytes:
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
    return json.dumps(head).encode() + b"\n" + body


def capture(response: Response, settings: Settings) -> StoredResponse:
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
    return StoredResponse(response.status_code, headers, None if too_large else body)


def replay(app: Flask, stored: StoredResponse, settings: Settings) -> Response:
    """The stored answer again. Raises ``ResponseNotKept`` if its body was too large to keep."""
    # Somebody else may have written the record.
    headers = storable(stored.headers or (), settings.unstored_headers)
    if stored.body is None:
        raise ResponseNotKept(headers=tuple(h for h in headers if h[0].lower() in POINTERS))
    response = app.response_class(stored.body, status=stored.status)
    if reason := reason_in(stored.headers or ()):
        response.status = f"{stored.status} {reason}"
    response.headers = Headers(headers)
    flashes.flash_again(stored.headers or ())
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
