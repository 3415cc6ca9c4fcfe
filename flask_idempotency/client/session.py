"""For requests: an adapter that sends a request until it has a final response, and its session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from copy import copy
from http.client import HTTPResponse
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

from .allowed import Rule, check
from .retries import POLICY, Attempts, RetryPolicy, policy_or_usual
from .verdicts import INTERIM, LATE, NO_END, tells_its_end

try:
    import requests
    import urllib3
    from requests.adapters import BaseAdapter, HTTPAdapter
    from requests.exceptions import (
        ChunkedEncodingError,
        ContentDecodingError,
        ReadTimeout,
        UnrewindableBodyError,
    )
    from requests.structures import CaseInsensitiveDict
    from requests.utils import rewind_body
except ImportError as error:
    raise ImportError(
        f"IdempotentSession and IdempotentAdapter need requests and urllib3 ({error}):"
        " pip install 'flask-idempotency[requests]'"
    ) from error

if TYPE_CHECKING:
    from typing_extensions import Self

RETRIED: Final = (requests.ConnectionError, requests.Timeout, ChunkedEncodingError)
"""The other errors of requests are mistakes in the request, and come again."""

_CALL: Final[ContextVar[tuple[object, float | None]]] = ContextVar("_CALL", default=(None, None))
"""The session that makes a call, and when it began. As an argument, adapters and hooks would get it."""


class IdempotentAdapter(BaseAdapter):
    """An adapter that sends POST and PATCH requests until they get a final response.

    It gives sessions of another class, such as those for OAuth, what :class:`IdempotentSession` has:
    ``session.mount("https://", IdempotentAdapter())``. Only this differs: ``auth`` signs a request
    before it has its key, each redirect and sign-in (digest) has a deadline of its own, and without a
    ``timeout`` an attempt may wait until the deadline.

    :param wrapped: what sends each attempt; ``HTTPAdapter()`` if left out.
    :param policy: when a call is sent again, and for how long.
    :raises TypeError: for a value of another type.
    :raises ValueError: if ``wrapped`` is an ``IdempotentAdapter``: the attempts would multiply.
    """

    began: float | None = None
    """When the call began, by the policy's clock; None where each request is a call of its own."""

    def __init__(
        self, wrapped: BaseAdapter | None = None, *, policy: RetryPolicy | None = None
    ) -> None:
        super().__init__()
        self.wrapped = HTTPAdapter() if wrapped is None else wrapped
        self.policy = policy_or_usual(policy)
        check("wrapped", self.wrapped, _ADAPTER)

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: bool | str = True,
        cert: bytes | str | tuple[bytes | str, bytes | str] | None = None,
        proxies: Mapping[str, str] | None = None,
    ) -> requests.Response:
        """Send a request until it has a final response."""
        given: dict[str, Any] = {"stream": stream, "verify": verify, "cert": cert, "proxies": proxies}
        if not self.policy.give_key(request.method, request.headers):
            response = self.wrapped.send(request, timeout=timeout, **given)
            if _is_interim(response) and response.status_code != 101:  # its connection is the caller's
                response.close()  # or another call would find the real one on this connection
            return response
        attempts = Attempts(self.policy, request, self.began)
        while True:
            _rewind(request)
            limit = _within(attempts.begin(), timeout)
            try:
                response = self.wrapped.send(request, timeout=limit, **given)
                body = _receive(response, attempts.left, stream=stream)
            except requests.RequestException as error:
                error.request = error.request or request  # an error inside the body has none
                attempts.count_on(error.request)
                if (seconds := _after_error(attempts, error)) is None:
                    raise
            else:
                seconds = attempts.after_response(response.status_code, response.headers, body)
                if seconds is None:
                    response.request = getattr(response, "request", None) or request
                    attempts.count_on(response.request)
                    response.connection = self  # type: ignore[assignment]  # digest sends through it
                    return response
                response.close()
            self.policy.sleep(seconds)

    def close(self) -> None:
        """Close the connections."""
        self.wrapped.close()


