"""The body and the fingerprint of a request."""

from __future__ import annotations

import hashlib
import io
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO, Any, NoReturn

from flask import Request
from werkzeug.datastructures import MultiDict
from werkzeug.exceptions import ClientDisconnected, HTTPException, LengthRequired, RequestEntityTooLarge
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder, NeedData
from werkzeug.wsgi import get_content_length

from flask_idempotency.core import fingerprint as fp
from flask_idempotency.core.errors import BodyIncomplete, ConfigurationError

from .options import Route
from .settings import Settings

CHUNK_BYTES = 64 * 1024
"""How much of a body is asked for at once."""

_PARSED = ("stream", "form", "files", "values", "_cached_data")
"""What a request remembers of a body that was read."""

FORM_TYPES = frozenset({"application/x-www-form-urlencoded", "multipart/form-data"})
"""Bodies that reading the form uses up."""

TOO_LATE = (
    "something read the request's stream or form before the idempotent view could keep its body: a"
    " receiver of request_started, a class of requests or of sessions, or a decorator that hides the"
    " view. Let it call request.get_data() first, and decorators use functools.wraps"
)


def is_used_up(request: Request) -> bool:
    """Return True if the request's body was read in such a way that it is not there again.

    A ``request.stream`` that nobody has read from counts as well: nothing tells it from another.
    """
    known = request.__dict__
    if "_cached_data" in known:
        return False
    return request.mimetype in FORM_TYPES if "form" in known else "stream" in known


def form_in(request: Request, body: bytes) -> MultiDict[str, str]:
    """The form in the body of a request, parsed apart: what the application has read is not touched."""
    parser, options = request.make_form_data_parser(), request.mimetype_params
    _, form, files = parser.parse(io.BytesIO(body), request.mimetype, len(body), options)
    for _, file in files.items(multi=True):  # noqa: PERF102 -- values() gives one of each name
        file.close()
    return form


