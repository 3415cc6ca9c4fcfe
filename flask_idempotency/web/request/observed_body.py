"""The body of a request that is only observed: heard as the application reads it, and never read."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import index
from threading import get_ident
from typing import Any

from flask import Request
from werkzeug.datastructures import MultiDict
from werkzeug.exceptions import RequestEntityTooLarge

from flask_idempotency.core.errors import BodyIncomplete, ConfigurationError
from flask_idempotency.web.setup.settings import Settings

from .body import TOO_LATE, RequestBody, form_in, is_used_up


def _given(data: bytes, *_size: object) -> bytes:
    return data


_READS: dict[str, Callable[..., bytes]] = {
    "next": _given,
    "read": _given,
    "read1": _given,
    "readline": _given,
    "readlines": lambda lines, *_hint: b"".join(lines),
    **dict.fromkeys(("readinto", "readinto1"), lambda size, buffer: bytes(memoryview(buffer)[:size])),
}
"""The methods that read, and what each has read, from its result and its arguments."""

PARSED = frozenset({"stream", "form", "files", "values", "_cached_data"})
"""What a parsed request remembers."""


class NotKept(Exception):
    """The application has not read the body, or not in a way that shows all of it."""


class OverheardBody(RequestBody):
    """In place of the server's input: passes every call on, and keeps what comes back.

    Nothing is read before the application reads it: a client may stop in the middle of an upload that
    the view refuses unread. Only a body of known length is kept, up to the limit for requests with a
    key: of a chunked one nobody knows when it is whole.
    """

    when_whole: Callable[[], object] | None = None
    """Told once, inside the call of the reader that gets the last byte."""

    def __init__(self, request: Request, settings: Settings) -> None:
        super().__init__(request, settings)
        self._length, self._refused_to = self._expected or 0, 0
        has_body = self._length > 0 or self._is_chunked()
        if not (has_body or self._is_late):
            request.environ["wsgi.input"] = self._input
        self._is_used_up = has_body and is_used_up(request)
        self._is_kept = not (self._is_late or self._is_chunked()) and 0 < self._length <= self._limit()

    @property
    def request(self) -> Request:
        """Whose body it is."""
        return self._request

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
        if not (self._length or self._is_chunked()):
            return b""
        if "_cached_data" not in self._request.__dict__:
            raise NotKept
        return self._request.get_data()

    def form(self) -> MultiDict[str, str]:
        """The form in it."""
        if not self._is_whole and "form" in self._request.__dict__:
            return self._request.form
        return form_in(self._request, self.whole())

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Meanwhile, functions of the application find the body in the request, if it is whole.

        Who would read on in this thread gets :class:`NotKept`.
        """
        known, environ = self._request.__dict__, self._request.environ
        before = {name: known[name] for name in PARSED & known.keys()}
        is_lent = environ.get("wsgi.input") is self and self._is_whole
        self._refused_to = get_ident()
        if is_lent:
            environ["wsgi.input"] = io.BytesIO(self._kept)
            for name in before:
                del known[name]
        try:
            yield
        finally:
            self._refused_to = 0
            if is_lent:
                environ["wsgi.input"] = self
            for name in PARSED & known.keys():
                del known[name]
            known.update(before)

    def stop(self) -> None:
        """Keep no more of it."""
        self.when_whole, self._is_kept = None, False
        self._kept = bytearray()

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

    def __exit__(self, *error: Any) -> None:
        self._input.__exit__(*error)

    def _heard(self, name: str, read: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self._refused_to == get_ident():
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