def _after_error(attempts: Attempts, error: requests.RequestException) -> float | None:
    """Seconds until the next attempt, or None if this error is the last."""
    if isinstance(error, ContentDecodingError) and error.response is not None:
        return attempts.after_response(error.response.status_code, error.response.headers, b"")
    # Of the response: its lengths contradict each other. Of the request, it would come again.
    is_of_response = isinstance(next(iter(error.args), None), urllib3.exceptions.InvalidHeader)
    return attempts.after_error(error) if is_of_response or isinstance(error, RETRIED) else None


_ADAPTER: Final[Rule] = (
    (BaseAdapter,),
    lambda adapter: not isinstance(adapter, IdempotentAdapter),  # the attempts would multiply
    "an adapter of requests that is not an IdempotentAdapter",
)


class IdempotentSession(requests.Session):
    """A :class:`requests.Session` whose POST and PATCH calls may safely be sent again, and are.

    Every such call gets a key of its own, which is the same for each of its attempts. A key that you
    give in the header is kept; with it, PUT, DELETE and other calls are also sent again. Any other call
    is sent once, unless the policy names its method. Each attempt goes through the adapter that is
    mounted.

    The key becomes a header of the prepared request. One that is sent twice is one operation.

    After the last attempt its response is returned, whatever its status, or its error raised. Either
    has the key: ``response.request.headers["Idempotency-Key"]``, ``error.request.headers[…]``.

    A body that is a file or an iterator is read into memory first, as each attempt must send the same
    bytes. A redirect that is followed belongs to the call: it has the same key, the same deadline, and
    attempts of its own.

    :param policy: when a call is sent again, and for how long. A call can have another:
        ``session.with_policy(patient).post(url)``.
    :param timeout: seconds that each attempt may wait for a connection, and then for each piece of the
        response, or both as a pair, where the call does not say. It also holds for calls without a key.
    """

    __attrs__ = (*requests.Session.__attrs__, "policy", "timeout")  # what is copied and pickled

    def __init__(
        self, policy: RetryPolicy | None = None, *, timeout: float | tuple[float, float] = 10
    ) -> None:
        super().__init__()
        self.policy = policy_or_usual(policy)
        self.timeout = timeout

    def with_policy(self, policy: RetryPolicy) -> Self:
        """The same session with another policy, for one call: ``session.with_policy(patient).post(…)``.

        Connections, cookies and headers are this session's.
        """
        check("policy", policy, POLICY)
        twin = object.__new__(type(self))
        twin.__dict__ |= self.__dict__
        twin.policy = policy
        return twin

    def prepare_request(self, request: requests.Request) -> requests.PreparedRequest:
        """Prepare a request: ``auth`` signs it with its key and the body that each attempt sends."""
        headers = CaseInsensitiveDict({**self.headers, **request.headers})
        if self.policy.give_key(request.method.upper(), headers):
            request = copy(request)
            request.headers = headers
            request.data = _in_memory(request.data)
        return super().prepare_request(request)

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        """Send a prepared request, with a key if it needs one. Sent twice, it is one operation."""
        if kwargs.get("timeout") is None:
            kwargs["timeout"] = self.timeout
        if self._began is not None:  # requests follows a redirect: one call, one deadline
            return super().send(request, **kwargs)
        before = _CALL.set((self, self.policy.clock()))
        try:
            return super().send(request, **kwargs)
        finally:
            _CALL.reset(before)

    def get_adapter(self, url: str) -> IdempotentAdapter:
        """The adapter that is mounted for a URL, wrapped."""
        adapter = super().get_adapter(url)
        if not isinstance(adapter, IdempotentAdapter):
            adapter = IdempotentAdapter(adapter, policy=self.policy)
        adapter = copy(adapter)  # a mounted one serves other calls, too
        adapter.began = self._began
        return adapter

    @property
    def _began(self) -> float | None:
        """When the call that this session is making began, by the policy's clock."""
        session, began = _CALL.get()
        return began if session is self else None


