"""One request, or one call of :meth:`Idempotency.run`: which operation it is about, and what it claims.

Header, body and scope become plain values here; compared is what the view would read of the body. And
``current_operation``.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import sys
import time
from binascii import b2a_base64
from contextlib import suppress
from os import urandom
from threading import get_ident
from typing import IO, Any, cast

import flask
from werkzeug.datastructures import MultiDict
from werkzeug.exceptions import ClientDisconnected, LengthRequired, RequestEntityTooLarge
from werkzeug.local import LocalProxy
from werkzeug.wsgi import LimitedStream, get_content_length

from flask_idempotency.core import errors, keys
from flask_idempotency.core import fingerprint as fp
from flask_idempotency.core.fingerprint import Fingerprint, Form
from flask_idempotency.core.records import OBSERVED, Claim
from flask_idempotency.private import functions_after_request, present_context, present_request
from flask_idempotency.session.operation import Operation, running_operation

from . import forms
from .routes import AppState
from .settings import NOT_GIVEN, REQUIRED, Route, Settings
from .signals import Subject

OWNER_BYTES = 9
"""An owner's token: 72 random bits tell the few attempts at one operation apart, and take 12 characters
of each record. It is no secret: no client can send one."""

LONGER_SECONDS = 600.0
"""How much longer a record lives where an old key, or an old form, is refused: twice the five minutes
by which a host's clock may differ from the database's, the skew that Kerberos allows (RFC 4120
section 8.2)."""

AHEAD_SECONDS = 86400.0
"""How far ahead a birth is believed: a client's wrong time zone or date makes a record live up to a day
longer, and none for years."""


CHUNK_BYTES = 64 * 1024
"""How much of a body is asked for at once."""

PARSED_BYTES = 1024 * 1024
"""How long what is parsed may be, JSON or the fields of a form: parsing takes up to a hundred times as
long as hashing."""

URLENCODED = "application/x-www-form-urlencoded"
FORM_TYPES = frozenset({URLENCODED, "multipart/form-data"})
"""Bodies that are compared as they are parsed. Reading the form uses them up."""

TOO_LATE = (
    "something read the request's stream or form before the idempotent view could compare its body: a"
    " before_request function, a receiver of request_started, a class of requests or of sessions, or a"
    " decorator that hides the view. Let it call request.get_data() first, and decorators use"
    " functools.wraps"
)


class Request(Subject):
    """What the extension knows about one request, or one call of :meth:`Idempotency.run`.

    It is about one operation at most. ``route`` has the options of that, ``dispatched`` those of the
    endpoint that Flask has called.
    """

    route: Route
    dispatched: Route | None = None
    body: Body | None = None  # from when it is known that it may be needed
    open_attempt: Any = None  # until it is over
    observation: Any = None  # of the first of its views
    is_replay = False  # the response is a stored one
    is_view = False  # Flask itself has called the view: what it makes of an error is the response
    registered = staticmethod(functions_after_request)  # with flask.after_this_request
    # Its application context and thread, if Flask calls its view, and our functions at its end.
    home: tuple[int, int] | None = None

    def __init__(self, state: AppState, request: Any = None, context: Any = None) -> None:
        """Without a ``request``, this is about one call alone.

        The application ``context`` remembers the first request: a view's own requests share it.
        """
        self.state, self.make_response = state, state.app.make_response
        if request is not None:
            request._flask_idempotency = self  # noqa: SLF001
            if _OUTERMOST not in context.__dict__:
                context.__dict__[_OUTERMOST] = request
            self.home = id(context), get_ident()

    def begin(self, route: Route, request: flask.Request | None = None) -> None:
        """From now on this is about an operation of ``route``.

        If the body of the ``request`` may be needed, what is read of it is counted from now on.
        Raises only what ``protect(skip=...)`` does.
        """
        self.route, self.name, self.began, self.has_outcome = route, route.name, time.monotonic(), False
        # Skipped: so says protect(skip=...).
        self.skipped = request is not None and route.skip is not None and bool(route.skip(request))
        if request is None or self.skipped:
            return
        media_type = request.mimetype
        # The request itself, in its body or elsewhere: then that wins over the header.
        self.may_hold_key = route.key is not None or media_type in FORM_TYPES
        if self.body is None and (self.may_hold_key or self.state.header in request.environ):
            self.body = Body(request, media_type, refuses=route.enforce)

    def claim_for(self, request: flask.Request) -> tuple[Operation, Claim] | None:
        """What the request is about and claims; None if it has no key and needs none.

        Reads no body of an unauthenticated caller, except where a request without a key may pass.
        """
        route, scope, made = self.route, NOT_GIVEN, None
        if self.may_hold_key and route.required:
            scope = route.current_scope()
        key, is_field = self._found_key(request)
        if key is None:
            if route.required:
                raise errors.KeyRequired
            return None
        if scope is NOT_GIVEN:
            scope = route.current_scope()
        if is_field:
            key, made = forms.read_field(key, self.state.app, route, scope)
        if self.body is None:  # the key is one that a function before the view has put there
            self.body = Body(request, request.mimetype, refuses=route.enforce)
        sent = self.body.read(request, route, self.state.settings).fingerprint(request, route)
        return new_claim(self.state, route, scope, key, sent, made)

    def _found_key(self, request: flask.Request) -> tuple[str | None, bool]:
        """The key that the request itself holds, or that in the header; and if it is a form's field.

        A wrong field is rejected whatever the header says. Some browsers send one of their own, with a
        new key each time they send the same form: it would run each time.
        """
        route = self.route
        if self.body is not None and self.may_hold_key:
            form = self.body.read(request, route, self.state.settings).form
            if route.key is not None:
                value = None
                with suppress(KeyError):  # a missing member of JSON, or field of a form
                    value = route.key()
                self.body.unread(request)  # it may have read it
                return None if value is None or value == "" else keys.natural_key(value), False
            if (field := forms.value_of_field(form)) is not None:
                return field, True
        value = request.environ.get(self.state.header)
        return None if value is None else keys.parse_key(value), False


def new_claim(
    state: AppState,
    route: Route,
    scope: keys.Scope,
    key: str,
    sent: Fingerprint,
    made: float | None = None,
) -> tuple[Operation, Claim]:
    """The operation that ``key`` stands for, and the claim of what was ``sent``.

    ``made`` is when its form was.
    Raises ``KeyMalformed`` where the route requires a birth and there is none to be believed.
    """
    now = time.time()
    born = keys.birth_of(key) if made is None and route.refuse_old_keys else made
    if born is not None and born > now + AHEAD_SECONDS:
        born = None
    if born is None and route.refuse_old_keys == REQUIRED:
        raise errors.KeyMalformed(
            "The key does not say when it was made, or says a time more than a day ahead. Allowed:"
            " a UUID of version 7 (RFC 9562)."
        )
    if not route.name.isascii():
        with suppress(errors.StoreUnavailable):  # the claim meets that, too
            if not state.can_hold(route.name):
                raise errors.ConfigurationError(
                    f"the encoding of the database cannot hold the name {route.name!r}: give the"
                    " operation another one, name=..., of ASCII characters"
                )
    ttl = route.ttl
    if route.refuse_old_keys or born is not None:  # an old form is always refused
        ttl += LONGER_SECONDS + max(0.0, (born or 0.0) - now)
    owner = b2a_base64(urandom(OWNER_BYTES), newline=False).decode()
    namespace = route.namespace
    if not route.enforce:
        namespace, owner = keys.observed_namespace(namespace), OBSERVED + owner
    return Operation(route.name, namespace, scope, key, attempt=0), Claim(
        key=keys.hash_key(namespace, route.name, scope, key),
        name=route.name,
        fingerprint=state.sealer.keyed(sent),
        owner=owner,
        ttl_seconds=ttl,
        lease_seconds=None if route.atomic and route.enforce else route.lease,
        max_attempts=route.max_attempts,
        retried_seconds=route.ttl,
        too_old_at=None if born is None else born + route.ttl,
    )


_OUTERMOST = "_flask_idempotency_request"


def is_home(ours: Request) -> bool:
    """Return True if the context is the request's own: not a copy of it, nor another thread."""
    return ours.home == (id(present_context()), get_ident())


