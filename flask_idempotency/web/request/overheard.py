"""The body of a request that is only observed: heard as the application reads it, and never read."""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable
from typing import Any

from flask import Request
from werkzeug.datastructures import MultiDict
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.wsgi import get_content_length

from flask_idempotency.core.errors import BodyIncomplete
from flask_idempotency.web.setup.settings import Settings


class NotKept(Exception):
    """The application has not read the body, or not in a way that shows all of it."""


class OverheardBody(io.BufferedIOBase):
    """In place of the server's input: passes every call on, and keeps what comes back.

    Nothing is read before the application reads it: a client may stop in the middle of an upload that
    the view refuses unread. Only a body of known length is kept, up to the limit for requests with a
    key: of a chunked one nobody knows when it is whole.
    """

    when_whole: Callable[[Request], object] | None = None
    """Told once, inside the reader's call that gets the last byte. It may not read from the request."""

    def __init__(self, request: Request, settings: Settings) -> None:
        super().__init__()
        environ = request.environ
        self._request = weakref.ref(request)  # not a cycle: see Body
        self._default_limit = settings.max_request_bytes
        self._length = get_content_length(environ) or 0
        self._input = environ["wsgi.input"]
        self._kept, self._is_broken = bytearray(), False
        is_late = not {"stream", "form"}.isdisjoint(request.__dict__)
        self._is_in_place = (
            not is_late
            and "HTTP_TRANSFER_ENCODING" not in environ
            and 0 < self._length <= self._limit()
        )
        if self._is_in_place:
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
        """Whether there is more of it, which the application may read."""
        return self._is_in_place and not self._is_broken and len(self._kept) < self._length

    def whole(self) -> bytes:
        """All of the body.

        Raises ``BodyIncomplete``, Werkzeug's 413, and :class:`NotKept`.
        """
        if self._length > self._limit():
            raise RequestEntityTooLarge
        if "_cached_data" in self.request.__dict__:
            return self.request.get_data()
        if self._is_broken:
            raise BodyIncomplete
        if self.is_awaited or (self._length and not self._is_in_place):
            raise NotKept
        return bytes(self._kept)

    def form(self) -> MultiDict[str, str]:
        """The form in it, parsed apart: the application's own parsing is not touched."""
        environ = {**self.request.environ, "wsgi.input": io.BytesIO(self.whole())}
        with type(self.request)(environ) as apart:
            return apart.form

    def readable(self) -> bool:
        """Yes."""
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        """Read on, for the application."""
        return self._heard(self._input.read, size)

    read1 = read

    def readline(self, size: int | None = -1, /) -> bytes:
        """Read a line, for the application."""
        return self._heard(self._input.readline, size, is_line=True)

    def _heard(self, read: Callable[..., Any], size: int | None, *, is_line: bool = False) -> bytes:
        is_all = size is None or size < 0
        try:
            data: bytes = read() if is_all else read(size)
        except Exception:
            self._is_broken = True
            raise
        self._kept += data
        if len(self._kept) >= self._length:
            told, self.when_whole = self.when_whole, None
            if told is not None:
                told(self.request)
        elif (is_all and not is_line) or not (data or size == 0):  # the end, too early
            self._is_broken = True
        return data

    def _limit(self) -> int:
        limit = self.request.max_content_length
        return self._default_limit if limit is None else limit
