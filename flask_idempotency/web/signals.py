"""What happens to operations, told to whoever listens: by signals (blinker), and by the log.

The sender of a signal is the application; ``event`` is one frozen :class:`Event`. One object instead of
many arguments: a field that is added later breaks no receiver. While nobody listens, no event is made.

Each request to a protected view has exactly one outcome, and one signal that tells it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from logging import DEBUG, ERROR, INFO
from typing import Any

from blinker import NamedSignal, Namespace
from flask import Flask
from werkzeug.exceptions import RequestEntityTooLarge

from flask_idempotency.core import errors
from flask_idempotency.core.keys import SHOWN
from flask_idempotency.core.logs import log
from flask_idempotency.core.records import Claim

from .routes import AppState


@dataclass(frozen=True)
class Event:
    """What happened to an operation: no key, no scope, nothing of a body. What does not apply is None.

    :param operation: the operation's name, or ``""``.
    :param outcome: what became of the request: ``"executed"``, ``"replayed"``, ``"rejected"``,
        ``"rolled_back"``, ``"released"``, ``"interrupted"``, ``"unprotected"`` or ``"observed"``.
    :param would: the outcome that an observed request would have had, or ``"unknown"``.
    :param problem: the type of the problem that the request got, or would have got, such as
        ``"key-reused"``. Besides: ``"store-unavailable"`` if a view ran unprotected for that reason,
        ``"operation-failed"`` if a view that is not atomic has just failed for good,
        ``"body-too-large"`` for the application's own 413, and ``"record-unreadable"``.
    :param error: what was raised. Its text may hold anything.
    :param attempt: the number of the attempt.
    :param status: that of the response.
    :param first_status: the status of the stored response that an observed request would have got.
    :param seconds: how long the attempt took, or the response if there was none.
    :param steps: the names of the finished steps, if the operation failed.
    :param decided_by: ``"lock"`` if Redis alone rejected a duplicate, otherwise ``"records"``.
    :param id: the record's digits, for ``flask idempotency show``.
    """

    operation: str
    outcome: str | None = None
    would: str | None = None
    problem: str | None = None
    error: BaseException | None = None
    attempt: int | None = None
    status: int | None = None
    first_status: int | None = None
    seconds: float | None = None
    steps: list[str] | None = None
    decided_by: str | None = None
    id: str | None = None


_signals = Namespace()

operation_executed = _signals.signal("operation-executed")
"""A view ran; its response was committed."""

operation_replayed = _signals.signal("operation-replayed")
"""A stored response was replayed."""

operation_rejected = _signals.signal("operation-rejected")
"""A request got a problem, or its view ran and its response was not stored."""

operation_unprotected = _signals.signal("operation-unprotected")
"""A protected view ran without protection."""

operation_observed = _signals.signal("operation-observed")
"""A protected view ran unprotected; what protection would have done is known."""

operation_interrupted = _signals.signal("operation-interrupted")
"""An operation that is not atomic was begun and never ended."""

OUTCOMES = tuple(_signals.values())
"""Each request to a protected view is told by exactly one of these, in an event with an outcome."""

operation_taken_over = _signals.signal("operation-taken-over")
"""An operation that was begun but not finished is being run again."""

store_failed = _signals.signal("store-failed")
"""Redis or Postgres did not do what was asked."""

EVERY_SIGNAL = tuple(_signals.values())
"""The others tell of something on the way."""


class Subject:
    """What the events of a request, or of one operation in it, are about.

    ``began`` is when the protection began with it, by ``time.monotonic()``; 0 if it is not protected.
    ``claim`` is what it asked the records for, ``attempt`` what it got, if it did.
    """

    state: AppState
    name = ""
    began = 0.0
    claim: Claim | None = None
    attempt: int | None = None
    has_outcome = False  # it was told


def _facts(event: Event) -> dict[str, Any]:
    """The fields of ``event``, as a line of the log may have them."""
    facts = {name: value for name, value in vars(event).items() if value is not None}
    if event.error is not None:  # its text may hold what a client sent
        facts["error"] = type(event.error).__name__
    return facts


def _log(signal: NamedSignal, event: Event, level: int) -> None:
    what = event.outcome or signal.name.partition("-")[2]
    if event.would:
        what = f"would have been {event.would.replace('_', ' ')}"
    elif event.outcome == "executed" and event.problem:
        what = "failed"
    facts = _facts(event)
    shown = {**facts, **({"seconds": f"{event.seconds:.3f}"} if event.seconds is not None else {})}
    details = ", ".join(f"{name} {shown[name]}" for name in shown if name not in _IN_TEXT)
    # Error trackers group lines by this text: each outcome is an issue of its own.
    log.log(level, f"operation %s {what}: %s", event.operation, details, extra=facts)  # noqa: G004


_IN_TEXT = ("operation", "outcome", "would")


def send(signal: NamedSignal, app: Flask, event: Event) -> None:
    """Send ``event`` if anybody listens. A receiver that fails is logged: the response stands.

    So do the other receivers, which blinker's own ``send`` would not call any more.
    """
    for receiver in () if signal.is_muted else signal.receivers_for(app):
        try:
            receiver(app, event=event)
        except Exception:
            log.exception("a receiver of %s failed", signal.name)


def event_of(subject: Subject, **facts: Any) -> Event:
    """Make the event of what happens to the present request's operation."""
    facts = {"attempt": subject.attempt, **facts}
    if subject.claim is not None:
        facts["id"] = subject.claim.key.hex()[:SHOWN]
        facts["decided_by"] = "lock" if getattr(facts.get("error"), "by_lock", False) else "records"
    return Event(subject.name, **facts)


