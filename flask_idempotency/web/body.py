"""The body and the fingerprint of a request: compared is what the view would read."""

from __future__ import annotations

import hashlib
import io
import sys
from typing import IO, Any, TypeAlias, cast

from flask import Request
from werkzeug.exceptions import ClientDisconnected, LengthRequired, RequestEntityTooLarge
from werkzeug.wsgi import LimitedStream, get_content_length

from flask_idempotency.core import fingerprint as fp
from flask_idempotency.core.errors import BodyIncomplete, ConfigurationError
from flask_idempotency.core.keys import Part

from .settings import Route, Settings

CHUNK_BYTES = 64 * 1024
"""How much of a body is asked for at once."""

PARSED_BYTES = 1024 * 1024
"""How long what is parsed may be, JSON or the fields of a form: parsing takes up to a hundred times as
long as hashing."""

Form: TypeAlias = tuple[tuple[Part, ...], ...]
"""What was parsed of a form: see :class:`RequestParts`."""

URLENCODED = "application/x-www-form-urlencoded"
FORM_TYPES = frozenset({URLENCODED, "multipart/form-data"})
"""Bodies that are compared as they are parsed. Reading the form uses them up."""

TOO_LATE = (
    "something read the request's stream or form before the idempotent view could compare its body: a"
    " before_request function, a receiver of request_started, a class of requests or of sessions, or a"
    " decorator that hides the view. Let it call request.get_data() first, and decorators use"
    " functools.wraps"
)


class _Counted(LimitedStream):
    """The server's input: it counts what is read, and whoever reads learns that it ended too early.

    Servers pass an incomplete body on as if it were complete, and a ``before_request`` function may
    parse it as a form.
    """

    def on_disconnect(self, error: Exception | None = None) -> None:
        """The input has failed with ``error``, or ended; without a Content-Length, that is its end."""
        if error is not None or self.limit < sys.maxsize:
            raise BodyIncomplete from error


