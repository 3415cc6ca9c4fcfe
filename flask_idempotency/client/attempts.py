"""The attempts of one call: which outcome is final, and how long to wait before the next attempt."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Mapping, MutableMapping
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from random import random
from time import monotonic
from typing import Any, Final
from urllib.parse import urlsplit

from flask_idempotency.core.errors import OperationFailed, RequestInProgress
from flask_idempotency.core.logs import Log
from flask_idempotency.core.records import REPLAYED

from .keys import new_key

log = Log("flask_idempotency.client")

LONGEST: Final = 10.0
"""Seconds. The longest wait that is not the server's wish."""

UNENDED: Final = "The response broke off, or has neither a Content-Length nor chunks."


def give_key(header: str, method: str | None, headers: MutableMapping[str, str]) -> bool:
    """Give a POST or PATCH a key. Returns whether there is one, so that it may be sent again.

    A key of the caller's is kept. Raises ``ValueError`` if it is empty: no server takes it for one.
    """
    if method in {"POST", "PATCH"}:
        headers.setdefault(header, new_key())
    if header in headers and not str(headers[header] or "").strip():
        raise ValueError(f"The header {header} is empty; allowed: a key, or no such header")
    return header in headers


class Call:
    """One request, which is sent until its outcome is final or its time is over.

    Each attempt is a ``with`` block that puts its response here, and raises an error only if that is
    final. ``pause`` is then the seconds until the next attempt, or None if the response is final.

    :param request: of requests or httpx; every error of an attempt has it, and so the key.
    :param deadline: seconds for all attempts and waits.
    :param retried: the errors after which another attempt may help.
    """

    response: Any
    """Of requests or httpx; the body has been read, at least that of an error."""

    def __init__(self, request: Any, deadline: float, retried: tuple[type[Exception], ...]) -> None:
        self.pause: float | None = None
        self._request = request
        self._retried = retried
        self._began, self._deadline = monotonic(), deadline
        self._made = 0

    def left(self) -> float:
        """Seconds until the deadline; never 0, which is no valid time limit."""
        return max(self._began + self._deadline - monotonic(), 0.001)

    def has_told_its_end(self) -> bool:
        """Return True if a response of HTTP/1 says where it ends (RFC 9112 section 6.3).

        One that ends with its connection may have broken off, in its headers or its body.
        """
        headers = self.response.headers
        has_no_body = self._request.method == "HEAD" or self.response.status_code in {204, 205, 304}
        length = re.fullmatch(r"([0-9]+)(\s*,\s*\1)*", headers.get("Content-Length", "").strip())
        chunks = re.search(r"\bchunked\b", headers.get("Transfer-Encoding", "").lower())
        return bool(has_no_body or length or chunks)

    def __enter__(self) -> None:
        self._made += 1

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if error is None:
            self.response.elapsed = timedelta(seconds=monotonic() - self._began)
            self.pause = self._pause_after_response()
        else:
            error.request = self._request  # type: ignore[attr-defined]
            is_final = not isinstance(error, self._retried) or _is_permanent(error)
            # Its text may hold the whole URL.
            self.pause = None if is_final else self._pause(type(error).__name__, {}, running=False)
        return self.pause is not None

    def _pause_after_response(self) -> float | None:
        status, headers = self.response.status_code, self.response.headers
        problem = _problem(self.response.content) if status >= 400 else ""
        running = status == RequestInProgress.status and problem == RequestInProgress.type
        # A 500, too: an atomic operation that failed was rolled back. A stored one never changes.
        failed = status >= 500 and problem != OperationFailed.type
        stored = headers.get(REPLAYED, "").lower() == "true"
        again = not stored and (running or failed or status in {408, 425, 429})
        return self._pause(str(status), headers, running=running) if again else None

    def _pause(self, failure: str, headers: Mapping[str, str], *, running: bool) -> float | None:
        seconds = random() * min(LONGEST, 2.0 ** min(self._made - 1, 99))  # noqa: S311 -- no secret
        left = self._began + self._deadline - monotonic()
        if running:  # Retry-After is the rest of its lease, but it may end at any moment before
            left /= 2  # leaves as much time to ask once more
            seconds = max(min(seconds, left), 0.5)
        else:
            seconds = max(seconds, _retry_after(headers))
        if seconds > left:
            return None
        url = urlsplit(str(self._request.url))
        where = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"  # without its secrets
        how = self._request.method, where, self._made, failure, seconds
        log.info("%s %s: attempt %d failed with %s; the next one begins in %.2f s", *how)
        return seconds


def _problem(body: bytes) -> str:
    """The last part of a problem's type (RFC 9457), such as ``request-in-progress``, or ``""``."""
    try:
        return re.split("[:/#]", json.loads(body)["type"])[-1]
    except (ValueError, TypeError, LookupError, RecursionError):
        return ""


def _retry_after(headers: Mapping[str, str]) -> float:
    """The seconds that ``Retry-After`` asks for (RFC 9110 section 10.2.3); 0 if it asks for nothing.

    A date is compared with the response's own ``Date``, so that the clock of this machine may be wrong.
    """
    value = headers.get("Retry-After", "").strip()
    if re.fullmatch("[0-9]+", value):
        return float(value)  # of very many digits, infinity
    try:
        date = headers.get("Date")
        now = parsedate_to_datetime(date) if date else datetime.now(timezone.utc)
        return (parsedate_to_datetime(value) - now).total_seconds()
    except (TypeError, ValueError, OverflowError):
        return 0


def _is_permanent(error: BaseException | None) -> bool:
    """Return True if a certificate is not trusted, which may be the cause of what is raised."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False
