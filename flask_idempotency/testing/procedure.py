"""One operation of an application under test: sent many times at once, killed, its effects counted."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from decimal import Decimal
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

from flask import Flask

from flask_idempotency.core.records import Claim
from flask_idempotency.web.routes import AppState, app_state

from .crashes import CAUGHT, GONE_ON, Crash, CrashPoint
from .effects import Counts, Effects, counter, difference
from .watch import Watch, watched

__tracebackhide__ = True  # pytest shows the test's line and the message, not what is in between

T = TypeVar("T")

IN_VIEW_SECONDS = 1.0
"""How long the first request is held back for its duplicates. They are rejected within milliseconds;
on a route with ``wait`` they wait until it goes on."""

UNCOMMITTED = (
    "The retry repeated what the dead attempt had done outside the operation's transaction: a call to"
    " another system, a queued job, a file, a list or a cache in the process; a write through"
    " db.engine, another bind, or a session, a thread or a request of the view's own; a commit in a"
    " view with atomic=False. Write through db.session, in the view's own thread and request; make"
    " calls after the commit (an outbox), or as current_operation.step(...) with a key from"
    " derive_key(...)."
)
UNCOUNTED = (
    "No row was added to or removed from the application's own tables, which are counted where a test"
    " gives no effects=..., so nothing is known of what the operation does. Does the view commit it,"
    " and roll nothing back, in every attempt? What is no row, let a function count:"
    " effects=lambda: {'balance': balance(), 'mails': len(outbox)}. If it does nothing at all, say so:"
    " effects=dict."
)
FOLLOWING = (
    "The worker died right after the commit. What was due after it, such as a function given to"
    " after_commit or call_on_close, is lost, and no retry makes up for it. What must not be lost"
    " belongs in a table, written in the same transaction (an outbox)."
)
HANGING = (
    "It waits for what never comes, or for a lock: a second connection of the view wants what the"
    " operation's own transaction has locked, or the test has a transaction open. If it just needs"
    " longer, pass timeout=... (seconds)."
)
TIMEOUT_SECONDS = 10.0
"""Longer than any view should take, even on a slow machine; not too long for whoever waits for it."""


class Call(Future[T]):
    """A function's result. The thread is a daemon: one that hangs does not keep the process alive."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self._function = function
        threading.Thread(target=self._run, name="assert_idempotent", daemon=True).start()

    def _run(self) -> None:
        try:
            self.set_result(self._function())
        except BaseException as error:
            self.set_exception(error)


