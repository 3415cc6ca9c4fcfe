"""Signals (blinker). The sender is the application; ``event`` is one frozen :class:`Event`.

One object instead of many arguments: a field that is added later breaks no receiver.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from blinker import Namespace

log = logging.getLogger("flask_idempotency")


@dataclass(frozen=True)
class Event:
    """What happened to an operation.

    ``name`` is the operation's (``""`` where none is concerned, as when Redis fails); ``attempt`` is
    None where none was made; ``seconds`` is how long the view ran; ``problem`` is the problem's type,
    such as ``"key-reused"``; ``error`` is what failed.
    """

    name: str
    attempt: int | None = None
    status: int | None = None
    seconds: float | None = None
    problem: str | None = None
    error: BaseException | None = None


_signals = Namespace()

operation_executed = _signals.signal("operation-executed", "A view ran; its response was committed.")
operation_replayed = _signals.signal("operation-replayed", "A stored response was replayed.")
operation_rejected = _signals.signal("operation-rejected", "A request was rejected with a problem.")
operation_taken_over = _signals.signal(
    "operation-taken-over", "An operation that was begun but not finished is being run again."
)
operation_interrupted = _signals.signal(
    "operation-interrupted", "An operation that is not atomic was begun and never ended."
)
store_failed = _signals.signal("store-failed", "Redis or Postgres did not do what was asked.")


def send(signal: Any, app: Any, event: Event) -> None:
    """Send ``event`` if anybody listens. A receiver that fails is logged: the response stands."""
    if signal.receivers:
        try:
            signal.send(app, event=event)
        except Exception:
            log.exception("a receiver of %s failed", signal.name)
