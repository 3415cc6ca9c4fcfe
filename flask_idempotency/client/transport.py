"""For httpx: transports whose calls are sent again."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable
from contextlib import aclosing, closing
from typing import Final

from .retries import Call, RetryPolicy

try:
    import anyio
    import httpx
except ImportError as error:
    raise ImportError(
        f"IdempotentTransport and AsyncIdempotentTransport need httpx and anyio ({error}):"
        " pip install 'flask-idempotency[httpx]'"
    ) from error

RETRIED: Final = (
    httpx.TimeoutException,
    httpx.NetworkError,
    httpx.RemoteProtocolError,
    httpx.ProxyError,
)
"""The other transport errors are mistakes in the request, and come again."""

_CALL: Final = "flask_idempotency.call"
"""The extension of a request that says to which call it belongs."""


class IdempotentTransport(httpx.BaseTransport):
    """A transport for ``httpx.Client`` whose POST and PATCH calls may safely be sent again, and are.

    Every such call gets a key of its own, which is the same for each of its attempts. A key that you
    give in the header is kept; with it, PUT, DELETE and other calls are sent again too. A call without
    a key is sent once, as by any other transport.

    After the last attempt its response is returned, whatever its status, or its error raised. Either
    has the key: ``response.request.headers["Idempotency-Key"]``, ``error.request.headers[…]``.

    The bodies of a call with a key are held in memory: the request's, as each attempt must send the
    same bytes, and the response's, as one that breaks off is asked for again. A redirect that is
    followed belongs to the call: it has the same key, the same deadline, and attempts of its own.
    A sign-in that the server asks for (digest) has the same key, and a deadline of its own.

    :param wrapped: what sends each attempt; ``httpx.HTTPTransport()`` if left out.
    :param policy: when a call is sent again, and for how long.
    """

    def __init__(
        self, wrapped: httpx.BaseTransport | None = None, *, policy: RetryPolicy | None = None
    ) -> None:
        self._wrapped = wrapped or httpx.HTTPTransport()
        self._policy = policy or RetryPolicy()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request until it has a final response."""
        if not self._policy.give_key(request.method, request.headers):
            return self._wrapped.handle_request(request)
        request.read()
        with _Attempts(self._policy, request) as attempts:
            while True:
                attempts.begin()
                try:
                    with closing(self._wrapped.handle_request(request)) as response:
                        whole = _whole(response, b"".join(response.iter_raw()))
                except RETRIED as error:
                    if (seconds := attempts.after_error(error)) is None:
                        raise
                else:
                    if (seconds := attempts.after_response(whole)) is None:
                        return whole
                self._policy.sleep(seconds)

    def close(self) -> None:
        """Close the connections."""
        self._wrapped.close()


class AsyncIdempotentTransport(httpx.AsyncBaseTransport):
    """The same for ``httpx.AsyncClient``.

    :param wrapped: what sends each attempt; ``httpx.AsyncHTTPTransport()`` if left out.
    :param policy: when a call is sent again, and for how long. Its ``sleep`` is not used.
    :param sleep: waits; a test gives another.
    """

    def __init__(
        self,
        wrapped: httpx.AsyncBaseTransport | None = None,
        *,
        policy: RetryPolicy | None = None,
        sleep: Callable[[float], Awaitable[object]] = anyio.sleep,
    ) -> None:
        self._wrapped = wrapped or httpx.AsyncHTTPTransport()
        self._policy = policy or RetryPolicy()
        self._sleep = sleep

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request until it has a final response."""
        if not self._policy.give_key(request.method, request.headers):
            return await self._wrapped.handle_async_request(request)
        await request.aread()
        with _Attempts(self._policy, request) as attempts:
            while True:
                attempts.begin()
                try:
                    sent = await self._wrapped.handle_async_request(request)
                    async with aclosing(sent) as response:
                        body = b"".join([part async for part in response.aiter_raw()])
                    whole = _whole(response, body)
                except RETRIED as error:
                    if (seconds := attempts.after_error(error)) is None:
                        raise
                else:
                    if (seconds := attempts.after_response(whole)) is None:
                        return whole
                await self._sleep(seconds)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._wrapped.aclose()


class _Attempts:
    """The attempts to send a request, whoever sends them. In this context it has their time limits."""

    def __init__(self, policy: RetryPolicy, request: httpx.Request) -> None:
        self._request = request
        self._own = request.extensions
        self._limits: dict[str, float | None] = self._own.get("timeout", {})
        self._begun = 0
        # httpx makes the request of a redirect out of the one before, with its extensions: that is the
        # same call still. The very same request is there if it is sent once more: that is another one.
        before: weakref.ref[httpx.Request] | None
        before, call = self._own.get(_CALL, (None, None))
        self._call: Call = Call(policy) if call is None or before() is request else call

    def __enter__(self) -> _Attempts:
        return self

    def __exit__(self, *_: object) -> None:
        self._request.extensions = {**self._own, _CALL: (weakref.ref(self._request), self._call)}

    def begin(self) -> None:
        """Let the next attempt take no longer than the call has left."""
        self._begun += 1
        left = self._call.left
        limits = {
            name: left if (given := self._limits.get(name)) is None else min(given, left)
            for name in ("connect", "read", "write", "pool")
        }
        self._request.extensions = {**self._own, "timeout": limits}

    def after_error(self, error: httpx.TransportError) -> float | None:
        """Seconds until the next attempt, or None if there is none."""
        return self._call.after_error(self._begun, error)

    def after_response(self, response: httpx.Response) -> float | None:
        """Seconds until the next attempt, or None if there is none."""
        if response.is_success:
            return None
        return self._call.after_response(
            self._begun, response.status_code, response.headers, _decoded(response)
        )


def _whole(response: httpx.Response, body: bytes) -> httpx.Response:
    """The response with its body in memory, for the client to read as if it came from the network."""
    return httpx.Response(
        response.status_code,
        headers=response.headers,
        stream=httpx.ByteStream(body),
        extensions=response.extensions,
    )


def _decoded(response: httpx.Response) -> bytes:
    # A copy: the client must find the original unread.
    assert isinstance(response.stream, httpx.ByteStream)  # noqa: S101 -- see _whole
    body = b"".join(response.stream)
    return httpx.Response(response.status_code, headers=response.headers, content=body).content