def note(signal: NamedSignal, subject: Subject, level: int = INFO, **facts: Any) -> None:
    """Tell what happens to the present request's operation, if anybody listens."""
    is_logged = log.logger.isEnabledFor(level)
    if is_logged or signal.receivers:
        event = event_of(subject, **facts)
        if is_logged:
            _log(signal, event, level)
        send(signal, subject.state.app, event)


def conclude(signal: NamedSignal, subject: Subject, level: int = DEBUG, **facts: Any) -> None:
    """Tell the present request's outcome, unless it has one.

    It is what ``signal`` is named for, unless ``facts`` have another.
    """
    if "error" in facts:
        tell_mistake(subject.state, subject.name, facts["error"])
    if not subject.has_outcome:
        subject.has_outcome = True
        if signal.receivers or log.logger.isEnabledFor(level):
            outcome = signal.name.removeprefix("operation-")
            made = {"seconds": time.monotonic() - subject.began, "outcome": outcome}
            note(signal, subject, level, **{**made, **facts})


def tell_mistake(state: AppState, name: str, error: object) -> None:
    """Log, once for each name, what only the application's authors can mend: a handler may hide it."""
    told = (name, type(error))
    if isinstance(error, errors.IdempotencyError) and not (
        problem_type(error) or told in state.mistakes
    ):
        state.mistakes.add(told)
        log.error("operation %s: %s", name, error)


def problem_type(error: Exception) -> str | None:
    """Return what events call the error that rejects a request; None for one of the application."""
    if isinstance(error, RequestEntityTooLarge):
        return "body-too-large"
    return error.type if isinstance(error, (errors.Problem, errors.RecordBroken)) else None


def reject(subject: Subject, error: Exception, status: int | None = None) -> None:
    """Tell that the present request is rejected with ``error``, and if the store failed, that.

    ``status`` is that of the response if it is not the problem's own.
    """
    if not subject.has_outcome:
        if isinstance(error, errors.StoreUnavailable):
            tell_failure(subject, error)
        elif isinstance(error, errors.OperationInterrupted) and subject.attempt is None:
            note(operation_interrupted, subject, ERROR)
    facts = {"status": status or getattr(error, "status", None), "problem": problem_type(error)}
    level = ERROR if isinstance(error, errors.RecordBroken) else DEBUG
    conclude(operation_rejected, subject, level, error=error, **facts)


def tell_failure(subject: Subject, error: Exception, text: str = "the store is unavailable") -> None:
    """Log that a store failed, and send ``store_failed``. The line says why; no response does."""
    event = event_of(subject, error=error)
    cause = (isinstance(error, errors.StoreUnavailable) and error.__cause__) or error
    log.error(f"operation %s: {text}: %r", event.operation, cause, extra=_facts(event))  # noqa: G004
    send(store_failed, subject.state.app, event)
