"""``assert_idempotent_call``: what a queue may do with one message, tried on its consumer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import Context, ContextVar
from dataclasses import dataclass
from typing import Any

from flask import Flask

from flask_idempotency.core.engine import (
    Decision,
    DecisionEngine,
    Execution,
    InProgress,
    Mismatch,
    Replay,
)
from flask_idempotency.core.errors import OperationInterrupted

from .crashes import CrashPoint, armed
from .effects import Effects
from .procedure import TIMEOUT_SECONDS, Check
from .watch import ports

__tracebackhide__ = True  # pytest shows the test's line and the message, not what is in between

UNKNOWN = (
    "Does it call idempotency.run(...), and in its own thread? Is IDEMPOTENCY_ENABLED left as it is?"
)
USED = (
    "Its key was used before, so there is nothing to find out. Give each test, and each block of"
    " every_crash(), a message of its own."
)
OTHER_KEY = (
    "It was another operation, so its key was another. Make the key from what the message is about,"
    " such as an order's number, and not from what is new in each delivery: a random number, a time,"
    " the job's identifier. The same holds for scope=... and name=..."
)
SAME_KEY = (
    "Whoever shares a key gets another message's result, and nothing is done. Let key=... and scope=..."
    " name what the message is about, and give other=... a message that was never delivered."
)
OTHER_PAYLOAD = "Let payload=... depend on what the message says, and not on when it is delivered."
REMADE = "run() returns the stored result to each delivery. Return that, or what follows from it alone."
ALIKE = (
    "A producer's mistake would pass for a retry. Give run() what the message says, payload=..., and"
    " let the changed call have the same key."
)
SWALLOWED = (
    "To most queues, a call that returns is done: if the first delivery dies now, nobody delivers the"
    " message again. Let RequestInProgress out, or raise what makes your queue deliver it again. If"
    " the call acknowledges its messages itself, pass acknowledged=..., which counts that."
)
HELD = (
    "An operation with on_interrupted='hold' waits for an operator: pass raises=OperationInterrupted."
    " Or declare that it may run again: on_interrupted='retry'."
)
TOO_EARLY = (
    "If the worker dies now, nobody delivers the message again, and its work is lost. Acknowledge it"
    " when run() has returned."
)
TOO_RARELY = (
    "The queue will deliver it again and again. Acknowledge a message whenever run() has returned,"
    " also if it returned a stored result."
)


def assert_idempotent_call(
    app: Flask,
    call: Callable[[], Any],
    *,
    effects: Effects | None = None,
    changed: Callable[[], Any] | None = None,
    other: Callable[[], Any] | None = None,
    raises: type[Exception] | None = None,
    duplicates: int = 3,
    acknowledged: Callable[[], int] | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> Any:
    """Deliver one message in all the ways in which a queue may, and assert one effect and one result.

    As :func:`assert_idempotent` for what is no request: ``call`` consumes one message by
    ``idempotency.run``, as a Celery task, an RQ job's function or a webhook's consumer does. It is
    called once, by ``duplicates`` other threads while the first is still in its function, and once
    more; each time in an application context of its own. In a block of :func:`crash_at` or
    :func:`every_crash` a call dies before all these.

    * ``call`` takes no arguments, and uses the same key each time: ``lambda: invoice("alice", 7)``.
    * ``effects``, ``duplicates`` and ``timeout`` are as for :func:`assert_idempotent`.
    * ``changed`` is as ``call``, with the same key and another payload: it must be rejected.
    * ``other`` consumes another message, with a key of its own: it must run, and have an effect of its
      own. It also shows what a whole run does, where the dead attempt and its retry did a part each.
    * ``raises`` is what the call raises in the end, such as ``OperationInterrupted``: an effect may
      then be missing.
    * ``acknowledged`` is for a call that acknowledges its messages itself. It counts how often that has
      happened so far: never before the commit, and always for a retry. Without it, returning
      acknowledges a message, so a duplicate beside a running call must raise.

    Returns what the first call returned. Raises ``AssertionError``, which says what differs and where
    to look.
    """
    check = CallCheck(app, call, other, effects, raises, acknowledged, timeout)
    with check.noted():
        return check.run(duplicates, changed)


@dataclass(frozen=True)
class Delivery:
    """What one call returned or raised, and what the engine decided about its operations."""

    result: Any
    error: Exception | None
    decisions: Sequence[Decision]

    def __str__(self) -> str:
        return f"returned {self.result!r}" if self.error is None else f"raised {self.error!r}"

    def met(self, kind: type[Decision]) -> bool:
        """Return True if the engine decided so."""
        return any(isinstance(decision, kind) for decision in self.decisions)


class CallCheck(Check[Delivery]):
    """One operation, a message's."""

    subject = "the first call"
    outside = (
        "A retry repeats what the call does beside run(): move it into the function that run() calls."
    )
    parts = "If the dead call and its retry did a part of it each, other=... shows what the whole is."
    missing = "Does effects() count it, and can it see what is committed? Does the function commit it?"

    def __init__(
        self,
        app: Flask,
        call: Callable[[], Any],
        other: Callable[[], Any] | None,
        effects: Effects | None,
        raises: type[Exception] | None,
        acknowledged: Callable[[], int] | None,
        timeout: float,
    ) -> None:
        name = getattr(call, "__name__", "<partial>")
        super().__init__(app, "the message" if "<" in name else name, effects, timeout)
        self._call, self._other, self._raises, self._acknowledged = call, other, raises, acknowledged
        self._acknowledged_before = acknowledged() if acknowledged else 0
        self._is_early = False

    def noted(self) -> AbstractContextManager[object]:
        """Note what the engine decides about each call."""
        return ports(self.state, self.state.records, self.state.lock, NotingEngine)

    def run(self, duplicates: int, changed: Callable[[], Any] | None) -> Any:
        """See :func:`assert_idempotent_call`."""
        crash = next((crash for crash in reversed(armed) if self.state in crash.targets), None)
        at_least = 0 if self._raises else 1
        who = when = self.subject
        if crash is not None and not crash.happened:
            delivery = self.crash(crash)
            if delivery is not None:  # the function has no such place
                return delivery.result
            if crash.point != "after-commit":
                self.is_unacknowledged(
                    self._acknowledgements() > 0, f"the first call died in {crash!r}"
                )
            who, when = f"after {crash!r} a retry", f"{crash!r} and a retry"
        first, *others = self.send_at_once(duplicates)
        self.is_unacknowledged(self._is_early, "the first call was still in its function")
        self.is_first(first, who, crash)
        for other in others:
            self.is_duplicate(other, first)
        when += f", with {duplicates} duplicates at the same time" if duplicates else ""
        self.effects_are_one(when, at_least, crash)
        self.is_retry(first)
        self.effects_are_one("a retry", at_least)
        with self.another_operation("another message", at_least if self._other else 0):
            self.run_again()
        if changed is not None:
            self.is_rejected(self.sent(changed))
            self.effects_are_one("the same key with another payload", at_least)
            self.is_retry(first)
        if at_least:
            self.something_is_counted(when)
        return first.result

    def send(self, call: Callable[[], Any] | None = None) -> Delivery:
        """Deliver the message once."""

        def deliver() -> Delivery:
            decisions: list[Decision] = []
            _decisions.set(decisions)
            with self.state.app.app_context():
                try:
                    return Delivery((call or self._call)(), None, decisions)
                except Exception as error:
                    return Delivery(None, error, decisions)

        return Context().run(deliver)

    def shown(self, outcome: Delivery) -> str:
        """Show what a call returned or raised."""
        return str(outcome)

    def run_again(self) -> bool:
        """Consume the other message, once."""
        if self._other is None:
            return False
        delivery, self._other = self.sent(self._other), None
        if delivery.error is not None or not delivery.met(Execution):
            self.fail(f"another message {delivery}, and ran no operation of its own", SAME_KEY)
        return True

    def while_held(self) -> None:
        """Note what was acknowledged before the commit; it is told when no thread is in between."""
        self._is_early = self._acknowledgements() > 0

    def is_unacknowledged(self, is_early: bool, when: str) -> None:
        """No message was acknowledged before the commit."""
        if is_early:
            self.fail(f"a message was acknowledged when {when}", TOO_EARLY)

    def is_first(self, first: Delivery, who: str, crash: CrashPoint | None) -> None:
        """The operation ran now, and ended as expected."""
        if not first.decisions:
            self.fail(f"{who} {first}, and ran no operation", UNKNOWN)
        if crash is None and first.met(Replay):
            self.fail(f"{who} {first}: an earlier operation's result", USED)
        if not self._has_ended_well(first):
            expected = self._raises.__name__ if self._raises else "a result"
            hint = HELD if isinstance(first.error, OperationInterrupted) else ""
            self.fail(f"{who} {first}, not {expected}", OTHER_PAYLOAD if first.met(Mismatch) else hint)

    def is_duplicate(self, duplicate: Delivery, first: Delivery) -> None:
        """A duplicate is rejected as in progress, or gets the first result."""
        last = next(reversed(duplicate.decisions), None)  # an earlier run() of the call may be done
        if not isinstance(last, InProgress):
            self.has_the_same(duplicate, first, "a duplicate")
        elif duplicate.error is None and self._acknowledged is None:
            self.fail(f"a duplicate of a running call {duplicate}", SWALLOWED)

    def is_retry(self, first: Delivery) -> None:
        """A retry gets the first result, and its message is acknowledged."""
        before = self._acknowledgements()
        self.has_the_same(self.sent(), first, "a retry")
        if self._acknowledged and not self._raises and self._acknowledgements() == before:
            self.fail("a retry's message was not acknowledged", TOO_RARELY)

    def has_the_same(self, delivery: Delivery, first: Delivery, what: str) -> None:
        """It met the same operation, and ended as the first call did."""
        if not self._raises and not delivery.met(Replay):
            hint = OTHER_KEY if delivery.met(Execution) else UNKNOWN
            hint = OTHER_PAYLOAD if delivery.met(Mismatch) else hint
            self.fail(f"{what} {delivery}, and got no stored result", hint)
        if not self._has_ended_well(delivery) or delivery.result != first.result:
            self.fail(f"{what} {delivery}, but the first call {first}", REMADE)

    def is_rejected(self, changed: Delivery) -> None:
        """The key belongs to another message."""
        if not changed.met(Mismatch):
            self.fail(f"the same key with another payload {changed}, and was not rejected", ALIKE)

    def _has_ended_well(self, delivery: Delivery) -> bool:
        if self._raises is None:
            return delivery.error is None
        return isinstance(delivery.error, self._raises)

    def _acknowledgements(self) -> int:
        return self._acknowledged() - self._acknowledged_before if self._acknowledged else 0


class NotingEngine(DecisionEngine):
    """Notes what it decides, for the call that asked."""

    def decide(self, *args: Any, **options: Any) -> Decision:
        """See :class:`DecisionEngine`."""
        decision = super().decide(*args, **options)
        if (noted := _decisions.get()) is not None:
            noted.append(decision)
        return decision


_decisions: ContextVar[list[Decision] | None] = ContextVar("flask_idempotency_decisions", default=None)