def is_outermost_request() -> bool:
    """Return True if the session of the present request is not that of a view that made it."""
    return present_context().get(_OUTERMOST) is present_request()


def is_in_thread_of_request() -> bool:
    """Return True if another thread than the request's runs this in the request's own context.

    An async view is not: its event loop may be in a thread of its own, but the request waits for it.
    """
    ours: Request | None = getattr(present_request(), "_flask_idempotency", None)
    if ours is None or ours.home is None or is_home(ours) or ours.home[0] != id(present_context()):
        return False
    return asyncio._get_running_loop() is None  # noqa: SLF001 -- in asyncio's own __all__


def _current() -> Operation:
    running = running_operation()
    if running is None:
        raise RuntimeError(
            "current_operation is only there while a view protected by @idempotent runs for a request"
            " with a key, or a function in Idempotency.run(): not in a view that is only observed"
            " (IDEMPOTENCY_ENFORCE or enforce=False), nor in a process that was forked in a view"
        )
    return running.operation


current_operation = cast("Operation", LocalProxy(_current))
"""A proxy to the operation that is being executed."""


# The body.


class _Counted(LimitedStream):
    """The server's input: it counts what is read, and whoever reads learns that it ended too early.

    Servers pass an incomplete body on as if it were complete, and a ``before_request`` function may
    parse it as a form.
    """

    def on_disconnect(self, error: Exception | None = None) -> None:
        """The input has failed with ``error``, or ended; without a Content-Length, that is its end."""
        if error is not None or self.limit < sys.maxsize:
            raise errors.BodyIncomplete from error


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

    def __init__(self, request: flask.Request, media_type: str, *, refuses: bool) -> None:
        environ, known = request.environ, request.__dict__
        length = get_content_length(environ)
        self.media_type, self._has_length, self._length = media_type, length is not None, length or 0
        # A request.stream that nobody has read from counts, too: nothing tells it from another.
        self._is_late = "_cached_data" not in known and ("stream" in known or "form" in known)
        self._counts = refuses and not self._is_late
        if self._counts:  # who reads what is only observed learns nothing of ours
            limit = sys.maxsize if length is None else length
            environ["wsgi.input"] = _Counted(environ["wsgi.input"], limit)
        self._input: IO[bytes] = environ["wsgi.input"]

    def read(self, request: flask.Request, route: Route, settings: Settings) -> Body:
        """Read it, unless that has been done.

        Raises ``BodyIncomplete``, Werkzeug's 411 and 413, and ``ConfigurationError`` if it is gone.
        """
        if not self._is_read:
            try:
                of_route, usual = route.max_request_bytes, settings.max_request_bytes
                if self._is_untouched(request, usual if of_route is None else of_route):
                    self.data = request.get_data()
                else:
                    limit, parsed_limit = self._limits(request, route, settings)
                    self.data = self._bytes(request, limit)
                    if self.media_type in FORM_TYPES:
                        self.unread(request)
                        self.form = _parsed(request, parsed_limit)
            except (ClientDisconnected, OSError, EOFError) as error:
                raise errors.BodyIncomplete from error
            self.unread(request)
            self._is_read = True
        return self

    def _is_untouched(self, request: flask.Request, limit: int) -> bool:
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

    def fingerprint(self, request: flask.Request, route: Route) -> Fingerprint:
        """Make the fingerprint that the request is compared by, of a body that was read.

        Raises ``BodyMalformed`` where it must be JSON, and is not.
        """
        compared, rule = route.fingerprint, request.url_rule
        if callable(compared):
            value = compared()
            self.unread(request)  # it may have read it
            return fp.by_value(value)
        host = request.host if rule is not None and (rule.host or rule.subdomain) else None
        target = request.method, host, request.root_path + request.path, request.query_string
        return fp.by_parts(fp.RequestParts(*target, self.media_type, self.data, self.form), compared)

    def unread(self, request: flask.Request) -> None:
        """Let the next reader find it in the stream again, unless the form has been parsed."""
        if "form" not in request.__dict__ or self.media_type not in FORM_TYPES:
            stream = request.environ["wsgi.input"] = io.BytesIO(self.data)
            request.__dict__.pop("stream", None)  # who replaces the input later expects that it is read
            if not self._is_plain:
                request.stream = stream

    def _bytes(self, request: flask.Request, limit: int) -> bytes:
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
                raise errors.BodyIncomplete
            return data
        if "form" not in request.__dict__ or self.media_type not in FORM_TYPES:
            return self._from_stream(request, taken, limit)
        if self._is_late:
            raise errors.ConfigurationError(TOO_LATE)  # nothing tells whether it was complete
        return b""

    def _from_stream(self, request: flask.Request, taken: int, limit: int) -> bytes:
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
            raise errors.ConfigurationError(TOO_LATE)
        if is_short:
            raise errors.BodyIncomplete
        return kept.getvalue()

    def _limits(self, request: flask.Request, route: Route, settings: Settings) -> tuple[int, int]:
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


def _parsed(request: flask.Request, limit: int) -> Form:
    """What the view would find in the form; empty if it cannot be read. Raises Werkzeug's 413."""
    known = request.__dict__
    was_parsed = "form" in known
    fields = tuple(_items(request.form))
    files = tuple(
        (name, file.filename, file.content_type, _sha256(file.stream))
        for name, file in _items(request.files)
    )
    if not was_parsed:  # the view finds the request as it was
        request.close()
        for name in "form", "files", "values":
            known.pop(name, None)
    # A part of a multipart body may have no name.
    if sum(len(name or "") + len(value) for name, value in fields) > limit:
        raise RequestEntityTooLarge
    return fields + files


def _items(values: Any) -> Any:
    """All of them; of an application's own ``parameter_storage_class``, what the view finds there."""
    return values.items(multi=True) if isinstance(values, MultiDict) else values.items()


def _sha256(file: IO[bytes]) -> bytes:
    """The digest of a file, which is left where it was."""
    digest, position = hashlib.sha256(), file.tell()
    file.seek(0)
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    file.seek(position)
    return digest.digest()
