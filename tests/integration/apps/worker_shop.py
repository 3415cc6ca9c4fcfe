"""The shop of ``test_workers.py``: what gunicorn loads, in each kind of worker."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.multiprocess import MultiProcessCollector
from sqlalchemy import func, select
from sqlalchemy.orm import Mapped, mapped_column
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from flask_idempotency import Idempotency, current_operation, extension, idempotent
from flask_idempotency.integrations.prometheus import RecordsCollector, export_metrics

db = SQLAlchemy()
idempotency = Idempotency()


class Payment(db.Model):
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str]  # deliberately not unique: a second run must show


def create_app():
    """Uses the database, so that a preloading gunicorn forks with a connection in the pool."""
    extension.MAX_WAITERS = int(os.environ.get("MAX_WAITERS", "4"))
    app = Flask(__name__)
    app.config.update(
        SQLALCHEMY_DATABASE_URI=os.environ["DATABASE_URL"],
        IDEMPOTENCY_REDIS_URL=os.environ.get("REDIS_URL") or None,
        IDEMPOTENCY_WAIT=float(os.environ.get("WAIT", "0")),
    )
    db.init_app(app)
    idempotency.init_app(app, db, scope=lambda: request.headers["X-User"])
    app.add_url_rule("/", view_func=lambda: "ready", endpoint="ready")
    app.add_url_rule("/payments", view_func=pay, methods=["POST"])
    app.add_url_rule("/held-payments", view_func=pay_when_told, methods=["POST"])
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        export_all_metrics(app)
    with app.app_context():
        db.create_all()
    if key := os.environ.get("USED_BEFORE_FORK"):
        app.test_client().post("/payments", headers={"Idempotency-Key": key, "X-User": "alice"})
    return app


def export_all_metrics(app):
    """What the page on monitoring says for several processes."""
    export_metrics(app)
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    registry.register(RecordsCollector(app))
    metrics = make_wsgi_app(registry)
    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/metrics": metrics})


@idempotent
def pay():
    """Long enough that its duplicates find it running, and that greenlets change places."""
    payment = Payment(key=current_operation.key)
    db.session.add(payment)
    db.session.execute(select(func.pg_sleep(0.003)))
    db.session.commit()
    return _receipt(payment)


@idempotent
def pay_when_told():
    """Its first attempt tells the test that it is there, and goes on when the test says so."""
    payment = Payment(key=current_operation.key)
    db.session.add(payment)
    db.session.commit()
    if current_operation.attempt == 1:
        Path(os.environ["ARRIVED"]).write_text(str(os.getpid()))
        Path(os.environ["GO_ON"]).read_text()
    return _receipt(payment)


def _receipt(payment):
    """What no other run, process or request would answer."""
    return {
        "id": payment.id,
        "key": payment.key,
        "attempt": current_operation.attempt,
        "process": os.getpid(),
        "token": secrets.token_hex(8),
    }, 201
