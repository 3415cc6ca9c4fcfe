"""Crash windows for an application's own endpoint, on every store.

A worker that dies at the point is played by an exception that no handler for errors catches. It leaves
what a killed process leaves: before the commit everything is rolled back, after it everything is
there, and the lock in Redis is left behind. The retry is played as one that comes late enough: the lock
of the dead is older than ``IDEMPOTENCY_PROBE_AFTER``, and a lease is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Literal, get_args

from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import Session

from ..core.ports import Glance
from ..core.records import Claim
from ..extension import states
from ..operation import present_operation
from ..state import AppState, app_state
from .watch import Watch, watched

Point = Literal["after-claim", "in-view", "before-commit", "after-commit"]

CRASH_POINTS: tuple[Point, ...] = get_args(Point)
"""Every point of :func:`crash_at`, for ``pytest.mark.parametrize``."""

_claim: ContextVar[Claim | None] = ContextVar("flask_idempotency_crash_claim", default=None)


class Crash(BaseException):
    """The worker dies here. No ``Exception``, so that no handler for errors takes it for one."""


@contextmanager
def crash_at(point: Point, app: Flask | None = None, *, place: int = 1) -> Iterator[CrashPoint]:
    """Let the first protected request inside the ``with`` block die at a point.

    * ``"after-claim"``: the key is claimed, the view has not begun.
    * ``"in-view"``: at the view's first place, or the one that ``place`` counts. A place is right after
      a ``db.session.commit()``, and between a step and its record. A view with fewer of them dies where
      it returns.
    * ``"before-commit"``: the view has returned, nothing is committed yet.
    * ``"after-commit"``: writes and answer are committed, the client has not heard of it.

    :func:`assert_idempotent` in the block sends the request that dies, retries it, and asserts one
    effect and one answer. A plain request ends the block by its death, as with ``pytest.raises``; the
    retry comes after the block. ``app`` is the application that crashes; left out, the first of all.
    The block is given an object whose ``happened`` says whether a request has died yet.

    Raises ``AssertionError`` at the end of the block if nothing came to the point.
    """
    if point not in CRASH_POINTS:
        raise ValueError(f"crash_at({point!r}): there are {', '.join(CRASH_POINTS)}")
    targets = states() if app is None else [app_state(app)]
    crash = CrashPoint(point, place, targets)
    with ExitStack() as stack:
        for state in targets:
            stack.enter_context(watched(state, crash))
            stack.enter_context(_commits_watched(state.db, crash))
        armed.append(crash)
        try:
            yield crash
        except Crash as died:
            if died.args != (crash,):
                raise
        finally:
            armed.remove(crash)
            crash.clear()
    if not crash.happened:
        raise AssertionError(crash.not_reached())


class CrashPoint(Watch):
    """A point at which one attempt dies; what dies there is dead in all that it tries afterwards."""

    def __init__(self, point: Point, place: int, targets: list[AppState]) -> None:
        self.point = point
        self._places_left = place
        self._targets = targets
        self._dead: Claim | None = None
        self._left_behind: list[Callable[[], None]] = []
        self._once = threading.Lock()

    def __repr__(self) -> str:
        return f"crash_at({self.point!r})"

    @property
    def happened(self) -> bool:
        """Whether a request has died."""
        return self._dead is not None

    def covers(self, state: AppState) -> bool:
        """Whether it lies in this application."""
        return any(target is state for target in self._targets)

    def not_reached(self) -> str:
        """What it means that nothing died."""
        return (
            f"{self!r} was not reached: no protected request came that far. Is @idempotent on the view,"
            " is its answer kept (below 500), and is the request's key a new one?"
        )

    def claimed(self, claim: Claim) -> None:
        """The first point."""
        _claim.set(claim)
        self._at("after-claim", claim)

    def recording(self, claim: Claim) -> None:
        """A step's result would be recorded."""
        self._in_view(claim)

    def committed_in_view(self) -> None:
        """The view has committed its session."""
        if (claim := _claim.get()) is not None and present_operation() is not None:
            self._in_view(claim)

    def completing(self, claim: Claim) -> None:
        """The view has returned; it may have had too few places."""
        self._at("in-view", claim)
        self._at("before-commit", claim)

    def completed(self, claim: Claim) -> None:
        """The last point."""
        self._at("after-commit", claim)

    def releasing(self, claim: Claim, release: Callable[[], None]) -> None:
        """The dead give no lock back: theirs goes when the block ends."""
        if self._is_dead(claim):
            self._left_behind.append(release)
        else:
            release()

    def glanced(self, claim: Claim, glance: Glance) -> Glance:
        """The lock of the dead is an old one."""
        if glance is Glance.BUSY and self._dead is not None and self._dead.key == claim.key:
            return Glance.ASK
        return glance

    def clear(self) -> None:
        """Let the dead one's lock go, so that retries after the block need not wait for that."""
        for release in self._left_behind:
            release()

    def _is_dead(self, claim: Claim) -> bool:
        return self._dead is not None and self._dead.owner == claim.owner

    def _in_view(self, claim: Claim) -> None:
        self._places_left -= 1
        if self._places_left <= 0 or self._is_dead(claim):
            self._at("in-view", claim)

    def _at(self, point: Point, claim: Claim) -> None:
        with self._once:
            if self._dead is None and point == self.point:
                self._dead = claim
        if self._is_dead(claim):
            raise Crash(self)


armed: list[CrashPoint] = []
"""The crash points whose blocks are open, the innermost last."""


@contextmanager
def _commits_watched(db: SQLAlchemy, crash: CrashPoint) -> Iterator[None]:
    """Tell when a view commits ``db.session``, whose class is ours (see ``session.install``)."""
    session_class: Any = db.session.session_factory.class_
    before, inherited = vars(session_class).get("commit"), session_class.commit

    def commit(session: Session) -> None:
        inherited(session)
        if db.session.registry.has() and db.session.registry() is session:
            crash.committed_in_view()

    session_class.commit = commit
    try:
        yield
    finally:
        if before is None:
            del session_class.commit
        else:
            session_class.commit = before
