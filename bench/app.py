"""The measured application: one view, bare and protected, and one that does nothing."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from flask import Flask, request
from flask.testing import FlaskClient
from flask.typing import ResponseReturnValue
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency, idempotent


def make_client(
    database_url: str,
    *,
    redis_url: str | None = None,
    protect: bool = True,
    store: str | None = None,
    atomic: bool = True,
) -> FlaskClient:
    """A client of an application of its own; ``store`` as in ``IDEMPOTENCY_STORE``.

    ``/empty`` does nothing, ``/bare`` writes a row and reads it after its commit, ``/payments`` is the
    same view, protected.
    """
    db = SQLAlchemy()

    class Payment(db.Model):  # type: ignore[name-defined, misc]
        id = sa.Column(sa.Integer, primary_key=True)
        amount = sa.Column(sa.Integer, nullable=False)

    def pay() -> ResponseReturnValue:
        payment: Any = Payment(amount=request.get_json()["amount"])
        db.session.add(payment)
        db.session.commit()
        return {"id": payment.id}, 201

    app = Flask("bench")
    app.config.update(SQLALCHEMY_DATABASE_URI=database_url, IDEMPOTENCY_REDIS_URL=redis_url)
    if not protect:
        del app.config["IDEMPOTENCY_REDIS_URL"]
    db.init_app(app)
    if protect:
        app.config["IDEMPOTENCY_STORE"] = store
        Idempotency(app, db, scope=None)
        app.post("/payments", endpoint="payments")(idempotent(atomic=atomic)(pay))
    app.post("/bare", endpoint="bare")(pay)
    app.post("/empty", endpoint="empty")(lambda: ({}, 201))
    with app.app_context():
        db.create_all()
    return app.test_client()
