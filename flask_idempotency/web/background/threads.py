"""Threads of ours: how one begins, and what waits for it.

Each is a daemon and keeps no process from ending. What it does for an application it does in that
application's context, where ``flask.g`` is empty and there is no request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as OutOfTime
from typing import Any, TypeVar

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
