"""For httpx: a transport that sends a request until it has a final response."""

from __future__ import annotations

from contextlib import aclosing, closing
from time import sleep
from typing import Any, Final

import anyio
import httpx

from .attempts import UNENDED, Call, give_key

RETRIED: Final = (
    httpx.TimeoutException,
    httpx.NetworkError,
    httpx.RemoteProtocolError,
    httpx.ProxyError,
)
"""The other errors of httpx are mistakes in the request, and come again."""


class IdempotentTransport(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """A transport that gives POST and PATCH requests a key, and sends them again with it.

    The attributes ``deadline`` and ``header``, and the key in every response and error, are as in
    :class:`IdempotentSession`. The bodies of a call with a key are held in memory.

    :param wrapped: what sends each attempt, such as ``httpx.HTTPTransport()`` or
        ``httpx.AsyncHTTPTransport()``. It has the proxy and the certificates: a ``proxy`` or ``mounts``
        of the client go round this transport.

    A call raises ``ValueError`` for an empty key; then nothing was sent.
    """

    deadline: float = 90
    header = "Idempotency-Key"

    def __init__(self, wrapped: httpx.BaseTransport | httpx.AsyncBaseTransport) -> None:
        self._wrapped: Any = wrapped

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request until it has a final response."""
        if not give_key(self.header, request.method, request.headers):
            return self._wrapped.handle_request(request)  # type: ignore[no-any-return]
        request.read()
        call = Call(request, self.deadline, RETRIED)
        while True:
            with call:
                call.response = self._wrapped.handle_request(_within(call.left(), request))
                with closing(call.response):
                    call.response.read()
                _check(call)
            if call.pause is None:
                return call.response  # type: ignore[no-any-return]
            sleep(call.pause)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request until it has a final response."""
        if not give_key(self.header, request.method, request.headers):
            return await self._wrapped.handle_async_request(request)  # type: ignore[no-any-return]
        await request.aread()
        call = Call(request, self.deadline, RETRIED)
        while True:
            with call:
                attempt = _within(call.left(), request)
                call.response = await self._wrapped.handle_async_request(attempt)
                async with aclosing(call.response):
                    await call.response.aread()
                _check(call)
            if call.pause is None:
                return call.response  # type: ignore[no-any-return]
            await anyio.sleep(call.pause)

    def close(self) -> None:
        """Close the connections."""
        self._wrapped.close()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._wrapped.aclose()


def _check(call: Call) -> None:
    """Raise ``RemoteProtocolError`` if the response may have broken off. A mock has no version."""
    version = call.response.extensions.get("http_version", b"")
    if version.startswith(b"HTTP/1") and not call.has_told_its_end():
        raise httpx.RemoteProtocolError(UNENDED)


def _within(left: float, request: httpx.Request) -> httpx.Request:
    """A copy for an attempt that may take ``left`` seconds; the caller may send the original again."""
    given = request.extensions.get("timeout", {})
    limits = {part: min(given.get(part) or left, left) for part in ("connect", "read", "write", "pool")}
    method, url, headers, stream = request.method, request.url, request.headers, request.stream
    extensions = {**request.extensions, "timeout": limits}
    return httpx.Request(method, url, headers=headers, stream=stream, extensions=extensions)
