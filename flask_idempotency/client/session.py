"""For requests: a session that sends a request until it has a final response."""

from __future__ import annotations

from copy import copy
from http.client import HTTPResponse
from time import sleep
from typing import Any, Final

import requests
import urllib3
from requests import exceptions
from requests.adapters import BaseAdapter
from requests.structures import CaseInsensitiveDict
from requests.utils import rewind_body

from .attempts import UNENDED, Call, give_key

RETRIED: Final = (requests.ConnectionError, requests.Timeout, exceptions.ChunkedEncodingError)
"""The other errors of requests are mistakes in the request, and come again."""

ONCE: Final = "Pass a body that can be sent again: bytes, str, form fields, or a file that can seek."


class IdempotentSession(requests.Session):
    """A :class:`requests.Session` whose POST and PATCH calls may safely be sent again, and are.

    Every such call gets a key. One that you give in the header is kept; with it, PUT, DELETE and other
    calls are also sent again.

    After the last attempt its response is returned, whatever its status, or its error raised. The
    ``request.headers`` of either have the key.

    Attributes, beside those of every session:

    - ``deadline``, 90: seconds for all attempts and waits of a request.
    - ``timeout``, 10: seconds that each attempt may wait for a connection, and then for each piece of
      the response; a call's own ``timeout`` wins.
    - ``header``: the server's ``IDEMPOTENCY_HEADER``.

    A call raises ``ValueError`` for an empty key, and ``UnrewindableBodyError`` for a body that is no
    bytes, str, form fields or seekable file; then nothing was sent.
    """

    deadline: float = 90
    timeout: float | tuple[float, float] = 10
    header = "Idempotency-Key"
    __attrs__ = (*requests.Session.__attrs__, "deadline", "timeout", "header")  # copied and pickled

    def prepare_request(self, request: requests.Request) -> requests.PreparedRequest:
        """Prepare a request: ``auth`` signs it with its key."""
        request = copy(request)
        given = {**self.headers, **request.headers}  # names may be bytes
        names = {name: name.decode() if isinstance(name, bytes) else name for name in given}
        request.headers = CaseInsensitiveDict({names[name]: given[name] for name in given})
        give_key(self.header, request.method.upper(), request.headers)
        return super().prepare_request(request)

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        """Send a prepared request, with a key if it needs one. Sent twice, it is one operation."""
        kwargs["timeout"] = kwargs.get("timeout") or self.timeout
        give_key(self.header, request.method, request.headers)
        return super().send(request, **kwargs)

    def get_adapter(self, url: str) -> BaseAdapter:
        """The adapter that is mounted for a URL, wrapped."""
        return _Adapter(super().get_adapter(url), self)


class _Adapter(BaseAdapter):
    """Sends each attempt through the adapter that it wraps."""

    def __init__(self, wrapped: BaseAdapter, session: IdempotentSession) -> None:
        self._wrapped, self._session = wrapped, session

    def send(self, request: Any, stream: bool = False, timeout: Any = None, **how: Any) -> Any:  # type: ignore[override]
        if self._session.header not in request.headers:
            return self._wrapped.send(request, stream=stream, timeout=timeout, **how)
        call = Call(request, self._session.deadline, RETRIED)
        while True:
            _rewind(request)
            with call:
                limits = _within(call.left(), timeout)
                call.response = self._wrapped.send(request, stream=stream, timeout=limits, **how)
                _read(call, stream)
            if call.pause is None:
                call.response.connection = self  # digest sends through it
                return call.response
            sleep(call.pause)


def _rewind(request: Any) -> None:
    """Let a file be sent from where it stood. Raises before the first attempt if that cannot be.

    Any other iterable is refused: one that gives out a stored iterator would be empty the second time.
    """
    if not isinstance(request.body, bytes | str | None):
        try:
            rewind_body(request)
        except exceptions.UnrewindableBodyError as error:
            raise exceptions.UnrewindableBodyError(ONCE, request=request) from error


def _within(left: float, given: Any) -> Any:
    """The time limits of an attempt that may take ``left`` seconds."""
    connect, read = given if isinstance(given, tuple) else (given, given)
    if None not in (connect, read) and connect + read <= left:
        return given  # a mock compares it
    return urllib3.Timeout(connect=connect, read=read, total=left)


def _read(call: Call, stream: bool) -> None:
    """Read the body, but not a success that the caller streams.

    Raises ``ConnectionError`` if the response may have broken off, or is an interim one (1xx), behind
    which http.client does not find the real one.
    """
    response = call.response
    # A mock or a cache has a file of its own here, and need not say where it ends.
    is_http_1 = isinstance(getattr(response.raw, "_fp", None), HTTPResponse)
    if response.status_code < 200 or (is_http_1 and not call.has_told_its_end()):
        response.close()
        raise requests.ConnectionError(UNENDED)
    if not (stream and response.ok):
        response.content  # noqa: B018 -- reads it