class _Unread(io.RawIOBase):
    """What was read of a body that is too long to be compared, and then the rest of it."""

    def __init__(self, read: IO[bytes], rest: IO[bytes]) -> None:
        self._read, self._rest = read, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._read.read(len(buffer)) or self._rest.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class Body:
    """The body of one request: its bytes, and what was parsed of a form.

    It is read when it is needed, as the application left it: kept by ``get_data()``, parsed as a form,
    or still in the stream, which may be one of the application's own.
    """

    data = b""
    form: Form = ()
    _is_read = False
    _is_plain = True  # the stream is Werkzeug's, not one of the application's own

    def __init__(self, request: Request, media_type: str, *, refuses: bool) -> None:
        environ, known = request.environ, request.__dict__
        text = environ.get("CONTENT_LENGTH", "")
        is_plain = text.isdecimal() and len(text) < 20 and "HTTP_TRANSFER_ENCODING" not in environ
        length = int(text) if is_plain else get_content_length(environ)
        self.media_type, self._has_length, self._length = media_type, length is not None, length or 0
        # A request.stream that nobody has read from counts, too: nothing tells it from another.
        self._is_late = "_cached_data" not in known and ("stream" in known or "form" in known)
        self._counts = refuses and not self._is_late
        if self._counts:  # who reads what is only observed learns nothing of ours
            limit = sys.maxsize if length is None else length
            environ["wsgi.input"] = _Counted(environ["wsgi.input"], limit)
        self._input: IO[bytes] = environ["wsgi.input"]

    def read(self, request: Request, route: Route, settings: Settings) -> Body:
        """Read it, unless that has been done.

        Raises ``BodyIncomplete``, Werkzeug's 411 and 413, and ``ConfigurationError`` if it is gone.
        """
        if not self._is_read:
            try:
                if self._is_untouched(request, route.max_request_bytes or settings.max_request_bytes):
                    self.data = request.get_data()
                else:
                    limit, parsed_limit = self._limits(request, route, settings)
                    self.data = self._bytes(request, limit)
                    if self.media_type in FORM_TYPES:
                        self.unread(request)
                        self.form = _parsed(request, parsed_limit)
            except (ClientDisconnected, OSError, EOFError) as error:
                raise BodyIncomplete from error
            self.unread(request)
            self._is_read = True
        return self

    def _is_untouched(self, request: Request, limit: int) -> bool:
        """Return True for most bodies: short, and as they came, so that the view may share our copy.

        An application's own limit that is lower is Werkzeug's to keep.
        """
        environ, known = request.environ, request.__dict__
        return (
            self._has_length
            and self._length <= min(limit, PARSED_BYTES)
            and self.media_type not in FORM_TYPES
            and "HTTP_CONTENT_ENCODING" not in environ  # the view may decode it
            and not ("stream" in known or "_cached_data" in known)
            and self._counts
            and environ["wsgi.input"] is self._input
            and self._input.tell() == 0
        )

    def fingerprint(self, request: Request, route: Route) -> fp.Fingerprint:
        """Make the fingerprint that the request is compared by, of a body that was read.

        Raises ``BodyMalformed`` where it must be JSON, and is not.
        """
        compared, rule = route.fingerprint, request.url_rule
        if callable(compared):
            value = compared()
            self.unread(request)  # it may have read it
            return fp.by_value(value)
        parts = fp.RequestParts(
            method=request.method,
            host=request.host if rule is not None and (rule.host or rule.subdomain) else None,
            path=request.path,
            query=request.query_string,
            media_type=self.media_type,
            body=self.data,
            form=self.form,
        )
        return fp.by_parts(parts, compared)

    def unread(self, request: Request) -> None:
        """Let the next reader find it in the stream again, unless the form has been parsed."""
        if not self._has_form(request):
            stream = request.environ["wsgi.input"] = io.BytesIO(self.data)
            request.__dict__.pop("stream", None)  # who replaces the input later expects that it is read
            if not self._is_plain:
                request.stream = stream

    def _bytes(self, request: Request, limit: int) -> bytes:
        """Read the bytes; none of a form that the application has parsed."""
        taken, cut_at = _taken(self._input), request.max_content_length
        # Werkzeug cuts a chunked body at the limit, in silence.
        is_cut = not self._has_length and cut_at is not None and taken >= cut_at
        if is_cut or max(self._length, taken) > limit:
            raise RequestEntityTooLarge
        self._is_plain = isinstance(request.stream, LimitedStream) or request.stream is self._input
        if "_cached_data" in request.__dict__:
            data = request.get_data()
            if len(data) > limit:
                raise RequestEntityTooLarge
            if max(len(data), taken) < self._length and not request.content_encoding:
                raise BodyIncomplete
            return data
        if not self._has_form(request):
            return self._from_stream(request, taken, limit)
        if self._is_late:
            raise ConfigurationError(TOO_LATE)  # nothing tells whether it was complete
        return b""

    def _from_stream(self, request: Request, taken: int, limit: int) -> bytes:
        environ, stream, kept = request.environ, request.stream, io.BytesIO()
        if "HTTP_TRANSFER_ENCODING" in environ and not environ.get("wsgi.input_terminated"):
            raise LengthRequired("This server cannot read a chunked body: send a Content-Length.")
        is_gone = self._is_plain and (taken or _taken(stream))
        most = self._length if self._is_plain and self._has_length else limit + 1
        while kept.tell() < most and (chunk := stream.read(min(CHUNK_BYTES, most - kept.tell()))):
            kept.write(chunk)
        size = kept.tell()
        kept.seek(0)
        request.stream = environ["wsgi.input"] = kept
        if size > limit:
            request.stream = environ["wsgi.input"] = cast("IO[bytes]", _Unread(kept, stream))
            raise RequestEntityTooLarge
        is_short = stream is self._input and size < self._length
        if is_gone or (is_short and self._is_late):
            raise ConfigurationError(TOO_LATE)
        if is_short:
            raise BodyIncomplete
        return kept.getvalue()

    def _has_form(self, request: Request) -> bool:
        """Return True if the application has parsed the form, which has used up the stream."""
        return "form" in request.__dict__ and self.media_type in FORM_TYPES

    def _limits(self, request: Request, route: Route, settings: Settings) -> tuple[int, int]:
        """How long the body may be, and how long what is parsed of it: the application may say so."""
        of_route, of_app = route.max_request_bytes, request.max_content_length
        given = [each for each in (of_route, of_app) if each is not None]
        limit = min(given, default=settings.max_request_bytes)
        parsed_limit = min(limit, PARSED_BYTES) if of_route is None else limit
        is_json = fp.is_json_type(self.media_type) and route.fingerprint != "request"
        is_parsed = self.media_type == URLENCODED or (is_json and not callable(route.fingerprint))
        return parsed_limit if is_parsed else limit, parsed_limit


def _taken(stream: IO[bytes]) -> int:
    """How many bytes were read of a stream that counts them."""
    return stream.tell() if isinstance(stream, LimitedStream) else 0


def _parsed(request: Request, limit: int) -> Form:
    """What the view would find in the form; empty if it cannot be read. Raises Werkzeug's 413."""
    known = request.__dict__
    was_parsed = "form" in known
    fields = tuple(request.form.items(multi=True))
    files = tuple(
        (name, file.filename, file.content_type, _sha256(file.stream))
        for name, file in request.files.items(multi=True)
    )
    if not was_parsed:  # the view finds the request as it was
        request.close()
        for name in "form", "files", "values":
            known.pop(name, None)
    # A part of a multipart body may have no name.
    if sum(len(name or "") + len(value) for name, value in fields) > limit:
        raise RequestEntityTooLarge
    return fields + files


def _sha256(file: IO[bytes]) -> bytes:
    """The digest of a file, which is left where it was."""
    digest, position = hashlib.sha256(), file.tell()
    file.seek(0)
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    file.seek(position)
    return digest.digest()
