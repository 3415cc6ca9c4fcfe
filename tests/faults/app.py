"""The application under test, as gunicorn loads it: a protected view, and one that calls ``run()``.

``FAULTS_DESIGN`` may name a mutant of this package that protects them;
``FAULTS_SESSIONS`` which kind of sessions it has (``tests.sessions``). A request's headers say how long
the view takes (``X-Sleep``, milliseconds) and what goes wrong (``X-Fault``); they are no part of the
fingerprint, so each retry may fare otherwise.

Its engine has listeners that need an application context, as those for row-level security often do.
The stores are wrapped: at ``POINTS`` a worker kills itself, if the request asks for it. A message of
several statements is sent in two pieces if, and only if, the request is to die between them; all others
travel as they do for a user.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from flask import Flask, current_app, got_request_exception, request
from sqlalchemy.orm import Mapped, mapped_column

import flask_idempotency
from flask_idempotency import Idempotency, OperationInterrupted, current_operation, idempotent
from flask_idempotency.core.errors import LeaseLost
from flask_idempotency.core.ports import Glance
from flask_idempotency.drivers.raw_connection import RawConnection, class_of
from flask_idempotency.stores import lock
from flask_idempotency.stores.table import define_table
from flask_idempotency.web import purging
from flask_idempotency.web.routes import AppState, app_state
from flask_idempotency.web.signals import Event
from tests import sessions
from tests.faults import mutants
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


sessions.usual = os.environ.get("FAULTS_SESSIONS", sessions.usual)
db: Any = sessions.make_db()
define_table(db.metadata, "idempotency_record")


class Deliberate(RuntimeError):
    """The view's own error, asked for."""


class _Asked(threading.local):
    """Of the request that this thread works on; it stays so until the next, after the answer too."""

    fault = scope = key = ""


asked = _Asked()
journal: Journal


def point(name: str) -> None:
    """Die here, at once and without a word, if the request asked for it."""
    if asked.fault == name:
        note("death", point=name)
        os.kill(os.getpid(), signal.SIGKILL)


def note(event: str, **facts: Any) -> None:
    """Write an event of the present request down."""
    journal.note(event, scope=asked.scope, key=asked.key, **facts)


def install(app: Flask) -> None:
    """Switch the points on, and note what happens."""
    global journal  # noqa: PLW0603 -- one for the process, made before gunicorn forks
    journal = Journal(Path(os.environ["FAULTS_JOURNAL"]))

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
    redis_lock: Any = state.lock
    flask_idempotency.store_failed.connect(_note_miss, state.app, weak=False)
    acquire, finish = redis_lock.acquire, redis_lock.finish

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

    redis_lock.acquire, redis_lock.finish = acquire_and_die, finish_and_die
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
    if not event.operation:
        journal.note("fault", kind="Redis: no reply", ended=time.monotonic())


class Payment(db.Model):  # type: ignore[misc]
    """The business table. Nothing is unique: a second run must show."""

    id: Mapped[int] = mapped_column(primary_key=True)
    scope: Mapped[str]
    key: Mapped[str]
    body: Mapped[int]
    execution: Mapped[str]


def create_app() -> Flask:
    """What gunicorn calls, once, before it forks."""
    logging.disable(logging.CRITICAL)  # what matters goes to the journal
    app = Flask(__name__)
    app.config.update(
        SQLALCHEMY_DATABASE_URI=os.environ["DATABASE_URL"],
        SQLALCHEMY_ENGINE_OPTIONS={"connect_args": {"connect_timeout": 5}},
        IDEMPOTENCY_REDIS_URL=os.environ["REDIS_URL"],
        IDEMPOTENCY_WAIT=float(os.environ.get("FAULTS_WAIT", "0")),
    )
    db.init_app(app)
    with app.app_context():
        for name in ("connect", "checkout"):
            sa.event.listen(db.engine, name, lambda *_what: current_app.name)
    install(app)
    app.add_url_rule("/", view_func=lambda: str(os.getpid()), endpoint="ready")
    lock.PROBE_AFTER_SECONDS = float(os.environ.get("FAULTS_PROBE_AFTER", "1"))
    purging.Purge.every = 2
    if design := os.environ.get("FAULTS_DESIGN"):
        mutants.MUTANTS[design].apply()
    scope = None if design == "no_scope" else lambda: request.headers["X-User"]
    idempotency = sessions.protect(app, db, scope=scope)
    install_in_stores(app_state(app))
    app.add_url_rule("/payments", "payments", idempotent(pay), methods=["POST"])
    app.add_url_rule("/events", "events", lambda: handle(idempotency), methods=["POST"])
    return app


def begin() -> str:
    """The view has begun: the number of its run."""
    execution = uuid.uuid4().hex
    note("run", body=request.json["body"], attempt=current_operation.attempt, execution=execution)
    point("view")
    return execution


def seconds() -> float:
    return float(request.headers.get("X-Sleep", "0")) / 1000


def add_payment(execution: str) -> None:
    scope, key = request.headers["X-User"], request.headers["Idempotency-Key"]
    db.session.add(Payment(scope=scope, key=key, body=request.json["body"], execution=execution))


def pay() -> Any:
    """Takes its time, writes, takes its time, commits, answers."""
    fault, execution = request.headers.get("X-Fault"), begin()
    time.sleep(seconds() / 2)
    if fault == "decline":
        return {"declined": execution}, 402
    add_payment(execution)
    db.session.flush()
    point("write")
    time.sleep(seconds() / 2)
    db.session.commit()
    if fault == "raise":
        raise Deliberate
    if fault == "fail":
        return {"failed": execution}, 500
    return {"execution": execution, "attempt": current_operation.attempt}, 201


LEASED: Any = {"atomic": False, "lease": 1, "on_interrupted": "retry"}
"""Short leases: after a kill, a retry need not wait for long, and a slow attempt is taken over."""


def handle(idempotency: Idempotency) -> Any:
    """Handle an event at most once by ``run()``, under a lease if its key says so."""
    key = request.headers["Idempotency-Key"]
    is_leased, ran = key.startswith("leased"), []

    def charge() -> dict[str, Any]:
        execution = begin()
        ran.append(execution)
        time.sleep(seconds())

        def write() -> str:
            add_payment(execution)
            db.session.commit()
            point("write")
            return execution

        try:
            found = current_operation.step("write", write, atomic=True) if is_leased else write()
        except sa.exc.SQLAlchemyError as error:  # it may be written: the next request runs it again
            if not is_leased:
                raise
            raise OperationInterrupted from error
        return {"execution": found}

    scope, options = request.headers["X-User"], LEASED if is_leased else {}
    try:
        result = idempotency.run(
            key, charge, scope=scope, payload=request.json["body"], name="events", **options
        )
    except (sa.exc.DBAPIError, LeaseLost):
        return {}, 503
    return json.dumps(result), 201, {} if ran else {"Idempotent-Replayed": "true"}


def create_tables(url: str) -> None:
    """Create all tables, here and not in each worker."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    db.metadata.create_all(engine)