class Body(io.RawIOBase):
    """The body of a request, in place of the server's input: read when it is needed, and kept.

    The application's own functions may come first and parse it as usual. What they read can still be
    compared, and every reader learns that the body is incomplete or too long: servers pass an
    incomplete body on as if it were complete, and Werkzeug silently cuts a chunked one at
    ``MAX_CONTENT_LENGTH``. Both would make different requests look equal.

    One that does not ``refuse``, as it is only observed, tells that :meth:`whole` alone. Its readers
    get what they would get without us.
    """

    _position = 0  # up to which others have read
    _is_at_end = False
    _whole: bytes | None = None
    _failure: Exception | None = None  # with which the server's input, or a stream around it, ended
    _untold: Exception | None = None  # the same, until a reader of what is only observed got it

    def __init__(self, request: Request, settings: Settings, *, refuses: bool = True) -> None:
        super().__init__()
        environ = request.environ
        # A proxy: in a cycle with its request, each body would stay until garbage is collected.
        self._request: Request = weakref.proxy(request)
        self._default_limit = settings.max_request_bytes
        self._is_late = "stream" in request.__dict__ or "form" in request.__dict__
        self._expected = get_content_length(environ)
        self._input: IO[bytes] = environ["wsgi.input"]
        self._kept: bytes | bytearray = bytearray()
        self._is_broken = False
        self._is_terminated = "wsgi.input_terminated" in environ and environ["wsgi.input_terminated"]
        self._refuses = refuses
        if not self._is_late:
            environ["wsgi.input"] = self

    def whole(self) -> bytes:
        """All of it, as it came; the application can still read what it has not read yet.

        Raises ``BodyIncomplete``, or Werkzeug's 411 and 413.
        """
        if self._whole is None:
            self._whole = self._read_late() if self._is_late else self._read()
        return self._whole

    def form(self) -> MultiDict[str, str]:
        """The form in it. Raises what :meth:`whole` does, and Werkzeug's 413."""
        body, request = self.whole(), self._request
        if "form" in request.__dict__ or request.environ["wsgi.input"] is not self:
            return request.form  # parsed, or decompressed, by the application
        return form_in(request, body)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Meanwhile, functions of the application find it unread, and it refuses; then it is as before.

        Not where the application has replaced the server's input, or read it too early.
        """
        if self._request.environ["wsgi.input"] is not self:
            yield
            return
        known, position, refuses = self._request.__dict__, self._position, self._refuses
        before = {name: known.pop(name) for name in _PARSED if name in known}
        self._position, self._refuses = 0, True
        try:
            yield
        finally:
            for name in _PARSED:
                known.pop(name, None)
            known.update(before)
            self._position, self._refuses = position, refuses

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read on, for the application."""
        data = self._go_on(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        """Read to the end, for the application."""
        return b"".join(iter(partial(self._go_on, CHUNK_BYTES), b""))

    def _go_on(self, size: int) -> bytes:
        """Up to ``size`` bytes of what the application has not read yet; none at the end."""
        missing, refusal = self._position + size - len(self._kept), None
        if missing > 0:
            try:
                self._read_on(missing)
            except Exception as error:
                if self._refuses:
                    raise
                refusal, self._is_broken = error, True  # what is read from here on is not kept
        data = bytes(self._kept[self._position : self._position + size])
        self._position += len(data)
        if refusal is not None and self._untold is not None and not data:
            untold, self._untold = self._untold, None
            raise untold
        # Where the server has ended it too early, it says so when it is asked once more.
        if isinstance(refusal, RequestEntityTooLarge) or (refusal is not None and not data):
            data += self._input.read(size - len(data))
        return data

    def _is_chunked(self) -> bool:
        return "chunked" in self._request.environ.get("HTTP_TRANSFER_ENCODING", "").lower()

    def _limit(self) -> int:
        """How long the body may be, in bytes. The application may change it at any time."""
        try:
            limit = self._request.max_content_length
        except ReferenceError:  # the request is over, and something around it still reads
            limit = None
        return self._default_limit if limit is None else limit

    def _read(self) -> bytes:
        if self._expected is None and not self._is_terminated and self._is_chunked():
            raise LengthRequired("This server cannot read a chunked body: send a Content-Length.")
        while self._read_on(CHUNK_BYTES):
            pass
        self._kept = body = bytes(self._kept)  # which frees the other copy
        return body

    def _read_late(self) -> bytes:
        """The body of a request that somebody read from before this object existed."""
        known, is_cached = self._request.__dict__, "_cached_data" in self._request.__dict__
        body = self._request.get_data(cache=True)
        if not (self._refuses or is_cached):
            known["stream"] = io.BytesIO(body)
        if not body and (self._expected or self._is_chunked()):
            raise ConfigurationError(TOO_LATE)
        if self._expected not in (None, len(body)) and not self._request.content_encoding:
            raise BodyIncomplete  # an encoded body may have been decoded, to another length
        if len(body) > self._limit():
            raise RequestEntityTooLarge
        return body

    def _read_on(self, size: int) -> bool:
        """Take up to ``size`` bytes from the server; False once there are no more."""
        limit, expected, kept = self._limit(), self._expected, len(self._kept)
        if kept > limit or (expected is not None and expected > limit):
            raise RequestEntityTooLarge
        if self._failure is not None:
            self._raise_failure(self._failure)
        if self._is_broken:
            raise BodyIncomplete
        end = expected
        if end is None:  # as in Werkzeug, there is a body only if the server ends it
            end = limit + 1 if self._is_terminated else 0
        if self._is_at_end or kept == end:
            return False
        data = self._take(min(size, end - kept))
        self._kept += data
        kept += len(data)
        if kept > limit:
            raise RequestEntityTooLarge
        self._is_at_end = not data
        if not data and expected is not None:
            self._is_broken = True
            raise BodyIncomplete
        return not self._is_at_end and kept != end

    def _take(self, size: int) -> bytes:
        try:
            return self._input.read(size)
        except Exception as error:
            self._failure = self._untold = error
            self._raise_failure(error)

    def _raise_failure(self, error: Exception) -> NoReturn:
        """Raise it whenever somebody reads on: asked again, a server may say that all has arrived."""
        if _is_of_the_server(error):
            raise BodyIncomplete from error
        raise error


_SERVERS = {
    *("asgiref", "a2wsgi", "bjoern", "cheroot", "daphne", "eventlet", "gevent", "granian", "gunicorn"),
    *("hypercorn", "meinheld", "mod_wsgi", "starlette", "tornado", "twisted", "uvicorn", "waitress"),
}


def _is_of_the_server(error: Exception) -> bool:
    """Return True if the connection has failed: each server has its own errors for an incomplete body.

    Those of a class of the application's come from a stream that it has put around the server's: they
    reach its error handlers, as without us.
    """
    if isinstance(error, HTTPException):
        return isinstance(error, ClientDisconnected)
    package = type(error).__module__.partition(".")[0]
    if package in sys.stdlib_module_names:
        return isinstance(error, OSError | EOFError | ValueError)
    return package in _SERVERS


def fingerprint(request: Request, body: Body, route: Route) -> fp.Fingerprint:
    """Make the fingerprint that the request is compared by.

    Raises what is wrong with the body, ``BodyMalformed`` where it must be JSON, and Werkzeug's 413 for
    too large a form.
    """
    compared = route.fingerprint
    if compared == "request":
        return fp.by_request(_parts(request, body.whole()))
    if callable(compared):  # it may do without the body
        body.whole()
        return fp.by_value(compared())
    parts = _parts(request, body.whole())
    return fp.by_json(parts) if isinstance(compared, str) else fp.by_fields(parts, compared)


def _parts(request: Request, body: bytes) -> fp.RequestParts:
    rule, media_type = request.url_rule, request.mimetype
    by_host = rule is not None and (rule.host or rule.subdomain)
    form = _multipart(request, body) if media_type == "multipart/form-data" else None
    return fp.RequestParts(
        method=request.method,
        host=request.host if by_host else None,
        path=request.path,
        query=request.query_string,
        media_type=media_type,
        body=body if form is None else b"",
        form=form,
    )


def _multipart(request: Request, body: bytes) -> tuple[fp.FormPart, ...] | None:
    """The parts of the body, undecoded, or None if it is no form: then its bytes count.

    Werkzeug's ``request.form`` leaves out what it cannot read and replaces what is not UTF-8, so
    different bodies would look equal. Its limits also hold here: raises its 413.
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
