"""Crash windows for an application's own endpoint, on every store.

An exception that no error handler catches stands for the worker's death. It leaves what a killed
process leaves in the database: before the commit everything is rolled back, after it everything is
there. The retry counts as one that comes late enough: the lease of the dead is over, and its lock.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import get_args

from flask import Flask

from flask_idempotency.core.engine import Execution
from flask_idempotency.web.routes import AppState, app_state, states

from .effects import Counts
from .watch import Point, watched

CRASH_POINTS: tuple[Point, ...] = get_args(Point)
"""Every point of :func:`crash_at`, for ``pytest.mark.parametrize``; in the view, its first place."""

CAUGHT = "A bare except: or except BaseException: also keeps a worker from exiting."


class Crash(BaseException):
    """The worker dies here. It is no ``Exception``, so that no error handler catches it."""


def crash_at(
    point: Point, app: Flask | None = None, *, place: int | None = None
) -> AbstractContextManager[CrashPoint]:
    """Let the first protected request inside the ``with`` block die at a point.

    ``place`` is for ``"in-view"``, and counts the view's places from 1: after each
    ``db.session.commit()``, and between each step and its record. None is the first; a view that has
    none dies where it returns. ``app`` is the application that crashes; left out, whichever comes
    first. A plain request that dies ends the block: its retry belongs after it. ``with … as`` gives an
    object whose ``happened`` says whether a request has died yet.

    Raises ``AssertionError`` at the end of the block if no request reached the point.
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
    :func:`assert_idempotent_call` sends dies. In the last block no request dies. Raises what
    :func:`crash_at` raises.
    """
    whole_run = Counts()
    for point in reversed(CRASH_POINTS):
        for place in itertools.count(1) if point == "in-view" else (None,):
            crash = CrashPoint(point, place, _targets(app), whole_run)
            yield _crashing(crash)
            if not crash.began:
                raise RuntimeError("write: for crash in every_crash(): with crash: ...")
            if not crash.happened:
                break


def _targets(app: Flask | None) -> list[AppState]:
    return list(states) if app is None else [app_state(app)]


armed: list[CrashPoint] = []
"""The crash points whose blocks are open, the innermost last."""


@contextmanager
def _crashing(crash: CrashPoint) -> Iterator[CrashPoint]:
    """The block in which a request dies."""
    crash.began = True
    with ExitStack() as stack:
        for state in crash.targets:
            stack.enter_context(watched(state, crash))
        armed.append(crash)
        stack.callback(armed.remove, crash)
        stack.callback(crash.end_lease)
        try:
            yield crash
        except Crash as died:
            if died.args != (crash,):
                raise
    if crash.was_caught:
        raise AssertionError(f"{crash!r}: something caught the crash, and the view returned\n{CAUGHT}")
    if not crash.happened and not crash.has_passed_the_last_place:
        raise AssertionError(crash.not_reached())


class CrashPoint:
    """A point at which one attempt dies. Whatever it tries afterwards also dies."""

    def __init__(
        self,
        point: Point,
        place: int | None,
        targets: list[AppState],
        whole_run: Counts | None = None,
    ) -> None:
        self.point, self.place, self.targets = point, place, targets
        self.whole_run = whole_run
        self.began = False
        self.step: str | None = None  # the worker has died before this step was recorded
        self.was_caught = False  # the view has returned, although the crash was raised in it
        self._is_armed = whole_run is None
        self._attempt = self._passed = 0
        self._has_returned = False
        self._dead: Execution | None = None
        self._once = threading.Lock()

    def __repr__(self) -> str:
        place = "" if self.place is None else f", place={self.place}"
        return f"crash_at({self.point!r}{place})"

    def __call__(self, point: Point, execution: Execution, step: str | None = None) -> None:
        """An operation passes a point."""
        with self._once:
            if self._dead is execution:
                self.was_caught = self.was_caught or point == "before-commit"
            elif self._dead is None and self._is_armed and self._is_here(point, execution):
                self._dead, self.step = execution, step
        if self._dead is execution:
            raise Crash(self)

    def _is_here(self, point: Point, execution: Execution) -> bool:
        match point:
            case "after-claim":
                self._attempt, self._passed = execution.hold.attempt, 0
                self._has_returned = False
            case "in-view":
                self._passed += 1
                return self.point == point and self._passed >= (self.place or 1)
            case "before-commit":
                self._has_returned = True
                if self.point == "in-view" and self.place is None:
                    return True
        return self.point == point

    @property
    def happened(self) -> bool:
        """True if a request has died."""
        return self._dead is not None

    @property
    def has_passed_the_last_place(self) -> bool:
        """True if a place was only looked for, and a whole run of the view has none of that number."""
        is_probe = self.whole_run is not None and self.point == "in-view"
        return is_probe and self._has_returned and self._attempt == 1 and not self.happened

    @contextmanager
    def of_an_assertion(self) -> Iterator[None]:
        """Let what is sent here die."""
        before, self._is_armed = self._is_armed, True
        try:
            yield
        finally:
            self._is_armed = before
            self.end_lease()

    def end_lease(self) -> None:
        """No test waits for a lease: nobody has called anything that could still be at work."""
        if self._dead is not None:
            self._dead.hold.abandon()

    def not_reached(self) -> str:
        """Say what it means that nothing died."""
        return (
            f"{self!r} was not reached: no protected request or run() got that far. Is @idempotent on"
            " the view, is its response stored, and is the key new in each block? Places"
            f" are after each db.session.commit() and each step; attempt {self._attempt} passed"
            f" {self._passed}. In every_crash() only what assert_idempotent sends dies; crash_at() lets"
            " a plain request die"
        )
