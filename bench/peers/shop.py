"""The measured application, as in ``bench/app.py``, but nothing of this project is imported here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from flask import Flask, request
from flask.typing import ResponseReturnValue
from flask_sqlalchemy import SQLAlchemy

BEFORE_COMMIT = "before the view's commit"
AFTER_COMMIT = "after the view's commit"


class Shop:
    """A Flask application: ``/empty`` does nothing, ``/bare`` writes a row and reads it when committed.

    Attributes:
        at: called with ``BEFORE_COMMIT`` and ``AFTER_COMMIT``, in every view that pays.
    """

    def __init__(self, database_url: str) -> None:
        self.at: Callable[[str], object] = lambda moment: None
        self.db = db = SQLAlchemy()

        class Payment(db.Model):  # type: ignore[name-defined, misc]
            id = sa.Column(sa.Integer, primary_key=True)
            amount = sa.Column(sa.Integer, nullable=False)

        self.Payment: Any = Payment
        self.app = Flask("peers")
        self.app.config["SQLALCHEMY_DATABASE_URI"] = database_url
        db.init_app(self.app)
        self.app.post("/bare", endpoint="bare")(self.view)
        self.app.post("/empty", endpoint="empty")(lambda: ({}, 201))

    def create_tables(self) -> None:
        """Make the tables that are missing: the shop's, and those that a package has added to them."""
        with self.app.app_context():
            self.db.create_all()

    def view(self) -> ResponseReturnValue:
        """Pay the amount that the request names."""
        return self.pay(request.get_json()["amount"]), 201

    def pay(self, amount: int) -> dict[str, Any]:
        """The same as a function, for packages that protect functions."""
        return self.pay_in(self.db.session, amount, commit=True)

    def pay_in(self, session: Any, amount: int, *, commit: bool) -> dict[str, Any]:
        """The same in a given session; without ``commit`` somebody else commits it."""
        payment = self.Payment(amount=amount)
        session.add(payment)
        self.at(BEFORE_COMMIT)
        if not commit:
            session.flush()
            return {"id": payment.id}
        session.commit()
        paid = {"id": payment.id}
        self.at(AFTER_COMMIT)
        return paid
