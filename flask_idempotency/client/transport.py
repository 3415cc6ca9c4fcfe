"""For httpx: clients whose calls are sent again, and the transports that do it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, closing, suppress
from types import TracebackType
from typing import Any, Final

from .allowed import Rule, check
from .retries import POLICY, Attempts, RetryPolicy, policy_or_usual
from .verdicts import LATE, NO_END, tells_its_end

try:
    import anyio
    import httpx
except ImportError as error:
    raise ImportError(
        "IdempotentClient, AsyncIdempotentClient, IdempotentTransport and AsyncIdempotentTransport"
        f" need httpx and anyio ({error}): pip install 'flask-idempotency[httpx]'"
    ) from error

RETRIED: Final = (
    httpx.TimeoutException,
    httpx.NetworkError,
    httpx.RemoteProtocolError,
    httpx.ProxyError,
)
"""The other transport errors are mistakes in the request, and come again."""

_CALL: Final = "flask_idempotency.call"
"""The extension of a request that says when its call began, and whether the caller streams it."""


class IdempotentTransport(httpx.BaseTransport):
    """A transport that sends POST and PATCH requests until they get a final response.

    It gives clients of another class what :class:`IdempotentClient` has:
    ``httpx.Client(transport=IdempotentTransport())``. Only this differs: a ``proxy``, ``mounts`` and
    another client's own transports go round it, ``auth`` signs a request before it has its key, each
    redirect and sign-in (digest) has a deadline of its own, and with ``stream()`` the whole response is
    read first, unless it is an event stream.

    :param wrapped: what sends each attempt; ``httpx.HTTPTransport()`` if left out.
    :param policy: when a call is sent again, and for how long.
    :raises TypeError: for a value of another type.
    :raises ValueError: if ``wrapped`` is an ``IdempotentTransport``: the attempts would multiply.
    """

    def __init__(
        self, wrapped: httpx.BaseTransport | None = None, *, policy: RetryPolicy | None = None
    ) -> None:
        self._wrapped = httpx.HTTPTransport() if wrapped is None else wrapped
        self._policy = policy_or_usual(policy)
        check("wrapped", self._wrapped, _rule(httpx.BaseTransport, IdempotentTransport))

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request until it has a final response."""
        policy = _policy_of(request, self._policy)
        if not policy.give_key(request.method, request.headers):
            return self._wrapped.handle_request(request)
        request.read()
        with _Call(policy, request) as call:
            while True:
                try:
                    response = self._attempt(request, call)
                except RETRIED as error:
                    if (seconds := call.after_error(error)) is None:
                        raise
                else:
                    if (seconds := call.after_response(response)) is None:
                        return response
                policy.sleep(seconds)

    def _attempt(self, request: httpx.Request, call: _Call) -> httpx.Response:
        call.begin()
        response = self._wrapped.handle_request(request)
        if call.leaves(response):
            return response
        with closing(response):
            return call.whole(response, b"".join(call.in_time(response.iter_raw())))

    def close(self) -> None:
        """Close the connections."""
        self._wrapped.close()

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
        self._wrapped = httpx.AsyncHTTPTransport() if wrapped is None else wrapped
        self._policy = policy_or_usual(policy)
        check("wrapped", self._wrapped, _rule(httpx.AsyncBaseTransport, AsyncIdempotentTransport))
        self._sleep = sleep

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request until it has a final response."""
        policy = _policy_of(request, self._policy)
        if not policy.give_key(request.method, request.headers):
            return await self._wrapped.handle_async_request(request)
        await request.aread()
        with _Call(policy, request) as call:
            while True:
                try:
                    response = await self._attempt(request, call)
                except RETRIED as error:
                    if (seconds := call.after_error(error)) is None:
                        raise
                else:
                    if (seconds := call.after_response(response)) is None:
                        return response
                await self._sleep(seconds)

    async def _attempt(self, request: httpx.Request, call: _Call) -> httpx.Response:
        with anyio.move_on_after(call.begin()):
            response = await self._wrapped.handle_async_request(request)
            if call.leaves(response):
                return response
            async with aclosing(response):
                return call.whole(response, b"".join([part async for part in response.aiter_raw()]))
        raise httpx.ReadTimeout(LATE)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._wrapped.aclose()

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


class IdempotentClient(httpx.Client):
    """An :class:`httpx.Client` whose POST and PATCH calls may safely be sent again, and are.

    Every such call gets a key of its own, which is the same for each of its attempts. A key that you
    give in the header is kept; with it, PUT, DELETE and other calls are also sent again. Any other call
    is sent once, unless the policy names its method.

    The key becomes a header of the request that ``build_request`` made. One that is sent twice is one
    operation.

    Each attempt goes the way it would go without us: through your ``transport``, your ``mounts``, your
    ``proxy`` or that of the environment. ``auth`` signs a call once, with its key.

    After the last attempt its response is returned, whatever its status, or its error raised. Either
    has the key: ``response.request.headers["Idempotency-Key"]``, ``error.request.headers[…]``.

    The bodies of a call with a key are held in memory: the request's, as each attempt must send the
    same bytes, and the response's, as one that breaks off is asked for again. A success that you read
    with ``stream()``, and any event stream, is handed over as it comes; if it breaks off, it is not
    asked for again.

    A redirect that is followed and a sign-in that the server asks for (digest) belong to the call: they
    have the same key, the same deadline, and attempts of their own.

    :param policy: when a call is sent again, and for how long. A call can have another:
        ``client.post(url, extensions={"retry_policy": patient})``.
    :param options: what ``httpx.Client`` takes.
    """

    def __init__(self, *, policy: RetryPolicy | None = None, **options: Any) -> None:
        self.policy = policy_or_usual(policy)
        super().__init__(**options)

    def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """Send a request, with a key if it needs one. Sent twice, it is one operation."""
        _begin(request, self.policy, options)
        return super().send(request, **options)

    def _transport_for_url(self, url: httpx.URL) -> httpx.BaseTransport:
        transport = super()._transport_for_url(url)
        if isinstance(transport, IdempotentTransport):
            return transport
        return IdempotentTransport(transport, policy=self.policy)


class AsyncIdempotentClient(httpx.AsyncClient):
    """The same for ``async`` code, with asyncio or trio.

    :param policy: when a call is sent again, and for how long. Its ``sleep`` is not used.
    :param sleep: waits; a test gives another.
    :param options: what ``httpx.AsyncClient`` takes.
    """

    def __init__(
        self,
        *,
        policy: RetryPolicy | None = None,
        sleep: Callable[[float], Awaitable[object]] = anyio.sleep,
        **options: Any,
    ) -> None:
        self.policy = policy_or_usual(policy)
        super().__init__(**options)
        self._sleep = sleep

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """Send a request, with a key if it needs one. Sent twice, it is one operation."""
        _begin(request, self.policy, options)
        return await super().send(request, **options)

    def _transport_for_url(self, url: httpx.URL) -> httpx.AsyncBaseTransport:
        transport = super()._transport_for_url(url)
        if isinstance(transport, AsyncIdempotentTransport):
            return transport
        return AsyncIdempotentTransport(transport, policy=self.policy, sleep=self._sleep)


# What the clients override. In a release of httpx without it this fails, and not a call in silence.
_ = httpx.Client._transport_for_url, httpx.AsyncClient._transport_for_url  # noqa: SLF001


def _policy_of(request: httpx.Request, default: RetryPolicy) -> RetryPolicy:
    """The policy that the call has for itself in its extension ``retry_policy``, or the default."""
    policy: RetryPolicy = request.extensions.get("retry_policy", default)
    check("The extension retry_policy", policy, POLICY)
    return policy


def _rule(kind: type, ours: type) -> Rule:
    """Raise if a transport would wrap one of ours: the attempts would multiply."""
    allowed = f"an httpx.{kind.__name__} that is not an {ours.__name__}"
    return (kind,), lambda transport: not isinstance(transport, ours), allowed


def _begin(request: httpx.Request, default: RetryPolicy, options: dict[str, Any]) -> None:
    """Begin a call: give the request its key, before ``auth`` signs it, and note the time."""
    policy = _policy_of(request, default)
    # A redirect takes over the extensions of the request before: one call, one deadline.
    call = policy.clock(), options.get("stream", False)
    request.extensions = {**request.extensions, _CALL: call}
    policy.give_key(request.method, request.headers)


class _Call:
    """The attempts to send one request: what both transports have in common."""

    def __init__(self, policy: RetryPolicy, request: httpx.Request) -> None:
        began, self._streams = request.extensions.get(_CALL, (None, False))
        self._attempts = Attempts(policy, request, began)
        self._limits = request.extensions.get("timeout", {})
        self._request = request
        self.after_error = self._attempts.after_error

    def __enter__(self) -> _Call:
        self._request.extensions = {**self._request.extensions}
        return self

    def __exit__(self, *error: object) -> None:
        # In place: httpcore looks here when the caller reads a response that was left to it.
        self._request.extensions["timeout"] = self._limits

    def begin(self) -> float:
        """Begin the next attempt. Returns the seconds that it may take; it waits for nothing longer."""
        seconds = self._attempts.begin()
        self._request.extensions["timeout"] = {
            name: seconds if (given := self._limits.get(name)) is None else min(given, seconds)
            for name in ("connect", "read", "write", "pool")
        }
        return seconds

    def leaves(self, response: httpx.Response) -> bool:
        """Return True if the body is left alone: a stream, or what a mock or a cache has read."""
        is_stream = response.headers.get("Content-Type", "").lower().startswith("text/event-stream")
        return response.is_closed or (response.is_success and (is_stream or self._streams))

    def in_time(self, parts: Iterable[bytes]) -> Iterator[bytes]:
        """The parts of a body. Raises ``ReadTimeout`` if one comes after the deadline."""
        for part in parts:
            if self._attempts.left() < 0:
                raise httpx.ReadTimeout(LATE)
            yield part

    def whole(self, response: httpx.Response, body: bytes) -> httpx.Response:
        """The response with its body in memory, to be read as if it came from the network.

        Raises ``RemoteProtocolError`` if it may have broken off.
        """
        status, headers, told = response.status_code, response.headers, response.extensions
        is_http_1 = told.get("http_version") == b"HTTP/1.1" and "network_stream" in told  # not a mock's
        if is_http_1 and not tells_its_end(
            status, headers, method=self._request.method, empty=not body
        ):
            raise httpx.RemoteProtocolError(NO_END)
        return httpx.Response(status, headers=headers, stream=httpx.ByteStream(body), extensions=told)

    def after_response(self, response: httpx.Response) -> float | None:
        """Seconds until the next attempt, or None if this response is the last."""
        status, headers, body = response.status_code, response.headers, b""
        if not response.is_success:  # only a problem is read
            if not response.is_closed:  # its own body is left for the client to read
                response = httpx.Response(status, headers=headers, stream=response.stream)
            with suppress(httpx.DecodingError):  # then it is no problem; the client meets it again
                body = response.read()
        return self._attempts.after_response(status, headers, body)
