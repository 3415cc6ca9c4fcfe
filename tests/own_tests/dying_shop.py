"""A shop in a process of its own whose first view stays until somebody kills it."""

from __future__ import annotations

import threading
from typing import Any

import sqlalchemy as sa
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency, idempotent


def main(url: str) -> None:
    """Write a payment, say so, and stay."""
    app, db = Flask("shop"), SQLAlchemy()
    app.config.update(SQLALCHEMY_DATABASE_URI=url, IDEMPOTENCY_STORE="postgres")
    db.init_app(app)
    Idempotency(app, db, scope=lambda: "alice")

    def pay() -> Any:
        db.session.execute(sa.text("insert into payment (amount) values (1)"))
        db.session.commit()
        print("paid", flush=True)
        threading.Event().wait()

    app.post("/payments", endpoint="pay")(idempotent(pay))
    app.test_client().post("/payments", json={"amount": 5}, headers={"Idempotency-Key": "key-1"})
