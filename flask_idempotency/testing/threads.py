"""Calls in threads of their own: several at the same time, and none for longer than a test can wait."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from itertools import dropwhile
from typing import TypeVar

from .stacks import is_own, lines

T = TypeVar("T")

NAME = "assert_idempotent"
"""The threads', for whoever looks at a process."""


class Call(Future[T]):
    """A function's result. The thread is a daemon: one that hangs does not keep the process alive."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self._function = function
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.set_result(self._function())
        except BaseException as error:
            self.set_exception(error)

    def stack(self) -> list[str]:
        """Where it is now, from the application's own code on, in lines."""
        frame = sys._current_frames().get(self._thread.ident or 0)  # noqa: SLF001
        frames = traceback.extract_stack(frame) if frame else []
        below = list(dropwhile(lambda each: not is_own(each), frames))
        return lines(below or frames)
