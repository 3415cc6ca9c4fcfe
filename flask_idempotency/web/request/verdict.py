"""What a request gets for an operation that is not its to run: said once, enforced and observed."""

from __future__ import annotations

import math

from flask_idempotency.core.engine import Gone, InProgress, Interrupted, Mismatch, Replay, Settled
from flask_idempotency.core.errors import (
    LeaseLost,
    OperationFailed,
    OperationInterrupted,
    ReplayForbidden,
    RequestInProgress,
)
from flask_idempotency.core.machine import assert_never
from flask_idempotency.core.records import Claim
from flask_idempotency.session.operation import Operation
from flask_idempotency.web.setup.options import Route

_SPENT = "The operation was begun too often without success; an operator must decide."


def replayed(
    settled: Settled, route: Route, operation: Operation, claim: Claim, typical_seconds: float
) -> Replay:
    """Return the replay that the request gets. Raises the :class:`Problem` that it gets otherwise.

    ``typical_seconds`` are how long the operation takes, where its record does not say.
    """
    match settled:
        case Replay(_, attempt):
            operation.attempt = attempt
            if route.authorize_replay and not route.authorize_replay(operation):
                raise ReplayForbidden
            return settled
        case Mismatch():
            raise route.reused()
        case InProgress(seconds):
            if seconds is None:  # Redis knows no leases, only young requests
                seconds = claim.lease_seconds
            left = typical_seconds if seconds is None else seconds
            # RFC 9110 section 10.2.3 knows no fractions.
            raise RequestInProgress(retry_after=max(1, math.ceil(left)))
        case Interrupted(is_spent=False) if route.on_interrupted == "fail":  # who enforces, stores that
            raise OperationFailed
        case Interrupted(is_spent):
            raise OperationInterrupted(_SPENT if is_spent or route.atomic else None)
        case Gone():
            raise LeaseLost("The record to resume has expired or was taken over; nothing was done.")
        case impossible:
            assert_never(impossible)
