"""One operation of an application under test: sent many times at once, killed, its effects counted."""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import Context
from typing import Generic, NoReturn, TypeVar

from flask import Flask
from sqlalchemy import StaticPool

from flask_idempotency.core.records import Claim
from flask_idempotency.web.setup.state import AppState, app_state

from .crashes import Crash, CrashPoint
from .watch import Watch, watched

__tracebackhide__ = True  # pytest shows the test's line and the message, not what is in between

T = TypeVar("T")

Effects = Callable[[], int | Mapping[str, int]]

IN_VIEW_SECONDS = 1.0
"""How long the first request is held back for its duplicates. They are rejected within milliseconds;
on a route with ``wait`` they wait until it goes on."""

OUTSIDE = (
    "A retry repeats what runs outside the view: before_request and after_request functions, decorators"
    " above @idempotent, middleware. Or @idempotent does not protect the view at all."
)
UNCOMMITTED = (
    "The retry repeated what the dead attempt had done outside the operation's transaction: a call to"
    " another system, a write through db.engine or another bind, a commit in a view with atomic=False."
    " Write through db.session; make calls after the commit (an outbox), or as"
    " current_operation.step(...) with a key from derive_key(...)."
)
MISSING = (
    "Does effects() count it, and can it see what is committed? Does the view commit it? If store=..."
    " rejects the response, the view's writes are rolled back."
)
FOLLOWING = (
    "The worker died right after the commit. What was due after it, such as a function given to"
    " after_commit, is lost, and no retry makes up for it. What must not be lost belongs in a table,"
    " written in the same transaction (an outbox)."
)


class NotConcurrentWarning(UserWarning):
    """Requests could not be sent at the same time, so nothing is known about concurrent duplicates."""


class Check(ABC, Generic[T]):
    """One operation, by whichever way it comes in. ``T`` is what comes back from it."""

    def __init__(self, app: Flask, name: str, effects: Effects | None) -> None:
        self.state: AppState = app_state(app)
        self._name, self._effects = name, effects
        self._before = self._counted()

    @abstractmethod
    def send(self) -> T:
        """Send it once, in a context of its own."""

    @abstractmethod
    def shown(self, outcome: T) -> str:
        """What came back, for a message."""

    def send_at_once(self, duplicates: int) -> list[T]:
        """The first request, and duplicates of it before it commits."""
        if duplicates and any(isinstance(e.pool, StaticPool) for e in self.state.engines.values()):
            warnings.warn(
                "all requests share one connection to the database in memory, so the duplicates came"
                " one after the other: use a SQLite file to send them at the same time, or pass"
                " duplicates=0",
                NotConcurrentWarning,
                stacklevel=3,
            )
            return [self.send() for _ in range(1 + duplicates)]
        gate = Gate()
        with watched(self.state, gate), ThreadPoolExecutor(1 + duplicates) as pool:
            try:
                first = pool.submit(self.send)
                first.add_done_callback(lambda _: gate.reached.set())
                gate.reached.wait()
                others = [pool.submit(self.send) for _ in range(duplicates)]
                wait(others, IN_VIEW_SECONDS)
            finally:
                gate.opened.set()
            return [future.result() for future in (first, *others)]

    def crash(self, crash: CrashPoint) -> T | None:
        """Send the request that dies. Returns its response if it has passed the last place instead."""
        try:
            response = self.send()
        except Crash as died:
            if died.args != (crash,):
                raise
            return None
        if crash.has_passed_the_last_place:
            return response
        if crash.happened:
            self.fail(
                f"something caught the crash and responded with {self.shown(response)}",
                "A bare except: or except BaseException: also keeps a worker from exiting.",
            )
        self.fail(f"the first request got {self.shown(response)}", crash.not_reached())

    def effects_are_one(self, when: str, at_least: int, crash: CrashPoint | None = None) -> None:
        """Each count has risen by one. What died at ``crash`` may have left some effects."""
        now = self._counted()
        rises = {name: count - self._before.get(name, 0) for name, count in now.items()}
        wrong = {name: rise for name, rise in rises.items() if not at_least <= rise <= 1}
        if not wrong:
            return
        hints = []
        if max(wrong.values()) > 1:
            # The dead attempt ran once and the retry once: what is there three times has another cause.
            ran = crash is not None and crash.point in ("in-view", "before-commit")
            hints.append(UNCOMMITTED if ran and max(wrong.values()) == 2 else OUTSIDE)
        if min(wrong.values()) < 1:
            has_committed = crash is not None and crash.point == "after-commit"
            hints.append(FOLLOWING if has_committed else MISSING)
        found = [f"{name} rose by {rise}, not by 1" for name, rise in wrong.items()]
        self.fail(f"after {when}", " ".join(hints), *found)

    def _counted(self) -> dict[str, int]:
        def count() -> int | Mapping[str, int]:
            with self.state.app.app_context():
                return self._effects() if self._effects else {}

        counted = Context().run(count)
        return {"effects()": counted} if isinstance(counted, int) else dict(counted)

    def fail(self, what: str, hint: str, *found: str) -> NoReturn:
        """Raise ``AssertionError`` with what is wrong, and where to look."""
        lines = [f"{self._name}: {what}", *(f"  {line}" for line in found), hint]
        raise AssertionError("\n".join(line for line in lines if line))


class Gate(Watch):
    """Holds the first request back before its commit, so that its duplicates meet it."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def completing(self, claim: Claim) -> None:  # noqa: ARG002
        """The view has returned."""
        if not self.reached.is_set():
            self.reached.set()
            self.opened.wait()
