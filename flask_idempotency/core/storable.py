"""Which responses are stored, and which of their headers; what an error of the view means."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from .errors import ConfigurationError, Problem, RecordBroken, Retryable, TransactionConflict
from .records import Headers

NOT_STORED = frozenset({401, 403, 408, 425, 429})
"""Responses about the caller or the moment, not about the operation: a retry may fare better."""

REPLAYED = "Idempotent-Replayed"
"""The response header that marks a replay, with the value ``true``: the name that clients of other
payment APIs know."""

TRACEPARENT = "flask-idempotency-traceparent"
"""The name of the stored line that says, as a W3C ``traceparent``, which trace the view ran in."""

NEVER_STORED = frozenset(
    {
        "set-cookie",  # would hand a visitor's session to whoever retries
        "date",
        "server",
        # Hop by hop, RFC 9110 section 7.6.1: true of one connection only.
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        TRACEPARENT,
        REPLAYED.lower(),
        # Follows from the body, and would be wrong in a replay to HEAD or behind another server.
        "content-length",
    }
)
"""Header names, in lower case, that say nothing about the operation."""

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110 section 5.6.2
# RFC 9110 section 5.5: a line break would begin another header.
_VALUE = re.compile(r"[\t -~\x80-\xff]*")

POINTERS = frozenset({"location", "content-location", "link"})
"""The headers that still say where the result is if the body was too large to store."""

INTERRUPTING = frozenset(
    {
        "billiard.exceptions.SoftTimeLimitExceeded",  # Celery
        "rq.timeouts.JobTimeoutException",
        "rq.exceptions.ShutDownImminentException",  # an Exception before RQ 3
        "huey.exceptions.TaskTimeout",
    }
)
"""What queues raise in the middle of a job: nobody knows whether its effect happened. Those that no
``except Exception`` catches need not be here: dramatiq's, asyncio's, ``SystemExit``."""

RELEASING = {
    "celery.exceptions.Retry": None,
    "celery.exceptions.Reject": "requeue",
    "dramatiq.errors.Retry": None,
    "huey.exceptions.RetryTask": None,
    "huey.exceptions.CancelExecution": "retry",
    "arq.worker.Retry": None,
}
"""What a job raises to be run again by its queue, if the attribute (where one is named) is true."""


_UNDONE = (Retryable, TransactionConflict)
"""The view, or the database of a step, says with these that the operation may be tried again."""

_NOT_THE_OPERATIONS = (Problem, ConfigurationError, RecordBroken)
"""Errors that say nothing about the operation's effect: they interrupt it, and do not fail it."""


def outcome_after(error: Exception) -> Literal["interrupted", "released"] | None:
    """Say what becomes of an operation that is not atomic if its view raises ``error``.

    ``"released"``: it may run again. ``"interrupted"``: nobody knows whether its effect happened, or
    somebody has to repair the set-up first. None: the response to ``error`` is stored.
    """
    # By name: no queue need be installed.
    names = [f"{each.__module__}.{each.__qualname__}" for each in type(error).__mro__]
    if not INTERRUPTING.isdisjoint(names):
        return "interrupted"
    flags = (RELEASING[name] for name in names if name in RELEASING)
    if isinstance(error, _UNDONE) or any(flag is None or getattr(error, flag, False) for flag in flags):
        return "released"
    return "interrupted" if isinstance(error, _NOT_THE_OPERATIONS) else None


def is_stored_by_default(status: int, atomic: bool = True) -> bool:
    """Return True if a response of this status is stored (and its writes committed) by default."""
    return status not in NOT_STORED if status < 500 else not atomic


def storable(headers: Iterable[tuple[str, str]]) -> Headers:
    """The headers that may be stored, and that may be sent if somebody else stored them.

    All but :data:`NEVER_STORED`, what ``Connection`` names (also hop by hop), and what no HTTP message
    can carry.
    """
    lines, never = [], NEVER_STORED
    for name, value in headers:
        if name.lower() == "connection":
            never = never.union(map(str.strip, value.lower().split(",")))
        elif _NAME.fullmatch(name) and _VALUE.fullmatch(value):
            lines.append((name, value))
    return tuple([line for line in lines if line[0].lower() not in never])
