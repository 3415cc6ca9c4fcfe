"""Which responses are stored, and which of their headers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from .records import Headers

NOT_KEPT = frozenset({401, 403, 408, 425, 429})
"""Answers about the caller or the moment, not about the operation: a retry may fare better."""

REASON = "flask-idempotency-reason"
"""The name of the line that holds a reason phrase of the view's own. It is sent in the status line."""

NEVER_STORED = frozenset(
    {
        "set-cookie",  # would hand one visitor's session to whoever retries
        "set-cookie2",
        "date",
        "server",
        # Hop by hop, RFC 9110 section 7.6.1: true of one connection only.
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authentication-info",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        REASON,
        # Follows from the body, and would be wrong for a replay to a HEAD or a changed server.
        "content-length",
    }
)
"""Header names, in lower case, that say nothing about the operation."""

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110 section 5.6.2
_VALUE = re.compile(
    r"[\t -~\x80-\xff]*"
)  # RFC 9110 section 5.5: a line break would begin another header

POINTERS = frozenset({"location", "content-location", "link"})
"""The headers that still say where the result is, when the body was too large to keep."""


INTERRUPTING = frozenset(
    {
        "billiard.exceptions.SoftTimeLimitExceeded",  # Celery
        "rq.timeouts.JobTimeoutException",
        "rq.exceptions.ShutDownImminentException",  # an Exception before RQ 3
        "huey.exceptions.TaskTimeout",
    }
)
"""What queues raise in the middle of a job: nobody knows whether its effect happened. (Those that no
``except Exception`` catches need not be here: dramatiq's, asyncio's, ``SystemExit``.)"""

RELEASING = {
    "celery.exceptions.Retry": None,
    "celery.exceptions.Reject": "requeue",
    "dramatiq.errors.Retry": None,
    "huey.exceptions.RetryTask": None,
    "huey.exceptions.CancelExecution": "retry",
    "arq.worker.Retry": None,
}
"""What a job raises that asks its queue to be run again; of some, only if this attribute is true."""


def interrupts(error: BaseException) -> bool:
    """Whether a queue has stopped the job by ``error``."""
    return not INTERRUPTING.isdisjoint(_names(error))


def releases(error: BaseException) -> bool:
    """Whether the job has asked its queue by ``error`` to be run again."""
    flags = (RELEASING[name] for name in _names(error) if name in RELEASING)
    return any(flag is None or getattr(error, flag, False) for flag in flags)


def _names(error: BaseException) -> list[str]:
    """The names of its classes: no queue need be installed."""
    return [f"{each.__module__}.{each.__qualname__}" for each in type(error).__mro__]


def is_kept(status: int) -> bool:
    """Whether an answer of this status is kept (and its writes committed) by default."""
    return status < 500 and status not in NOT_KEPT


def storable(headers: Iterable[tuple[str, str]], unstored: Collection[str]) -> Headers:
    """The headers that may be stored, and be sent when somebody else may have stored them.

    All but :data:`NEVER_STORED`, ``unstored`` (lower case), what ``Connection`` names (that is hop by
    hop, too), and what no HTTP message can carry.
    """
    lines = [(name.lower(), name, value) for name, value in headers]
    hops = [value.lower().split(",") for lower, _, value in lines if lower == "connection"]
    named = {option.strip() for options in hops for option in options}
    return tuple(
        (name, value)
        for lower, name, value in lines
        if lower not in NEVER_STORED
        and lower not in unstored
        and lower not in named
        and _NAME.fullmatch(name)
        and _VALUE.fullmatch(value)
    )


def reason_in(headers: Headers) -> str:
    """The reason phrase of the view's own among stored headers; an empty text without one."""
    return next((text for name, text in headers if name == REASON and _VALUE.fullmatch(text)), "")