def _receive(response: requests.Response, left: Callable[[], float], *, stream: bool) -> bytes:
    """The body, decoded; nothing of a success that the caller streams.

    Raises ``ReadTimeout`` if it is still coming when no seconds are ``left``, and ``ConnectionError``
    for a response that may have broken off, or is not the real one.
    """
    is_callers = stream and response.ok and not response.is_redirect
    try:
        if _is_interim(response):  # once read, its connection would go back to the pool
            raise requests.ConnectionError(INTERIM)
        body = b"" if is_callers else _read(response, left)
        is_http_1 = _is_of_network(response.raw) and response.raw.version == 11
        if is_http_1 and not tells_its_end(
            response.status_code,
            response.headers,
            method=response.request.method,
            empty=not body and not is_callers,
        ):
            raise requests.ConnectionError(NO_END)
    except BaseException as error:
        response.close()
        if isinstance(error, ContentDecodingError):
            error.response = response  # its status and headers tell whether it is sent again
        raise
    return body


def _read(response: requests.Response, left: Callable[[], float]) -> bytes:
    raw = response.raw
    if _is_of_network(raw):
        response.raw = _Timely(raw, left)
    try:
        return response.content or b""
    finally:
        response.raw = raw


def _is_of_network(raw: Any) -> bool:
    # A mock or a cache has a file of its own here, which it may watch, and need not say where it ends.
    return isinstance(getattr(raw, "_fp", None), HTTPResponse)


def _is_interim(response: requests.Response) -> bool:
    """Return True if the real response is still to come (RFC 9110 section 15.2)."""
    return response.status_code < 200 and _is_of_network(response.raw)


class _Timely:
    """Reads a body in the pieces in which it arrives, while there is time."""

    def __init__(self, raw: urllib3.HTTPResponse, left: Callable[[], float]) -> None:
        self._raw = raw
        self._left = left

    def stream(self, size: int, *, decode_content: bool) -> Iterator[bytes]:
        """The body. Raises ``ReadTimeout`` if it is still coming when no seconds are left."""
        body = BytesIO()
        for piece in self._pieces(size):
            if self._left() < 0:
                raise ReadTimeout(LATE)
            body.write(piece)
        body.seek(0)
        whole = urllib3.HTTPResponse(
            body, headers=self._raw.headers, preload_content=False, enforce_content_length=False
        )
        yield from whole.stream(size, decode_content=decode_content)

    def _pieces(self, size: int) -> Iterator[bytes]:
        # Not decoded yet: a decoded piece may be empty.
        if self._raw.chunked and not getattr(self._raw._fp, "chunked", False):  # noqa: SLF001
            # http.client knows only the exact word "chunked", urllib3 also lists that contain it.
            yield from self._raw.stream(size, decode_content=False)
        else:
            while piece := self._raw.read1(size, decode_content=False):
                yield piece


def _within(left: float, given: Any) -> Any:
    """The time limits of an attempt that may take ``left`` seconds."""
    if isinstance(given, urllib3.Timeout):
        limit = given.clone()
    else:
        connect, read = given if isinstance(given, tuple) else (given, given)
        if connect is not None and read is not None and connect + read <= left:
            return given  # a mock compares it
        limit = urllib3.Timeout(connect=connect, read=read)
    limit.total = min(limit.total, left) if isinstance(limit.total, int | float) else left
    return limit


def _rewind(request: requests.PreparedRequest) -> None:
    """Let the whole body be sent: a file from where it stood, an iterator from memory."""
    try:
        rewind_body(request)
    except UnrewindableBodyError:
        body = _in_memory(request.body)
        if body is not request.body:
            request.body = body
            request.headers.pop("Transfer-Encoding", None)
            request.prepare_content_length(body)


def _in_memory(body: Any) -> Any:
    """A body that can be read only once as bytes, any other as it is."""
    if hasattr(body, "read"):
        body = iter([body.read()])
    if not isinstance(body, Iterator):
        return body
    return b"".join(part.encode() if isinstance(part, str) else part for part in body)