class Check(ABC, Generic[T]):
    """One operation, by whichever way it comes in. ``T`` is what comes back from it."""

    subject: str
    outside: str  # why something was done more than once, without a crash
    missing: str  # why it was not done
    parts: str  # what to do if the dead attempt and its retry did a part each

    def __init__(self, app: Flask, name: str, effects: Effects | None, timeout: float) -> None:
        self.state: AppState = app_state(app)
        self._name, self._rows_only, self._timeout = name, effects is None, timeout
        self._counted = counter(self.state, effects)
        self._before = self._counted()
        self._one_run: Counts = {}  # by how much the first request alone has changed each count
        self._by_duplicates: Counts = {}
        self._at_commit: Counts = {}  # what was counted then, if there were duplicates left to end

    @abstractmethod
    def send(self) -> T:
        """Send it once, in a context of its own."""

    @abstractmethod
    def shown(self, outcome: T) -> str:
        """Show what came back, for a message."""

    def explained(self, outcome: T) -> str:  # noqa: ARG002
        """Say what it means that this came back, if it does not say that itself."""
        return ""

    def run_again(self) -> bool:
        """Do the same as another operation. False if it cannot be done."""
        return False

    def sent(self, *what: Any) -> T:
        """Return what comes back from :meth:`send`, if a test can wait that long."""
        return self._result(Call(partial(self.send, *what)))

    def send_at_once(self, duplicates: int) -> list[T]:
        """The first request, and duplicates of it before it commits."""
        start = self._counted()
        outcomes = self._send_during(duplicates) if duplicates else [self.sent()]
        # What the dead attempt has left is part of one run, unless the retry has done it once more.
        left, now = difference(self._before, start), self._counted()
        done = difference(self._by_duplicates, difference(start, now))
        self._one_run = {name: done[name] or left.get(name, 0) for name in done}
        if self._at_commit and self._at_commit != now:  # by the first after it, or by the duplicates?
            self._rehearse()
        return outcomes

    def _send_during(self, duplicates: int) -> list[T]:
        """The duplicates come when the first request's view has returned, before it commits."""
        gate = Gate(self._timeout)
        with watched(self.state, gate):
            try:
                first = Call(self.send)
                first.add_done_callback(lambda _: gate.reached.set())
                if not gate.reached.wait(self._timeout):
                    self._hangs()
                alone = self._counted()
                others = [Call(self.send) for _ in range(duplicates)]
                if wait(others, IN_VIEW_SECONDS).not_done:
                    gate.when_committed = lambda: self._at_commit.update(self._counted())
                self._by_duplicates = difference(alone, self._counted())
                if not first.done():
                    self.while_held()
            finally:
                gate.opened.set()
                if gate.reached.is_set():
                    wait([first], self._timeout)
            return [self._result(call) for call in (first, *others)]

    def _result(self, call: Call[T]) -> T:
        if not wait([call], self._timeout).done:
            self._hangs()
        return call.result()

    def _hangs(self) -> NoReturn:
        self.fail(f"a request has not returned within {self._timeout:g} s", HANGING)

    def while_held(self) -> None:
        """Called while the first is held before its commit, and its duplicates have come."""

    def crash(self, crash: CrashPoint) -> T | None:
        """Send the request that dies. Returns its response if it has passed the last place instead."""
        try:
            with crash.of_an_assertion():
                response = self.sent()
        except Crash as died:
            if died.args != (crash,):
                raise
            if crash.was_caught:
                self.fail(GONE_ON, CAUGHT)
            return None
        if crash.has_passed_the_last_place:
            return response
        if crash.happened:
            self.fail(f"something caught the crash, and {self.subject} {self.shown(response)}", CAUGHT)
        hint = self.explained(response) or crash.not_reached()
        self.fail(f"{self.subject} {self.shown(response)}", hint)

    def effects_are_one(self, when: str, at_least: int, crash: CrashPoint | None = None) -> None:
        """The effects are those of one run. What died at ``crash`` may have left some of them."""
        changed = difference(self._before, self._counted())
        is_known = crash is None or not self._differs(changed) or self._rehearse()
        wrong = self._differs(changed)
        missing = [] if self._rows_only or not at_least else [n for n in changed if not changed[n]]
        if not wrong and not missing:
            return
        hints = []
        if wrong:
            ran = crash is not None and crash.point in ("in-view", "before-commit")
            by_retry = ran and not any(self._by_duplicates.get(name) for name in wrong)
            hints.append(UNCOMMITTED if by_retry else self.outside)
            hints.append("" if is_known else self.parts)
        if missing:
            has_committed = crash is not None and crash.point == "after-commit"
            hints.append(FOLLOWING if has_committed else self.missing)
        found = [_change(name, changed[name], self._one_run.get(name, 0)) for name in wrong]
        found += [f"{name} did not change" for name in missing if name not in wrong]
        self.fail(f"after {when}", " ".join(filter(None, hints)), *found)

    @contextmanager
    def another_operation(self, who: str, at_least: int) -> Iterator[None]:
        """Let what is done in this block have effects of its own; ``who`` does it."""
        start = self._counted()
        yield
        theirs = difference(start, self._counted())
        if at_least and any(self._one_run.values()) and not any(theirs.values()):
            self.fail(f"{who} had no effect of its own", self.missing)
        self._leave_out(theirs)

    def something_is_counted(self, when: str) -> None:
        """The operation has had an effect, as far as rows tell; a test's own function is believed."""
        if self._rows_only and not any(difference(self._before, self._counted()).values()):
            self.fail(f"after {when}, nothing was counted", UNCOUNTED)

    def _differs(self, changed: Counts) -> list[str]:
        return [name for name in changed if not _equal(changed[name], self._one_run.get(name, 0))]

    def _rehearse(self) -> bool:
        """See what one run changes: dead attempt and retry did a half of it each, or the same twice."""
        start = self._counted()
        has_run = self.run_again()
        done = difference(start, self._counted())
        self._leave_out(done)
        if has_run:
            self._one_run = done
        return has_run

    def _leave_out(self, changed: Counts) -> None:
        self._before = {name: self._before.get(name, 0) + changed[name] for name in changed}

    def fail(self, what: str, hint: str, *found: str) -> NoReturn:
        """Raise ``AssertionError`` with what is wrong, and where to look."""
        lines = [f"{self._name}: {what}", *(f"  {line}" for line in found), hint]
        raise AssertionError("\n".join(line for line in lines if line))


def _equal(a: Any, b: Any) -> bool:
    is_rounded = isinstance(a, (float, Decimal))  # two halves may differ from the whole in a last digit
    return bool(a == b) or (is_rounded and math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-9))


def _change(name: str, change: Any, one: Any) -> str:
    """A line of a message; a balance may fall, a count of rows rises."""
    if change > 0 <= one:
        return f"{name} rose by {change}, not by {one}"
    return f"{name} changed by {change:+}, not by {one:+}"


class Gate(Watch):
    """Holds the first request back before its commit, so that its duplicates meet it."""

    def __init__(self, seconds: float) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._seconds = seconds  # no longer, should what is counted wait for what the view has locked
        self.when_committed: Callable[[], None] | None = None

    def completing(self, claim: Claim) -> None:  # noqa: ARG002
        """The view has returned."""
        if not self.reached.is_set():
            self.reached.set()
            self.opened.wait(self._seconds)

    def completed(self, claim: Claim) -> None:  # noqa: ARG002
        """The first to commit is the one that was held back."""
        if self.when_committed is not None:
            when_committed, self.when_committed = self.when_committed, None
            when_committed()
