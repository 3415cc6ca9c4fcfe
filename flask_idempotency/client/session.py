"""For requests: a session whose calls are sent again, on urllib3's ``Retry``.

urllib3 sends a request again if no answer comes. It judges an answer by its status alone, before the
body is there; so the adapter judges it, with its body, and goes on with the same ``Retry``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .retries import Call, RetryPolicy

try:
    import requests
    from requests.adapters import HTTPAdapter
    from requests.exceptions import ChunkedEncodingError
    from urllib3 import BaseHTTPResponse, Retry, Timeout
    from urllib3.connectionpool import ConnectionPool
    from urllib3.exceptions import MaxRetryError, ResponseError
except ImportError as error:
    raise ImportError(
        f"IdempotentSession needs requests and urllib3 ({error}):"
        " pip install 'flask-idempotency[requests]'"
    ) from error

if TYPE_CHECKING:
    from typing_extensions import Self

Limit = float | tuple[float | None, float | None] | Timeout | None


class IdempotentSession(requests.Session):
    """A :class:`requests.Session` whose POST and PATCH calls may safely be sent again, and are.

    Every such call gets a key of its own, which is the same for each of its attempts. A key that you
    give in the header is kept; with it, PUT, DELETE and other calls are sent again too. A call without
    a key is sent once, as by any other session.

    After the last attempt its answer is returned, whatever its status, or its error raised. Either has
    the key: ``response.request.headers["Idempotency-Key"]``, ``error.request.headers[…]``.

    A body that is a file or an iterator is read into memory first, as each attempt must send the same
    bytes. A redirect that is followed belongs to the call: it has the same key, the same deadline, and
    attempts of its own.

    :param policy: when a call is sent again, and for how long.
    :param timeout: seconds that each attempt may wait for a connection, and then for each piece of the
        answer, or both as a pair, where the call does not say.
    """

    def __init__(
        self, policy: RetryPolicy | None = None, *, timeout: float | tuple[float, float] = 10
    ) -> None:
        super().__init__()
        self.policy = policy or RetryPolicy()
        self._timeout = timeout
        for prefix in ("https://", "http://"):
            self.mount(prefix, _Adapter(self.policy))

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        """Send a prepared request, with a key if it needs one. Sent twice, it has the same key."""
        if self.policy.give_key(request.method, request.headers):
            given = kwargs.get("timeout")
            # requests hands it on when it follows a redirect or signs in: one call, one deadline.
            kwargs["timeout"] = _Limit.of(self.policy, self._timeout if given is None else given)
        return super().send(request, **kwargs)


class _Adapter(HTTPAdapter):
    def __init__(self, policy: RetryPolicy) -> None:
        super().__init__()
        self._policy = policy

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: bool | str = True,
        cert: bytes | str | tuple[bytes | str, bytes | str] | None = None,
        proxies: Mapping[str, str] | None = None,
    ) -> requests.Response:
        if self._policy.header not in request.headers:
            return super().send(request, stream, timeout, verify, cert, proxies)
        _keep_body(request)
        limit = _Limit.of(self._policy, timeout)
        retries: Retry = _Retries.of(limit.call)
        while True:
            attempts = _Attempts(self, retries)
            response = attempts.send(request, stream, limit, verify, cert, proxies)  # type: ignore[arg-type]
            response.connection = self  # what a sign-in that is asked for uses to send again
            retries, broken = response.raw.retries or retries, None
            try:
                if (response.ok and stream) or self._is_final(response):
                    return response
            except (ChunkedEncodingError, requests.ConnectionError) as error:
                broken = error
            try:
                retries = retries.increment(request.method, request.url, response.raw, broken)
            except MaxRetryError:
                if broken:
                    broken.request = request
                    raise broken from None
                return response
            response.close()
            retries.sleep()

    def _is_final(self, response: requests.Response) -> bool:
        return self._policy.is_final(response.status_code, response.headers, response.content)


class _Attempts(HTTPAdapter):
    """The adapter for attempts of one call: the same connections, with the retries of that call."""

    def __init__(self, adapter: HTTPAdapter, retries: Retry) -> None:
        vars(self).update(vars(adapter), max_retries=retries)


class _Retries(Retry):
    """urllib3's count and history of attempts, with the waits and the deadline of a call."""

    call: Call
    delay: float = 0.0

    @classmethod
    def of(cls, call: Call) -> Self:
        # No statuses, no Retry-After: so urllib3 itself sends again after errors only.
        retries = cls(total=call.policy.retries, allowed_methods=None, respect_retry_after_header=False)
        retries.call = call
        return retries

    def new(self, **kw: Any) -> Self:
        new = super().new(**kw)
        new.call = self.call
        return new

    def increment(
        self,
        method: str | None = None,
        url: str | None = None,
        response: BaseHTTPResponse | None = None,
        error: Exception | None = None,
        _pool: ConnectionPool | None = None,
        _stacktrace: TracebackType | None = None,
    ) -> Self:
        new = super().increment(method, url, response, error, _pool, _stacktrace)
        if response is None or error is not None:
            delay = self.call.wait(len(new.history), 0, {})
        else:
            delay = self.call.wait(len(new.history), response.status, response.headers)
        if delay is None:
            reason = error or ResponseError("the call's deadline")
            raise MaxRetryError(_pool, url or "", reason) from reason  # type: ignore[arg-type]
        new.delay = delay
        return new

    def sleep(self, response: BaseHTTPResponse | None = None) -> None:  # noqa: ARG002 -- urllib3's
        self.call.policy.sleep(self.delay)


class _Limit(Timeout):
    """A time limit that urllib3 copies for each attempt: the copy knows how long the call has left."""

    def __init__(self, call: Call, given: Limit) -> None:
        super().__init__()
        self.call = call
        if isinstance(given, Timeout):
            self._given = given
        else:
            connect, read = given if isinstance(given, tuple) else (given, given)
            self._given = Timeout(connect=connect, read=read)

    @classmethod
    def of(cls, policy: RetryPolicy, given: Limit) -> Self:
        """The limit of a call that begins; or ``given``, if that is the limit of one under way."""
        return given if isinstance(given, cls) else cls(Call(policy), given)

    def clone(self) -> Timeout:
        limit = self._given.clone()
        left = self.call.left
        limit.total = min(limit.total, left) if isinstance(limit.total, int | float) else left
        return limit


def _keep_body(request: requests.PreparedRequest) -> None:
    body: Any = request.body
    if body is None or isinstance(body, bytes | str):
        return
    parts = [body.read()] if hasattr(body, "read") else body
    request.body = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
    request.headers.pop("Transfer-Encoding", None)
    request.prepare_content_length(request.body)
