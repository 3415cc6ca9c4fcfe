"""What a response tells its caller, in whichever library."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Final, Protocol

from flask_idempotency.core.storable import REPLAYED

LATE: Final = "The response was still coming at the call's deadline."
NO_END: Final = (
    "The response broke off in its headers, or the server does not say where it ends:"
    " by a Content-Length, chunks, or Connection: close and a body."
)
INTERIM: Final = (
    "The server sent an interim response (1xx); Python's HTTP client cannot skip it to the real one."
)


class HasContent(Protocol):
    """A response of requests, httpx or another client, whose body has been read."""

    @property
    def headers(self) -> Mapping[str, str]:
        """By name, in upper or lower case."""

    @property
    def content(self) -> bytes:
        """The body, decoded."""


class HasHeaders(Protocol):
    """A response of requests, httpx or another client."""

    @property
    def headers(self) -> Mapping[str, str]:
        """By name, in upper or lower case."""


def was_replayed(response: HasHeaders) -> bool:
    """Return True if the response is the stored one of an earlier attempt.

    :param response: what requests or httpx gave.
    """
    return is_replay(response.headers)


def is_replay(headers: Mapping[str, str]) -> bool:
    """Return True if a response with these headers is a stored one."""
    return headers.get(REPLAYED, "").lower() == "true"


def tells_its_end(status: int, headers: Mapping[str, str], *, method: str | None, empty: bool) -> bool:
    """Return True if an HTTP/1.1 response says where it ends (RFC 9112 sections 6.3 and 9.6).

    One that does not cannot be told from one that broke off in its headers. A server that ends a body
    by closing the connection must say so in ``Connection``, and has no reason to if the body is empty.

    :param method: the request's.
    :param empty: whether no body came.
    """
    if method == "HEAD" or status in {204, 205, 304}:
        return True
    if "chunked" in _items(headers, "Transfer-Encoding"):
        return True
    lengths = set(_items(headers, "Content-Length"))
    if len(lengths) == 1 and re.fullmatch("[0-9]+", lengths.pop()):
        return True
    return not empty and "close" in _items(headers, "Connection")


def _items(headers: Mapping[str, str], name: str) -> list[str]:
    return re.split(r"\s*,\s*", headers.get(name, "").strip().lower())


def retry_after(headers: Mapping[str, str]) -> float:
    """The seconds that ``Retry-After`` asks for (RFC 9110 section 10.2.3); 0 if it asks for nothing.

    A date is compared with the response's own ``Date``, so that the clock of this machine may be wrong.
    """
    value = headers.get("Retry-After", "").strip()
    if re.fullmatch("[0-9]+", value):
        return float(value)  # of very many digits, infinity
    at = _date(value)
    if at is None:
        return 0.0
    now = _date(headers.get("Date", "")) or datetime.now(timezone.utc)
    return max((at - now).total_seconds(), 0.0)


def _date(text: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(text)
    except (TypeError, ValueError, OverflowError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=timezone.utc)


def problem_of(response: HasContent) -> str:
    """The problem that a response names (RFC 9457), such as ``key-expired``; ``""`` if none.

    It is the last part of the problem's ``type``; the server's page of responses lists them.

    :param response: what requests or httpx gave.
    """
    return problem_type(response.headers, response.content)


def problem_type(headers: Mapping[str, str], body: bytes) -> str:
    """The last part of a problem's type (RFC 9457), such as ``request-in-progress``, or ``""``."""
    media_type = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        return ""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    kind = document.get("type") if isinstance(document, dict) else None
    return re.split("[:/#]", kind)[-1] if isinstance(kind, str) else ""
