"""The shops as the demo runs them, with what only a demo may do.

``LABORATORY_LANE`` says which: the shop of ``example/`` as it is, or the same with the extension
switched off, and with a view of ``without.py`` in place of the one that asks for steps.
``LABORATORY_EVENTS`` is a file for what happens in it, a line of JSON each, for the time line.
"""

from __future__ import annotations

import json
import os
import signal
import time
from functools import wraps
from pathlib import Path
from typing import Any

from flask import Flask, has_request_context, request
from sqlalchemy import event
from sqlalchemy.orm import Session
from werkzeug.middleware.dispatcher import DispatcherMiddleware

import example
from example import provider
from example.models import Order, Payment
from flask_idempotency import current_operation
from flask_idempotency.core.engine import Execution
from flask_idempotency.testing.watch import Point, watched
from flask_idempotency.web.routes import app_state
from laboratory import card_provider, without

FAULT = "Laboratory-Fault"
STORY = "Laboratory-Story"

KILL_AFTER_COMMIT = "kill the worker after the view's commit"
KILL_AFTER_CHARGE = "kill the worker after the provider's charge"
BE_SLOW = "be slow after the view's commit"

LEASE_SECONDS = 5  # so that nobody waits a minute for what a killed worker has begun
SLOW_SECONDS = 0.15  # long enough for the second click, and for some of 200 requests


def create_app() -> Flask:
    """One of the two shops, for gunicorn."""
    if is_without():
        app = without.create_app()
    else:
        app = example.create_app({"IDEMPOTENCY_LEASE": LEASE_SECONDS})
        # For as long as the process lives.
        app.extensions["watching"] = watching = watched(app_state(app), note_point)
        watching.__enter__()
    event.listen(Session, "after_flush", note_writes)
    event.listen(Session, "after_commit", after_commit)
    provider.charge = charging(provider.charge)
    return app


def is_without() -> bool:
    return os.environ["LABORATORY_LANE"] == "without"


def create_providers() -> Any:
    """The card provider of each shop, in one process. Each has a ledger of its own."""
    folder = Path(os.environ["LABORATORY_FOLDER"])
    each: dict[str, Any] = {
        f"/{lane}": card_provider.create_app({"PROVIDER_DATABASE": str(folder / f"{lane}.db")})
        for lane in ("without", "with")
    }
    return DispatcherMiddleware(each["/with"], each)


def note(what: str, detail: str = "") -> None:
    """Write what happens in a request of a story into the log of events."""
    if has_request_context() and (story := request.headers.get(STORY)):
        line = json.dumps({"at": time.time(), "story": story, "what": what, "detail": detail})
        with open(os.environ["LABORATORY_EVENTS"], "a") as log:  # noqa: PTH123 -- appended at once
            log.write(line + "\n")


def asked_for(fault: str) -> bool:
    return has_request_context() and request.headers.get(FAULT) == fault


def die() -> None:
    """As the kernel ends a process that is out of memory: nothing is tidied up."""
    note("SIGKILL", f"worker {os.getpid()}")
    os.kill(os.getpid(), signal.SIGKILL)


def note_point(point: Point, execution: Execution, _step: str | None = None) -> None:
    """Note what the extension does around a view."""
    if point == "after-claim":
        note("claim", f"of the key, attempt {execution.hold.attempt}")
    elif point == "after-commit":
        note("commit", "row and response together")


def note_writes(session: Session, _context: Any) -> None:
    for row in session.new:
        if isinstance(row, Payment | Order):
            note("write", f"a row in {row.__tablename__}, {row.amount / 100:,.2f}")


def after_commit(_session: Session) -> None:
    """The view has called ``commit()``. Without protection that was the commit."""
    if is_without():
        note("commit", "the row")
    elif is_atomic():
        note("the view’s commit()", "final with the response")
    if asked_for(KILL_AFTER_COMMIT):
        die()
    if asked_for(BE_SLOW):
        time.sleep(SLOW_SECONDS)


def is_atomic() -> bool:
    """Whether an atomic operation is running, which commits with the response."""
    try:
        return current_operation.steps is None
    except RuntimeError:
        return False


def charging(charge: Any) -> Any:
    @wraps(charge)
    def charged(*args: Any, **kwargs: Any) -> Any:
        made = charge(*args, **kwargs)
        note("charge", f"the provider has {made['id']}" if made else "declined")
        if asked_for(KILL_AFTER_CHARGE):
            die()
        return made

    return charged
