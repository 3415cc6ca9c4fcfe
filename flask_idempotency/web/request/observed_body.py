"""The body of a request that is only observed: heard as the application reads it, and never read."""

from __future__ import annotations

import io
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import index
from typing import Any

from flask import Request
from werkzeug.datastructures import MultiDict
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.wsgi import get_content_length

from flask_idempotency.core.errors import BodyIncomplete, ConfigurationError
from flask_idempotency.web.setup.settings import Settings


def _given(data: bytes, *_size: object) -> bytes:
    return data


def _filled(size: int, buffer: Any) -> bytes:
    return bytes(memoryview(buffer)[:size])


_READS: dict[str, Callable[..., bytes]] = {
    "next": _given,
    "read": _given,
    "read1": _given,
    "readline": _given,
    "readlines": lambda lines, *_hint: b"".join(lines),
    "readinto": _filled,
    "readinto1": _filled,
}
"""The methods that read, and what each has read, from its result and its arguments."""


FORM_TYPES = frozenset({"application/x-www-form-urlencoded", "multipart/form-data"})
"""Bodies that reading the form uses up."""

PARSED = frozenset({"stream", "form", "files", "values", "_cached_data"})
"""What a parsed request remembers."""


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


class NotKept(Exception):
    """The application has not read the body, or not in a way that shows all of it."""


class OverheardBody:
    """In place of the server's input: passes every call on, and keeps what comes back.

    Nothing is read before the application reads it: a client may stop in the middle of an upload that
    the view refuses unread. Only a body of known length is kept, up to the limit for requests with a
    key: of a chunked one nobody knows when it is whole.
    """

    when_whole: Callable[[], object] | None = None
    """Told once, inside the call of the reader that gets the last byte."""

    def __init__(self, request: Request, settings: Settings) -> None:
        environ = request.environ
        self._request = weakref.ref(request)  # not a cycle: see Body
        self._default_limit = settings.max_request_bytes
        self._length = get_content_length(environ) or 0
        self._is_chunked = "HTTP_TRANSFER_ENCODING" in environ
        self._input = environ["wsgi.input"]
        self._kept, self._is_broken = bytearray(), False
        self._refused_to: int | None = None
        self._is_used_up = is_used_up(request) and bool(self._is_chunked or self._length)
        is_early = {"stream", "form"}.isdisjoint(request.__dict__)
        self._is_kept = is_early and not self._is_chunked and 0 < self._length <= self._limit()
        if is_early and (self._is_chunked or self._length):
            environ["wsgi.input"] = self

    @property
    def request(self) -> Request:
        """Whose body it is. Raises :class:`NotKept` if that is no more."""
        request = self._request()
        if request is None:
            raise NotKept
        return request

    @property
    def is_awaited(self) -> bool:
        """True if there is more of it, which would be kept if the application read it."""
        return self._is_kept and not self._is_broken and len(self._kept) < self._length

    @property
    def _is_whole(self) -> bool:
        return self._is_kept and len(self._kept) >= self._length

    def check(self) -> None:
        """Raise what is known to be wrong with it: what :meth:`Body.check` does."""
        if self._is_used_up:
            raise ConfigurationError(TOO_LATE)
        if self._length > self._limit():
            raise RequestEntityTooLarge
        if self._is_broken:
            raise BodyIncomplete

    def whole(self) -> bytes:
        """All of the body. Raises what :meth:`check` does, and :class:`NotKept`."""
        self.check()
        if self._is_whole:
            return bytes(self._kept)
        if self._length or self._is_chunked:
            if "_cached_data" not in self.request.__dict__:
                raise NotKept
            return self.request.get_data()
        return b""

    def form(self) -> MultiDict[str, str]:
        """The form in it."""
        if not self._is_whole and "form" in self.request.__dict__:
            return self.request.form
        return form_in(self.request, self.whole())

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Meanwhile, functions of the application find the body in the request, if it is whole.

        Who would read on in this thread gets :class:`NotKept`.
        """
        request = self.request
        known, environ = request.__dict__, request.environ
        before = {name: known[name] for name in PARSED & known.keys()}
        self._refused_to = threading.get_ident()
        is_lent = environ.get("wsgi.input") is self and self._is_whole
        if is_lent:
            environ["wsgi.input"] = io.BytesIO(self._kept)
            for name in before:
                del known[name]
        try:
            yield
        finally:
            self._refused_to = None
            if is_lent:
                environ["wsgi.input"] = self
            for name in PARSED & known.keys():
                del known[name]
            known.update(before)

    def stop(self) -> None:
        """Keep no more of it."""
        self.when_whole, self._is_kept = None, False
        self._kept.clear()

    def __getattr__(self, name: str) -> Any:
        """Return what the server's input has, and nothing more."""
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._input, name)
        if name in _READS:
            return partial(self._heard, name, found)
        return partial(self._moved, found) if name == "seek" else found

    def __iter__(self) -> Iterator[bytes]:
        pieces = iter(self._input)
        while piece := self._heard("next", partial(next, pieces, b"")):
            yield piece

    def __next__(self) -> bytes:
        line: bytes = self._heard("next", partial(next, self._input, b""))
        if not line:
            raise StopIteration
        return line

    def __enter__(self) -> OverheardBody:
        self._input.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._input.__exit__(*error)

    def _heard(self, name: str, read: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self._refused_to == threading.get_ident():
            raise NotKept
        try:
            result = read(*args, **named)
        except Exception:
            self._is_broken = self._is_broken or self.is_awaited
            raise
        if self.is_awaited:
            self._keep(_READS[name](result, *args), name, *args, *named.values())
        return result

    def _keep(self, data: bytes, name: str, size: Any = None) -> None:
        self._kept += data
        if len(self._kept) >= self._length:
            told, self.when_whole = self.when_whole, None
            if told is not None:
                told()
            return
        most = len(size) if name in ("readinto", "readinto1") else -1 if size is None else index(size)
        if not (data or most == 0) or (most < 0 and name in ("read", "readlines")):
            self._is_broken = True  # it has ended too early

    def _moved(self, seek: Callable[..., Any], *to: Any) -> Any:
        """Give up what is not whole yet: parts of it may come twice."""
        if self.is_awaited:
            self._is_kept = False
        return seek(*to)

    def _limit(self) -> int:
        limit = self.request.max_content_length
        return self._default_limit if limit is None else limit
