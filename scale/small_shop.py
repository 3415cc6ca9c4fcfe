"""A shop of one view on the tables of ``example/``: for any release, for tenants, and for shards.

It imports nothing of ``example/``, which needs the present release.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flask import Flask, abort, current_app, request
from flask_sqlalchemy import SQLAlchemy
from flask_sqlalchemy.session import Session
from sqlalchemy import select
from sqlalchemy.engine import make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import flask_idempotency
from flask_idempotency import Idempotency, idempotent

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

TENANTS = ("t0", "t1", "t2", "t3")
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


class TenantSession(Session):
    """Goes to the database of the request's tenant where there are tenants."""

    def get_bind(self, *args: Any, **kwargs: Any) -> Any:
        if current_app.config.get("IDEMPOTENCY_BINDS"):
            return db.engines[tenant()]
        return super().get_bind(*args, **kwargs)


db = SQLAlchemy(model_class=Base, session_options={"class_": TenantSession})
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


def tenant() -> str:
    return request.headers["X-Tenant"]


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


def create_app(**config: Any) -> Flask:
    """One application with one database, unless ``config`` has it otherwise."""
    app = Flask(__name__)
    app.config.update(
        SQLALCHEMY_ENGINE_OPTIONS=_ENGINE,
        SECRET_KEY=os.environ["SECRET_KEY"],
        IDEMPOTENCY_REDIS_URL=os.environ["REDIS_URL"],
        **(config or {"SQLALCHEMY_DATABASE_URI": _named(os.environ["DATABASE_URL"])}),
    )
    db.init_app(app)
    idempotency.init_app(app, db, scope=token)
    app.add_url_rule("/", view_func=index)
    app.add_url_rule("/payments", view_func=pay, methods=["POST"])
    return app


def with_tenants() -> Flask:
    """One application over the databases of all tenants."""
    binds = {name: {"url": url, **_ENGINE} for name, url in _urls().items()}
    return create_app(
        SQLALCHEMY_BINDS=binds, IDEMPOTENCY_BINDS=list(binds), IDEMPOTENCY_BIND_KEY=tenant
    )


def with_shards() -> WSGIApplication:
    """An application for each database, and a router that goes by the tenant."""
    apps = {name: create_app(SQLALCHEMY_DATABASE_URI=url) for name, url in _urls().items()}

    def route(environ: WSGIEnvironment, start_response: StartResponse) -> Any:
        return apps[environ.get("HTTP_X_TENANT", TENANTS[0])](environ, start_response)

    return route


def _urls() -> dict[str, str]:
    return {name: _named(os.environ[f"DATABASE_URL_{name}"]) for name in TENANTS}


def _named(url: str) -> str:
    """The URL with its driver named."""
    return make_url(url).set(drivername="postgresql+psycopg2").render_as_string(hide_password=False)
