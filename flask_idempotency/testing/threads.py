"""Calls in threads of their own: several at the same time, and none for longer than a test can wait."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import dropwhile
from time import monotonic
from typing import Any, TypeVar
from unittest.mock import patch

from .stacks import is_installed, is_own, lines

T = TypeVar("T")

NAME = "assert_idempotent"
"""The threads', for whoever looks at a process."""

_CALL = "flask_idempotency_call"
"""The attribute of a thread that says for which call it works."""

Work = threading.Thread | Future[Any]


class Call(Future[T]):
    """A function's result. The thread is a daemon: one that hangs does not keep the process alive."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self._function = function
        self._begun: list[Work] = []
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        setattr(self._thread, _CALL, self)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.set_result(self._function())
        except BaseException as error:
            self.set_exception(error)

    def stack(self) -> list[str]:
        """Where it is now, from the application's own code on, in lines."""
        return stack(self._thread)

    def has_begun(self, work: Work) -> None:
        """Note a thread of its own, or what it gave to an executor."""
        self._begun.append(work)

    def goes_on(self, seconds: float) -> Work | None:
        """Return what it has begun, and has not ended within ``seconds``."""
        ends = monotonic() + seconds
        for work in self._begun:  # a thread may begin others meanwhile
            if not _has_ended(work, max(0.0, ends - monotonic())):
                return work
        return None


def stack(thread: threading.Thread) -> list[str]:
    """Where a thread is now, from the application's own code on, in lines."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001
    frames = traceback.extract_stack(frame) if frame else []
    below = list(dropwhile(lambda each: not is_own(each), frames))
    return lines(below or frames)


@contextmanager
def begun_noted() -> Iterator[None]:
    """Note the threads that calls begin, and what they give to executors.

    Not those that a library keeps for the whole process: an executor's, and daemons.
    """
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    def noting_start(thread: threading.Thread) -> None:
        call, beginner = _call(), sys._getframe(1).f_code.co_filename  # noqa: SLF001
        is_kept = is_installed(beginner) and (thread.daemon or beginner == _EXECUTORS)
        if call is None or is_kept:
            return start(thread)
        setattr(thread, _CALL, call)  # before it begins others
        start(thread)
        return call.has_begun(thread)

    def noting_submit(executor: ThreadPoolExecutor, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = submit(executor, *args, **kwargs)
        if (call := _call()) is not None:
            call.has_begun(future)
        return future

    with (
        patch.object(threading.Thread, "start", noting_start),
        patch.object(ThreadPoolExecutor, "submit", noting_submit),
    ):
        yield


_EXECUTORS = ThreadPoolExecutor.submit.__code__.co_filename


def _call() -> Call[Any] | None:
    return getattr(threading.current_thread(), _CALL, None)


def _has_ended(work: Work, seconds: float) -> bool:
    if isinstance(work, threading.Thread):
        work.join(seconds)
        return not work.is_alive()
    return bool(wait([work], seconds).done)
