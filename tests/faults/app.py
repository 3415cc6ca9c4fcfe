"""The application under test: a protected view and a webhook's, as gunicorn loads them.

``FAULTS_DESIGN`` names what protects the view: this package (``ours``), a mutant of it, or another
design; ``FAULTS_SESSIONS`` which kind of sessions it has (``tests.sessions``). A request's headers say
how long the view takes (``X-Sleep``, milliseconds) and what goes wrong (``X-Fault``); they are no part
of the fingerprint, so each retry may fare otherwise.

Its engine has listeners that need an application context, as those for row-level security often do.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
import uuid
from contextlib import suppress
from typing import Any

import sqlalchemy as sa
from flask import Flask, copy_current_request_context, current_app, request
from sqlalchemy.orm import Mapped, mapped_column

from flask_idempotency import (
    Idempotency,
    OperationInterrupted,
    current_operation,
    idempotent,
)
from flask_idempotency.core.errors import LeaseLost, Problem
from flask_idempotency.stores import lock
from flask_idempotency.stores.table import define_table
from flask_idempotency.web import purging
from flask_idempotency.web.routes import app_state
from tests import sessions
from tests.faults import designs, mutants, points
from tests.faults.points import Deliberate, point

sessions.usual = os.environ.get("FAULTS_SESSIONS", sessions.usual)
db: Any = sessions.make_db()
define_table(db.metadata, "idempotency_record")
designs.define_table(db.metadata)


class Payment(db.Model):  # type: ignore[misc]
    """The business table. Nothing is unique: a second run must show."""

    id: Mapped[int] = mapped_column(primary_key=True)
    scope: Mapped[str]
    key: Mapped[str]
    body: Mapped[int]
    execution: Mapped[str]


class Note(db.Model):  # type: ignore[misc]
    """What a child process has committed on its own."""

    id: Mapped[int] = mapped_column(primary_key=True)
    execution: Mapped[str]


def create_app() -> Flask:
    """What gunicorn calls, once, before it forks."""
    design = os.environ.get("FAULTS_DESIGN", "ours")
    logging.disable(logging.CRITICAL)  # what matters goes to the journal
    app = Flask(__name__)
    app.config.update(
        SQLALCHEMY_DATABASE_URI=os.environ["DATABASE_URL"],
        SQLALCHEMY_ENGINE_OPTIONS={"connect_args": {"connect_timeout": 5}},
    )
    db.init_app(app)
    with app.app_context():
        for name in ("connect", "checkout"):
            sa.event.listen(db.engine, name, lambda *_what: current_app.name)
    points.install(app)
    app.add_url_rule("/", view_func=lambda: str(os.getpid()), endpoint="ready")
    if design in designs.DESIGNS:
        view = designs.DESIGNS[design](db, os.environ["REDIS_URL"])(pay)
    else:
        view = _ours(app, design)
    app.add_url_rule("/payments", "pay", view, methods=["POST"])
    return app


def _ours(app: Flask, design: str) -> Any:
    """The view under this package, or under a mutant of it."""
    app.config["IDEMPOTENCY_REDIS_URL"] = os.environ["REDIS_URL"]
    app.config["IDEMPOTENCY_WAIT"] = float(os.environ.get("FAULTS_WAIT", "0"))
    lock.PROBE_AFTER_SECONDS = float(os.environ.get("FAULTS_PROBE_AFTER", "1"))
    purging.Purge.every = 2
    if design != "ours":
        mutants.MUTANTS[design].apply(app)
    scope = None if design == "no_scope" else lambda: request.headers["X-User"]
    idempotency = sessions.protect(app, db, scope=scope)
    points.install_in_stores(app_state(app))
    app.add_url_rule("/events", "events", lambda: fan_out(idempotency), methods=["POST"])
    return idempotent(pay)


def pay() -> Any:
    """Takes its time, writes, takes its time, commits, answers."""
    asked = request.get_json()
    attempt = current_operation.attempt if bool(current_operation) else 0
    execution = uuid.uuid4().hex
    half = float(request.headers.get("X-Sleep", "0")) / 2000
    fault = request.headers.get("X-Fault")
    points.note("run", body=asked["body"], attempt=attempt, execution=execution)
    point("view")
    time.sleep(half)
    if fault == "decline":
        return {"declined": execution}, 402
    if fault == "fork":
        leave_child(execution)
    payment = Payment(
        scope=request.headers["X-User"],
        key=request.headers["Idempotency-Key"],
        body=asked["body"],
        execution=execution,
    )
    db.session.add(payment)
    db.session.flush()
    point("write")
    time.sleep(half)
    db.session.commit()
    if fault == "raise":
        raise Deliberate
    if fault == "fail":
        return {"failed": execution}, 500
    return {"execution": execution, "attempt": attempt}, 201


def leave_child(execution: str) -> None:
    """Fork a child that commits a row of its own, and may outlive the request."""
    if os.fork():
        return
    points.is_child = True
    signal.alarm(CHILD_SECONDS)  # ends it, whatever another thread of the parent had locked
    app = current_app._get_current_object()  # type: ignore[attr-defined]
    # A fault may strike here as well: the error would leave the view in two processes.
    with suppress(sa.exc.SQLAlchemyError), app.app_context():
        session = db.session
        if sessions.usual == "plain":  # that of the thread would be the parent's
            session = sessions.factory_of(app, db)()
        session.add(Note(execution=execution))
        session.commit()
        points.note("child", execution=execution)
    os._exit(0)


CHILD_SECONDS = 1
"""Shorter than a retry may wait for the key of a worker that was killed: it stays locked until then."""


def fan_out(idempotency: Idempotency) -> Any:
    """A webhook's view: each event of the delivery is an operation of its own, in its own thread."""
    events = request.get_json()
    results: list[Any] = [None] * len(events)
    slow, fault = float(request.headers.get("X-Sleep", "0")) / 1000, request.headers.get("X-Fault", "")
    together = threading.Barrier(len(events))

    def work(number: int) -> None:
        event = events[number]
        points.asked.scope, points.asked.key = event["scope"], event["key"]
        points.asked.fault = fault if number == 0 else ""
        together.wait()
        try:
            results[number] = handle(idempotency, event, slow)
        finally:
            points.asked.fault = ""

    threads = [
        threading.Thread(target=copy_current_request_context(work), args=(number,))
        for number in range(len(events))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def handle(idempotency: Idempotency, event: dict[str, Any], slow: float) -> dict[str, Any]:
    """Handle an event at most once: what a client is told of it."""
    ran = []

    def charge() -> dict[str, Any]:
        ran.append(True)
        execution, attempt = uuid.uuid4().hex, current_operation.attempt
        points.note("run", body=event["body"], attempt=attempt, execution=execution)
        point("view")
        time.sleep(slow)

        def write() -> str:
            payment = {name: event[name] for name in ("scope", "key", "body")}
            db.session.add(Payment(**payment, execution=execution))
            db.session.commit()
            point("write")
            return execution

        steps = event["key"].startswith("leased")
        try:
            found = current_operation.step("write", write, atomic=True) if steps else write()
        except sa.exc.SQLAlchemyError as error:  # it may be written: the next request runs it again
            if not steps:
                raise
            raise OperationInterrupted from error
        return {"execution": found, "key": current_operation.key}

    more = LEASED if event["key"].startswith("leased") else {}
    try:
        result = idempotency.run(
            event["key"], charge, scope=event["scope"], payload=event["body"], name="event", **more
        )
    except Problem as problem:
        return {"status": problem.status}
    except (sa.exc.DBAPIError, LeaseLost):
        return {"status": 503}
    except Exception as error:
        points.note("error", text=repr(error))
        return {"status": 500}
    own = result["key"] == event["key"]
    answer = json.dumps(result)
    return {"status": 201 if own else 500, "answer": answer, "replayed": not ran, **result}


LEASED: Any = {
    "atomic": False,
    "lease": 1,
    "on_interrupted": "retry",
}
"""Short leases: after a kill, a retry need not wait for long, and a slow attempt is taken over."""


def create_tables(url: str) -> None:
    """Create all tables, here and not in each worker."""
    engine = sa.create_engine(url)
    try:
        db.metadata.create_all(engine)
    finally:
        engine.dispose()
