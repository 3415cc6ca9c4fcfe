"""When a call is sent again, and how long it waits before: the rules of both HTTP libraries."""

from __future__ import annotations

import json
import math
import random
import re
import ssl
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, Final, Protocol, TypeAlias

from flask_idempotency.core.errors import OperationFailed, RequestInProgress

from .keys import new_key

NEED_KEY: Final = frozenset({"POST", "PATCH"})
"""Methods that get a key. PUT and DELETE are safe to repeat as HTTP defines them."""

TRANSIENT: Final = frozenset({408, 425, 429})
"""Below 500, the responses that say "not now"."""

LAST: Final = 1.0
"""Seconds. What a call that waits for its first attempt keeps of its time, to ask once more."""

SHORTEST: Final = 0.001
"""Seconds. A time limit of 0 would be rejected; an attempt that may still begin fails at once."""


class HasHeaders(Protocol):
    """A response of requests, httpx or another client."""

    @property
    def headers(self) -> Mapping[str, str]:
        """By name, in upper or lower case."""


def was_replayed(response: HasHeaders, header: str = "Idempotent-Replayed") -> bool:
    """Whether the response is the stored one of an earlier attempt.

    :param response: what requests or httpx gave.
    :param header: the server's ``IDEMPOTENCY_REPLAYED_HEADER``.
    """
    return response.headers.get(header, "").lower() == "true"


def _chance() -> float:
    # Pickled by its name. random.random takes its state along: all copies would draw the same numbers.
    return random.random()  # noqa: S311 -- no secret


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """When a call with a key is sent again. All times are in seconds.

    The wait before the next attempt is random between 0 and ``backoff``, doubled with every failure up
    to ``backoff_max`` ("full jitter": clients that failed together do not come back together). It is
    never shorter than the server's ``Retry-After``; except after a 409 ``request-in-progress``, where
    that is no use: the first attempt may end at any moment before.

    :param retries: the most attempts after the first. They are counted anew for a redirect.
    :param deadline: for the whole call, with its redirects. No attempt begins after it, and a wait that
        would end after it is not begun: the call then ends with what it has. The wait after a 409
        ``request-in-progress`` is shortened, so that the call asks once more.
    :param backoff: the longest wait after the first failure.
    :param backoff_max: the longest wait of its own choice after any failure.
    :param header: the server's ``IDEMPOTENCY_HEADER``.
    :param replayed_header: the server's ``IDEMPOTENCY_REPLAYED_HEADER``.
    :param sleep: waits; a test gives another.
    :param clock: seconds that only grow; a test gives another.
    :param random: between 0 and 1; a test gives another.
    :raises ValueError: for a value outside of its range.
    :raises TypeError: for a value of another type.
    """

    retries: int = 20
    deadline: float = 60
    backoff: float = 0.5
    backoff_max: float = 10
    header: str = "Idempotency-Key"
    replayed_header: str = "Idempotent-Replayed"
    sleep: Callable[[float], object] = time.sleep
    clock: Callable[[], float] = time.monotonic
    random: Callable[[], float] = _chance

    def __post_init__(self) -> None:
        for name, (kinds, in_range, allowed) in _ALLOWED.items():
            value = getattr(self, name)
            right = isinstance(value, kinds) and not isinstance(value, bool)
            if not right or not in_range(value):
                error = ValueError if right else TypeError
                raise error(f"{name} is {value!r}; allowed: {allowed}")

    def give_key(self, method: str | None, headers: MutableMapping[str, str]) -> bool:
        """Give the request a key if it needs one and has none. Returns whether it has one now."""
        if method in NEED_KEY:
            headers.setdefault(self.header, new_key())
        return self.header in headers

    def is_final(self, status: int, headers: Mapping[str, str], body: bytes) -> bool:
        """Whether the same request would get no better response. ``body`` is decoded.

        A server error, even a 500, is worth another attempt, because an atomic operation that failed
        was rolled back; but not a stored one, which never changes.
        """
        if headers.get(self.replayed_header, "").lower() == "true":
            return True
        if status == RequestInProgress.status:
            return problem_type(headers, body) != RequestInProgress.type
        if status >= 500:
            return problem_type(headers, body) == OperationFailed.type
        return status not in TRANSIENT


_Rule: TypeAlias = tuple[tuple[type, ...], Callable[[Any], bool], str]

_NUMBER: Final = (int, float)
_SECONDS: Final[_Rule] = _NUMBER, lambda value: 0 <= value < math.inf, "a number of seconds, 0 or more"
_HEADER: Final[_Rule] = (
    (str,),
    lambda value: re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", value, re.ASCII) is not None,  # RFC 9110, 5.6.2
    "the name of an HTTP header",
)
_CALLABLE: Final[_Rule] = ((Callable,), lambda _value: True, "a callable")  # type: ignore[assignment]

_ALLOWED: Final[Mapping[str, _Rule]] = {
    "retries": ((int,), lambda value: value >= 0, "a whole number, 0 or more"),
    "deadline": (_NUMBER, lambda value: 0 < value < math.inf, "a number of seconds above 0"),
    "backoff": _SECONDS,
    "backoff_max": _SECONDS,
    "header": _HEADER,
    "replayed_header": _HEADER,
    "sleep": _CALLABLE,
    "clock": _CALLABLE,
    "random": _CALLABLE,
}


class Attempts:
    """The attempts to send one request. They end when their policy says so.

    :param began: when their call did, by the policy's clock; now, if left out.
    """

    def __init__(self, policy: RetryPolicy, began: float | None = None) -> None:
        self._policy = policy
        self.began = policy.clock() if began is None else began
        self._ends = self.began + policy.deadline
        self._made = 0

    def begin(self) -> float:
        """Begin the next attempt. Returns the seconds that it may take."""
        self._made += 1
        return max(self._ends - self._policy.clock(), SHORTEST)

    def after_error(self, error: BaseException) -> float | None:
        """Seconds until the next attempt, or None if this error is the last."""
        return None if _is_about_a_certificate(error) else self._wait(0, {})

    def after_response(self, status: int, headers: Mapping[str, str], body: bytes) -> float | None:
        """Seconds until the next attempt, or None if this response is the last. ``body`` is decoded."""
        is_final = self._policy.is_final(status, headers, body)
        return None if is_final else self._wait(status, headers)

    def _wait(self, status: int, headers: Mapping[str, str]) -> float | None:
        policy = self._policy
        if self._made > policy.retries:
            return None
        longest = min(policy.backoff_max, policy.backoff * 2.0 ** min(self._made - 1, 99))
        seconds, left = policy.random() * longest, self._ends - policy.clock()
        if status == RequestInProgress.status:  # no other of this status is not final
            # Retry-After is how long it may take: the rest of a lease, or a guess.
            return min(seconds, left - LAST) if left > LAST else None
        seconds = max(seconds, retry_after(headers))
        return seconds if seconds < left else None


def _is_about_a_certificate(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__context__
    return error is not None


def retry_after(headers: Mapping[str, str]) -> float:
    """The seconds that ``Retry-After`` asks for (RFC 9110 section 10.2.3); 0 if it asks for nothing.

    A date is compared with the response's own ``Date``, so that the clock of this machine may be wrong.
    """
    value = headers.get("Retry-After", "").strip()
    if re.fullmatch("[0-9]{1,9}", value):
        return float(value)
    at = _date(value)
    if at is None:
        return 0.0
    now = _date(headers.get("Date", "")) or datetime.now(timezone.utc)
    return max((at - now).total_seconds(), 0.0)


def _date(text: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=timezone.utc)


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
