"""Threads of ours: how one begins, goes on whatever happens, is missed, and ends.

Each is a daemon and keeps no process from ending. What it does for an application it does in that
application's context, where ``flask.g`` is empty and there is no request.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as OutOfTime
from typing import Any, TypeVar
from weakref import WeakSet

from flask import Flask

from flask_idempotency.core.errors import StoreUnavailable
from flask_idempotency.core.logs import log

T = TypeVar("T")


def guarded(what: str, work: Callable[[], object]) -> None:
    """Call ``work``. What it raises is logged as ``what``."""
    try:
        work()
    except Exception:
        log.exception("%s failed", what)


def in_context(app: Flask, work: Callable[[], T]) -> T:
    """Return what ``work`` returns in a context of the application's, in no request's thread.

    There, the application's teardown functions would end what the request still uses.
    """
    context = app.app_context()
    try:
        context.push()
        return work()
    finally:
        if threading.main_thread().is_alive():  # or else the process ends, where asyncio works no more
            guarded("a function of teardown_appcontext", context.pop)


def aside(app: Flask, work: Callable[[], T]) -> Future[T]:
    """Return what ``work`` returns in a thread of its own, in the application's context.

    Whoever waits for it may leave it behind.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            found: Any = in_context(app, work)
        except BaseException as error:  # for whoever waits
            result.set_exception(error)
        else:
            result.set_result(found)

    threading.Thread(target=run, name="idempotency-question", daemon=True).start()
    return result


def reply(result: Future[T], seconds: float) -> T:
    """The result, if it is there within so many seconds. Raises ``StoreUnavailable`` if it is not."""
    try:
        return result.result(seconds)
    except OutOfTime:
        if result.done():
            raise
        raise StoreUnavailable from TimeoutError(f"no reply within {seconds:.1f} s")


class Worker:
    """Something that goes on in a thread of its own for as long as there is work.

    A subclass says with :meth:`has_work` whether there is any, and does a piece of it in :meth:`turn`.
    An exception there is logged, and the next turn follows. If the thread ends all the same, the next
    :meth:`begin` begins another.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.begin_anew()
        _workers.add(self)

    def begin_anew(self) -> None:
        """Know of no thread and no work, as in a new process: the parent keeps its own."""
        # Never held over anything that waits. gevent may replace threading only after this.
        self.lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._woken: threading.Event  # of the thread
        self._is_ending = False

    def has_work(self) -> bool:
        """Return True if the thread is needed. ``lock`` is held, as by those who bring work."""
        raise NotImplementedError

    def turn(self) -> None:
        """Do a piece of the work, or rest until there is one to do."""
        raise NotImplementedError

    def begin(self) -> None:
        """Begin the thread, or end the rest of the one that runs. Raises if none can be started."""
        with self.lock:
            if self._thread is not None:
                self._woken.set()
                return
            self._woken = threading.Event()
            self._thread = thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except BaseException:
            self._thread = None
            raise

    def rest(self, seconds: float) -> None:
        """Wait in a turn, until somebody calls :meth:`begin` or :meth:`end`."""
        self._woken.wait(seconds)
        self._woken.clear()

    def end(self, seconds: float) -> None:
        """Let a last turn follow now, and wait for its end for so long at most."""
        with self.lock:
            thread, self._is_ending = self._thread, True
        if thread is not None:
            self._woken.set()
            thread.join(seconds)

    def _run(self) -> None:
        try:
            while self._goes_on():
                guarded(f"the thread {self._name}", self.turn)
        except BaseException:  # somebody's exit
            self._thread = None
            log.warning("the thread %s has ended; the next operation begins another", self._name)
            raise

    def _goes_on(self) -> bool:
        with self.lock:
            goes_on = self.has_work() and not self._is_ending
            if not goes_on:
                self._thread = None
        return goes_on


_workers: WeakSet[Worker] = WeakSet()


def _begin_all_anew() -> None:
    for worker in list(_workers):
        worker.begin_anew()


os.register_at_fork(after_in_child=_begin_all_anew)
