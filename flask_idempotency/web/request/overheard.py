"""The body of a request that is only observed: kept without its readers noticing."""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable

from flask import Request
from werkzeug.datastructures import MultiDict
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.wsgi import get_content_length

from flask_idempotency.core.errors import BodyIncomplete
from flask_idempotency.web.setup.settings import Settings

CHUNK_BYTES = 64 * 1024
"""How much of a body is asked for at once."""


class NotKept(Exception):
    """The body cannot be kept without changing what the application reads, or when."""


class OverheardBody(io.BufferedIOBase):
    """In place of the server's input: what is read of it is kept, and may be read ahead.

    Readers get the same bytes and the same errors in the same places as from the server. Only a body of
    known length is kept, up to the limit for requests with a key: a chunked one may be half of a
    conversation, whose client waits for the response before it goes on. Nor is one read ahead whose
    client asks first whether to send it (``Expect: 100-continue``).
    """

    def __init__(self, request: Request, settings: Settings) -> None:
        super().__init__()
        environ = request.environ
        self._request = weakref.ref(request)  # not a cycle: see Body
        self._default_limit = settings.max_request_bytes
        self._length = get_content_length(environ) or 0
        self._may_keep = "HTTP_EXPECT" not in environ and "HTTP_TRANSFER_ENCODING" not in environ
        self._is_late = not {"stream", "form"}.isdisjoint(request.__dict__)
        self._input = environ["wsgi.input"]
        self._kept, self._ahead = bytearray(), io.BytesIO()
        self._error: Exception | None = None
        if self._may_keep and not self._is_late and 0 < self._length <= self._limit():
            environ["wsgi.input"] = self

    def whole(self) -> bytes:
        """All of the body.

        Raises ``BodyIncomplete``, Werkzeug's 413, and :class:`NotKept`.
        """
        request = self._present()
        if self._length > self._limit():
            raise RequestEntityTooLarge
        if "_cached_data" in request.__dict__:
            return request.get_data()
        if not self._may_keep or (self._length and request.environ["wsgi.input"] is not self):
            raise NotKept
        self._read_ahead()
        return bytes(self._kept)

    def form(self) -> MultiDict[str, str]:
        """The form in it, parsed apart: the application's own parsing is not touched."""
        request = self._present()
        with type(request)({**request.environ, "wsgi.input": io.BytesIO(self.whole())}) as apart:
            return apart.form

    def readable(self) -> bool:
        """Yes."""
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        """Read on, for the application."""
        return self._next(self._ahead.read, self._input.read, size)

    def read1(self, size: int = -1, /) -> bytes:
        """Read what is there, for the application."""
        return self._ahead.read(size) or self.read(size)

    def readline(self, size: int | None = -1, /) -> bytes:
        """Read a line, for the application."""
        return self._next(self._ahead.readline, self._input.readline, size, end=b"\n")

    def _next(
        self,
        read_ahead: Callable[[int], bytes],
        read: Callable[..., bytes],
        size: int | None,
        end: bytes | None = None,
    ) -> bytes:
        """What was read ahead, then what the server gives."""
        size = -1 if size is None else size
        data = read_ahead(size)
        if len(data) == size or (data and end is not None and data.endswith(end)):
            return data
        if self._error is not None:  # met here when reading ahead
            if data:
                return data
            error, self._error = self._error, None
            raise error
        more = read() if size < 0 else read(size - len(data))
        self._kept += more
        return data + more

    def _read_ahead(self) -> None:
        position, start = self._ahead.tell(), len(self._kept)
        try:
            while self._error is None and len(self._kept) < self._length:
                data = self._input.read(min(CHUNK_BYTES, self._length - len(self._kept)))
                if not data:
                    raise BodyIncomplete
                self._kept += data
        except BodyIncomplete:
            raise
        except Exception as error:
            self._error = error
        finally:
            self._ahead.seek(0, io.SEEK_END)
            self._ahead.write(self._kept[start:])
            self._ahead.seek(position)
        if self._error is not None:
            raise BodyIncomplete from self._error

    def _limit(self) -> int:
        limit = self._present().max_content_length
        return self._default_limit if limit is None else limit

    def _present(self) -> Request:
        request = self._request()
        if request is None:
            raise NotKept
        return request
