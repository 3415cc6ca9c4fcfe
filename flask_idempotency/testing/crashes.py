"""Crash windows for an application's own endpoint, on every store.

An exception that no error handler catches stands for the worker's death. It leaves what a killed
process leaves: before the commit everything is rolled back, after it everything is there, and the lock
or the marker stays in Redis. The retry counts as one that comes late enough: the lock of the dead is
older than a second, and its lease is over.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Literal, get_args
from unittest.mock import patch

from flask import Flask
from sqlalchemy.orm import Session

from flask_idempotency.core.engine import Execution
from flask_idempotency.core.ports import Glance
from flask_idempotency.core.records import Claim
from flask_idempotency.session.sources import Sessions
from flask_idempotency.web.request import present_operation
from flask_idempotency.web.routes import AppState, app_state, states

from .watch import Watch, watched

Point = Literal["after-claim", "in-view", "before-commit", "after-commit"]

CRASH_POINTS: tuple[Point, ...] = get_args(Point)
"""Every point of :func:`crash_at`, for ``pytest.mark.parametrize``; in the view, its first place."""

GONE_ON = "something caught the crash, and the view returned as if nothing had happened"
CAUGHT = "A bare except: or except BaseException: also keeps a worker from exiting."

_claim: ContextVar[Claim | None] = ContextVar("flask_idempotency_crash_claim", default=None)


class Crash(BaseException):
    """The worker dies here. It is no ``Exception``, so that no error handler catches it."""


def crash_at(
    point: Point, app: Flask | None = None, *, place: int | None = None
) -> AbstractContextManager[CrashPoint]:
    """Let the first protected request inside the ``with`` block die at a point.

    * ``"after-claim"``: the key is claimed, the view has not begun.
    * ``"in-view"``: at the view's first place, or the one that ``place`` counts. A place is right after
      a ``db.session.commit()``, and between a step and its record. Without ``place``, a view that has
      none dies where it returns.
    * ``"before-commit"``: the view has returned, nothing is committed yet.
    * ``"after-commit"``: writes and response are committed, the client has not heard of it.

    :func:`assert_idempotent` in the block sends the request that dies, retries it, and asserts one
    effect and one response. A plain request that dies ends the block, as with ``pytest.raises``: what
    is set up belongs before it, and the retry after it. ``app`` is the application that crashes; left
    out, whichever comes first. ``with … as`` gives an object whose ``happened`` says whether a request
    has died yet; ``point`` and ``place`` are its arguments.

    Raises ``AssertionError`` at the end of the block if no request reached the point, or the view has
    no such place.
    """
    if point not in CRASH_POINTS:
        raise ValueError(f"crash_at({point!r}): the points are {', '.join(CRASH_POINTS)}")
    if place is not None and (point != "in-view" or place < 1):
        raise ValueError(f"crash_at({point!r}, place={place!r}): only 'in-view' has places, from 1 on")
    return _crashing(CrashPoint(point, place, _targets(app)))


def every_crash(app: Flask | None = None) -> Iterator[AbstractContextManager[CrashPoint]]:
    """Every crash that a view can meet: :func:`crash_at` each point, and each place in the view.

    .. code-block:: python

        for crash in every_crash():
            with crash:
                assert_idempotent(...)

    Each block must send an operation of its own, with a new key. Only what :func:`assert_idempotent` or
    :func:`assert_idempotent_call` sends dies. The places in the view are tried until there are no more;
    the request of that last block does not die. Raises what :func:`crash_at` raises.
    """
    for point in CRASH_POINTS:
        for place in itertools.count(1) if point == "in-view" else (None,):
            crash = CrashPoint(point, place, _targets(app), is_one_of_all=True)
            yield _crashing(crash)
            if not crash.began:
                raise RuntimeError("write: for crash in every_crash(): with crash: ...")
            if not crash.happened:
                break


def _targets(app: Flask | None) -> list[AppState]:
    return states() if app is None else [app_state(app)]


@contextmanager
def _crashing(crash: CrashPoint) -> Iterator[CrashPoint]:
    """The block in which a request dies."""
    crash.began = True
    with ExitStack() as stack:
        for state in crash.targets:
            stack.enter_context(watched(state, crash))
            stack.enter_context(_commits_watched(state.sessions, crash))
        stack.enter_context(patch.object(Execution, "abandon", _abandon_at_once))
        armed.append(crash)
        stack.callback(armed.remove, crash)
        crash.afterwards = stack
        try:
            yield crash
        except Crash as died:
            if died.args != (crash,):
                raise
    if crash.was_caught:
        raise AssertionError(f"{crash!r}: {GONE_ON}\n{CAUGHT}")
    if not crash.happened and not crash.has_passed_the_last_place:
        raise AssertionError(crash.not_reached())


_abandon = Execution.abandon


def _abandon_at_once(execution: Execution, **_when: bool) -> None:
    """No test waits for a lease to end: nobody has called anything that could still be at work."""
    _abandon(execution)


class CrashPoint(Watch):
    """A point at which one attempt dies. Whatever it tries afterwards also dies."""

    def __init__(
        self, point: Point, place: int | None, targets: list[AppState], *, is_one_of_all: bool = False
    ) -> None:
        self.point, self.place, self.targets = point, place, targets
        self.began = False
        self.afterwards: ExitStack  # what happens when the block ends
        self._is_one_of_all = is_one_of_all
        self._is_armed, self._is_asserted = not is_one_of_all, False
        self._attempt = self._passed = 0
        self._has_returned = False
        self.was_caught = False  # the view has returned, although the crash was raised in it
        self._dead: Claim | None = None
        self._once = threading.Lock()

    def __repr__(self) -> str:
        place = "" if self.place is None else f", place={self.place}"
        return f"crash_at({self.point!r}{place})"

    @property
    def happened(self) -> bool:
        """True if a request has died."""
        return self._dead is not None

    @property
    def has_passed_the_last_place(self) -> bool:
        """True if a place was only looked for, and a whole run of the view has none of that number."""
        is_probe = self._is_one_of_all and self.point == "in-view"
        return is_probe and self._has_returned and self._attempt == 1 and not self.happened

    @contextmanager
    def of_an_assertion(self) -> Iterator[None]:
        """Let what is sent here die. Catches the crash, so that the block goes on."""
        before, self._is_armed, self._is_asserted = self._is_armed, True, True
        try:
            yield
        finally:
            self._is_armed = before

    def not_reached(self) -> str:
        """Say what it means that nothing died."""
        if self._is_one_of_all and not self._is_asserted:
            return (
                f"{self!r} was not reached: in a block of every_crash() only what assert_idempotent or"
                " assert_idempotent_call sends dies. To let a plain request die, use crash_at()"
            )
        if self.place is None or not self._has_returned:
            return (
                f"{self!r} was not reached: no protected request or run() got that far. Is"
                " @idempotent on the view, is its response stored (below 500), and is the key new?"
            )
        if self._attempt > 1:
            return (
                f"{self!r} was not reached by attempt {self._attempt} of an operation, which does not"
                " repeat recorded steps: send an operation with a new key in each block"
            )
        return (
            f"{self!r} was not reached: the view has {self._passed} such places. They are right after"
            " each db.session.commit(), and between a step and its record"
        )

    def claimed(self, claim: Claim, attempt: int) -> None:
        """The first point."""
        _claim.set(claim)
        if self._is_armed and not self.happened:
            self._attempt, self._passed, self._has_returned = attempt, 0, False
        self._at("after-claim", claim)

    def recording(self, claim: Claim) -> None:
        """A step's result would be recorded."""
        self._in_view(claim)

    def committed_in_view(self) -> None:
        """The view has committed its session."""
        if (claim := _claim.get()) is not None and present_operation() is not None:
            self._in_view(claim)

    def completing(self, claim: Claim) -> None:
        """The view has returned."""
        self.was_caught = self.was_caught or self._is_dead(claim)
        self._has_returned = True
        if self.place is None:
            self._at("in-view", claim)
        self._at("before-commit", claim)

    def completed(self, claim: Claim) -> None:
        """The last point."""
        self._at("after-commit", claim)

    def releasing(self, claim: Claim, release: Callable[[], None]) -> None:
        """The dead release no lock: theirs is released when the block ends."""
        if self._is_dead(claim):
            self.afterwards.callback(release)  # so that a retry after the block need not wait for it
        else:
            release()

    def glanced(self, claim: Claim, glance: Glance) -> Glance:
        """The lock of a dead worker is an old one."""
        if glance is Glance.BUSY and self._dead is not None and self._dead.key == claim.key:
            return Glance.ASK
        return glance

    def _is_dead(self, claim: Claim) -> bool:
        return self._dead is not None and self._dead.owner == claim.owner

    def _in_view(self, claim: Claim) -> None:
        self._passed += 1
        if self._passed >= (self.place or 1) or self._is_dead(claim):
            self._at("in-view", claim)

    def _at(self, point: Point, claim: Claim) -> None:
        with self._once:
            if self._is_armed and self._dead is None and point == self.point:
                self._dead = claim
        if self._is_dead(claim):
            raise Crash(self)


armed: list[CrashPoint] = []
"""The crash points whose blocks are open, the innermost last."""


def _commits_watched(sessions: Sessions, crash: CrashPoint) -> AbstractContextManager[object]:
    """Tell when a view commits ``db.session``, whose class is ours."""
    session_class: Any = sessions.factory.class_
    inherited = session_class.commit

    def commit(session: Session) -> None:
        inherited(session)
        if sessions.present() is session:
            crash.committed_in_view()

    return patch.object(session_class, "commit", commit)
