"""The measured application: its views, unprotected and protected."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from flask import Flask, request
from flask.testing import FlaskClient
from flask.typing import ResponseReturnValue
from flask_sqlalchemy import SQLAlchemy


def make_client(
    database_url: str,
    *,
    redis_url: str | None = None,
    protect: bool = True,
    during: Callable[[], object] = lambda: None,
) -> FlaskClient:
    """A client of an application of its own.

    ``/empty`` does nothing, ``/bare`` writes a row and reads it after its commit. With ``protect``
    there are three protected views: ``/payments`` does what ``/bare`` does, ``/held`` calls ``during``,
    ``/text`` responds with 200 bytes.
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

    def hold() -> ResponseReturnValue:
        during()
        return {}, 201

    app = Flask("bench")
    app.config["SQLALCHEMY_DATABASE_URI"] = database_url
    db.init_app(app)
    if protect:
        # Only here: what the import takes is measured, too.
        from flask_idempotency import Idempotency, idempotent

        app.config["IDEMPOTENCY_REDIS_URL"] = redis_url
        Idempotency(app, db, scope=None)
        app.post("/payments", endpoint="payments")(idempotent(pay))
        app.post("/held", endpoint="held")(idempotent(hold))
        app.post("/text", endpoint="text")(idempotent(lambda: (secrets.token_hex(100), 201)))
    app.post("/bare", endpoint="bare")(pay)
    app.post("/empty", endpoint="empty")(lambda: ({}, 201))
    with app.app_context():
        db.create_all()
    return app.test_client()
