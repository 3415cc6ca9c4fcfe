"""A shop of one view on the tables of ``example/``, for any release.

It imports nothing of ``example/``, which needs the present release.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from flask import Flask, abort, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import select
from sqlalchemy.engine import make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import flask_idempotency
from flask_idempotency import Idempotency, idempotent

_ENGINE = {
    "pool_size": 8,
    "max_overflow": 0,
    "pool_timeout": 5,
    "pool_pre_ping": True,
    "connect_args": {
        "connect_timeout": 3,
        "options": "-c statement_timeout=10s -c idle_in_transaction_session_timeout=30s",
    },
}


class Base(DeclarativeBase):
    pass


db = SQLAlchemy(model_class=Base)
idempotency = Idempotency()


class Account(db.Model):  # type: ignore[name-defined, misc]
    id: Mapped[int] = mapped_column(primary_key=True)
    token_digest: Mapped[bytes]
    balance: Mapped[int]


class Payment(db.Model):  # type: ignore[name-defined, misc]
    id: Mapped[int] = mapped_column(primary_key=True)
    account_id: Mapped[int]
    amount: Mapped[int]
    description: Mapped[str]


def token() -> str | None:
    return request.authorization.token if request.authorization else None


def index() -> dict[str, str]:
    """Which release it runs."""
    return {"release": str(Path(flask_idempotency.__file__).parent.parent)}


@idempotent
def pay() -> Any:
    mine = Account.token_digest == hashlib.sha256((token() or "").encode()).digest()
    account = db.session.scalar(select(Account).where(mine).with_for_update())
    if account is None:
        abort(401)
    asked = request.get_json()
    account.balance -= asked["amount"]
    payment = Payment(account_id=account.id, **asked)
    db.session.add(payment)
    db.session.commit()
    return {"id": payment.id, "description": payment.description}, 201


def create_app() -> Flask:
    """One application with one database."""
    app = Flask(__name__)
    url = make_url(os.environ["DATABASE_URL"]).set(drivername="postgresql+psycopg2")
    app.config.update(
        SQLALCHEMY_ENGINE_OPTIONS=_ENGINE,
        SECRET_KEY=os.environ["SECRET_KEY"],
        IDEMPOTENCY_REDIS_URL=os.environ["REDIS_URL"],
        SQLALCHEMY_DATABASE_URI=url.render_as_string(hide_password=False),
    )
    db.init_app(app)
    idempotency.init_app(app, db, scope=token)
    app.add_url_rule("/", view_func=index)
    app.add_url_rule("/payments", view_func=pay, methods=["POST"])
    return app
