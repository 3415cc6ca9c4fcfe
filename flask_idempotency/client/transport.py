"""For httpx: transports whose calls are sent again."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, closing, contextmanager
from types import TracebackType
from typing import Final

from .retries import Attempts, RetryPolicy

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
    give in the header is kept; with it, PUT, DELETE and other calls are also sent again. A call without
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
        policy = _policy_of(request, self._policy)
        if not policy.give_key(request.method, request.headers):
            return self._wrapped.handle_request(request)
        request.read()
        with _attempts(policy, request) as attempts:
            while True:
                _limit(request, attempts.begin())
                try:
                    response = self._attempt(request)
                except RETRIED as error:
                    if (seconds := attempts.after_error(error)) is None:
                        raise
                else:
                    if (seconds := _after(attempts, response)) is None:
                        return response
                policy.sleep(seconds)

    def _attempt(self, request: httpx.Request) -> httpx.Response:
        response = self._wrapped.handle_request(request)
        if response.is_closed:  # a mock or a cache has read it
            return response
        with closing(response):
            return _whole(response, b"".join(response.iter_raw()))

    def __enter__(self) -> IdempotentTransport:
        self._wrapped.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self._wrapped.__exit__(exc_type, exc_value, traceback)

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
        policy = _policy_of(request, self._policy)
        if not policy.give_key(request.method, request.headers):
            return await self._wrapped.handle_async_request(request)
        await request.aread()
        with _attempts(policy, request) as attempts:
            while True:
                _limit(request, attempts.begin())
                try:
                    response = await self._attempt(request)
                except RETRIED as error:
                    if (seconds := attempts.after_error(error)) is None:
                        raise
                else:
                    if (seconds := _after(attempts, response)) is None:
                        return response
                await self._sleep(seconds)

    async def _attempt(self, request: httpx.Request) -> httpx.Response:
        response = await self._wrapped.handle_async_request(request)
        if response.is_closed:  # a mock or a cache has read it
            return response
        async with aclosing(response):
            return _whole(response, b"".join([part async for part in response.aiter_raw()]))

    async def __aenter__(self) -> AsyncIdempotentTransport:
        await self._wrapped.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self._wrapped.__aexit__(exc_type, exc_value, traceback)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._wrapped.aclose()


def _policy_of(request: httpx.Request, default: RetryPolicy) -> RetryPolicy:
    """The policy that the call has for itself in its extension ``retry_policy``, or the default."""
    policy = request.extensions.get("retry_policy", default)
    if not isinstance(policy, RetryPolicy):
        raise TypeError(f"The extension retry_policy is {policy!r}; allowed: a RetryPolicy")
    return policy


@contextmanager
def _attempts(policy: RetryPolicy, request: httpx.Request) -> Iterator[Attempts]:
    """The attempts to send a request, whoever sends them; its time limits are restored at the end."""
    # httpx makes the request of a redirect out of the one before, with its extensions: that is the
    # same call still. The very same request is there if it is sent once more: that is another one.
    own = request.extensions
    before, began = own.get(_CALL, (None, None))
    attempts = Attempts(policy, request, began if before and before() is not request else None)
    try:
        yield attempts
    finally:
        request.extensions = {**own, _CALL: (weakref.ref(request), attempts.began)}


def _limit(request: httpx.Request, seconds: float) -> None:
    """Let the next attempt take no longer than the call has left."""
    own = request.extensions.get("timeout", {})
    limits = {
        name: seconds if (given := own.get(name)) is None else min(given, seconds)
        for name in ("connect", "read", "write", "pool")
    }
    request.extensions = {**request.extensions, "timeout": limits}


def _after(attempts: Attempts, response: httpx.Response) -> float | None:
    """Seconds until the next attempt, or None if this response is the last."""
    status, headers = response.status_code, response.headers
    if response.is_success:  # only a problem is read
        return attempts.after_response(status, headers, b"")
    if not response.is_closed:  # its own body is left for the client to read
        response = httpx.Response(status, headers=headers, stream=response.stream)
    return attempts.after_response(status, headers, response.read())


def _whole(response: httpx.Response, body: bytes) -> httpx.Response:
    """The response with its body in memory, for the client to read as if it came from the network."""
    return httpx.Response(
        response.status_code,
        headers=response.headers,
        stream=httpx.ByteStream(body),
        extensions=response.extensions,
    )
