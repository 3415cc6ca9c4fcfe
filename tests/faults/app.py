"""The application under test: one protected view, as gunicorn loads it.

``FAULTS_DESIGN`` names what protects the view: this package (``ours``), a mutant of it, or another
design. A request's headers say how long the view takes (``X-Sleep``, milliseconds) and what goes
wrong (``X-Fault``); they are no part of the fingerprint, so each retry may fare otherwise.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from typing import Any

import sqlalchemy as sa
from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import Mapped, mapped_column

from flask_idempotency import Idempotency, current_operation, idempotent
from flask_idempotency.stores.table import define_steps, define_table
from flask_idempotency.web.setup.state import app_state
from tests.faults import designs, mutants, points
from tests.faults.points import Deliberate, point

db = SQLAlchemy()
define_steps(define_table(db.metadata, "idempotency_record"))
designs.define_table(db.metadata)


class Payment(db.Model):  # type: ignore[name-defined, misc]
    """The business table. Nothing is unique: a second run must show."""

    id: Mapped[int] = mapped_column(primary_key=True)
    scope: Mapped[str]
    key: Mapped[str]
    body: Mapped[int]
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
    app.config["IDEMPOTENCY_PROBE_AFTER"] = float(os.environ.get("FAULTS_PROBE_AFTER", "1"))
    if design != "ours":
        mutants.MUTANTS[design].apply(app)
    scope = None if design == "no_scope" else lambda: request.headers["X-User"]
    Idempotency(app, db, scope=scope)
    points.install_in_stores(app_state(app))
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


def create_tables(url: str) -> None:
    """Create all tables, here and not in each worker."""
    engine = sa.create_engine(url)
    try:
        db.metadata.create_all(engine)
    finally:
        engine.dispose()
