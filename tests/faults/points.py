"""Points on a request's way where a worker kills itself, if the request asks for it in a header.

They exist only here: the stores of the application under test are wrapped. A message that carries
several statements is sent in two pieces if, and only if, the request is to die between them; all others
travel as they do for a user.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flask import Flask, got_request_exception, request

from flask_idempotency import store_failed
from flask_idempotency.core.ports import Glance
from flask_idempotency.drivers.raw_connection import RawConnection, class_of
from flask_idempotency.web.routes import AppState
from flask_idempotency.web.signals import Event
from tests.faults.history import Journal

POINTS = {
    "lock": "after the Redis lock",
    "claim": "after the claim's commit",
    "view": "in the view, before its first write",
    "write": "in the view, after its first write",
    "answer": "response written, before COMMIT",
    "commit": "after COMMIT, before Redis replies",
    "release": "after Redis, before the client reads",
}
TROUBLE = ("raise", "fail", "decline")
"""What else a request may ask for: that its view raises, answers 500, or answers 402."""


class Deliberate(RuntimeError):
    """The view's own error, asked for."""


class _Asked(threading.local):
    """Of the request that this thread works on; it stays so until the next, after the answer too."""

    fault = scope = key = ""


asked = _Asked()
journal: Journal | None = None


def point(name: str) -> None:
    """Die here, at once and without a word, if the request asked for it."""
    if journal is not None and asked.fault == name:
        note("death", point=name)
        os.kill(os.getpid(), signal.SIGKILL)


def note(event: str, **facts: Any) -> None:
    """Write an event of the present request down."""
    if journal is not None:
        journal.note(event, scope=asked.scope, key=asked.key, **facts)


def install(app: Flask) -> None:
    """Switch the points on, if ``FAULTS_JOURNAL`` names the file to note them in."""
    global journal  # noqa: PLW0603 -- one for the process, made before gunicorn forks
    if not (path := os.environ.get("FAULTS_JOURNAL")):
        return
    journal = Journal(Path(path))

    @app.before_request
    def remember() -> None:
        asked.fault = request.headers.get("X-Fault", "")
        asked.scope = request.headers.get("X-User", "")
        asked.key = request.headers.get("Idempotency-Key", "")

    def explain(_sender: Flask, exception: Exception, **_: Any) -> None:
        if not isinstance(exception, Deliberate):
            frames = traceback.extract_tb(exception.__traceback__)[-4:]
            way = " > ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames)
            note("error", text=f"{exception!r} at {way}"[:500])

    got_request_exception.connect(explain, app, weak=False)


def install_in_stores(state: AppState) -> None:
    """Put points around the lock and inside the messages to Postgres."""
    lock: Any = state.lock
    store_failed.connect(_note_miss, state.app, weak=False)
    acquire, finish = lock.acquire, lock.finish

    def acquire_and_die(*args: Any) -> Glance:
        glance: Glance = acquire(*args)
        if glance is Glance.MINE:
            point("lock")
        return glance

    def finish_and_die(*args: Any) -> Callable[[], None]:
        read_reply = finish(*args)

        def replied() -> None:
            read_reply()
            point("release")

        return replied

    lock.acquire, lock.finish = acquire_and_die, finish_and_die
    (driver,) = {
        class_of(engine.dialect.name, engine.dialect.driver)
        for engine in state.sessions.engines.values()
    }
    send, commit = driver.send, driver.commit

    def in_pieces(self: RawConnection, text: str, *more: Any, **named: Any) -> Any:
        claim, end, _ = text.partition("COMMIT;\n")
        if asked.fault == "claim" and end:
            send(self, claim + end, *more, **named)
            point("claim")
        return send(self, text, *more, **named)

    def commit_in_pieces(self: RawConnection, text: str, *more: Any, **named: Any) -> None:
        if asked.fault == "answer":
            send(self, text, *more, **named)
            point("answer")
        commit(self, text, *more, **named)
        point("commit")

    driver.send = in_pieces  # type: ignore[method-assign]
    driver.commit = commit_in_pieces  # type: ignore[method-assign]


def _note_miss(_sender: Flask, event: Event) -> None:
    """A call to Redis failed, which the worker then leaves alone for a while."""
    if journal is not None and not event.operation:
        journal.note("fault", kind="Redis: no reply", ended=time.monotonic())
