"""The shop of ``test_several_databases.py``: one application, a database for each tenant."""

from __future__ import annotations

import os
import signal
from typing import Any

import sqlalchemy as sa
from flask import Flask, g, request
from flask_sqlalchemy import SQLAlchemy
from flask_sqlalchemy.session import Session as BindSession
from flask_sqlalchemy_lite import SQLAlchemy as Lite
from sqlalchemy import orm

from flask_idempotency import Idempotency, current_operation, idempotent
from flask_idempotency.stores.redis import lock

TENANTS = ["eu", "us"]


class Base(orm.DeclarativeBase):
    pass


class Payment(Base):
    """One model, and a table for it in each tenant's database."""

    __tablename__ = "payment"

    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    key: orm.Mapped[str]  # deliberately not unique: a second run must show
    tenant: orm.Mapped[str]


def die_at(point: str) -> None:
    """End this worker if the request says so, as kill -9 does."""
    if request.headers.get("X-Die") == point:
        os.kill(os.getpid(), signal.SIGKILL)


def make_db(kind: str) -> Any:
    """Sessions that work on the tenant's engine, as the applications of either extension have them."""
    if kind == "lite":

        class LiteSession(orm.Session):
            def get_bind(self, *_args: Any, **_kwargs: Any) -> sa.Engine:
                return db.engines[g.tenant]

        db: Any = Lite(session_options={"class_": LiteSession})
    else:

        class TenantSession(BindSession):
            def get_bind(self, *_args: Any, **_kwargs: Any) -> Any:
                return self._db.engines[g.tenant]

        db = SQLAlchemy(model_class=Base, session_options={"class_": TenantSession})
    return db


def make_app(kind: str, urls: dict[str, str], **config: Any) -> tuple[Flask, Any, Idempotency]:
    """``urls`` are those of all databases: tenants' and others."""
    app, db = Flask("tenants"), make_db(kind)
    app.config.update(IDEMPOTENCY_BINDS=TENANTS, IDEMPOTENCY_BIND_KEY=lambda: g.tenant)
    if kind == "lite":
        app.config["SQLALCHEMY_ENGINES"] = {"default": urls["eu"], **urls}
    else:
        app.config.update(SQLALCHEMY_DATABASE_URI=urls["eu"], SQLALCHEMY_BINDS=urls)
    app.config.update(config)
    db.init_app(app)

    @app.before_request
    def find_tenant() -> None:
        g.tenant = request.headers.get("X-Tenant")

    metadata = {"metadata": Base.metadata} if kind == "lite" else {}
    # One account in all of them: nothing but the database tells their keys apart.
    idempotency = Idempotency(app, db, scope=lambda: "the account", **metadata)
    app.add_url_rule("/", view_func=lambda: "ready", endpoint="ready")
    app.add_url_rule("/payments", view_func=pay, methods=["POST"])
    app.extensions["db"] = db
    return app, db, idempotency


def create_tables(app: Flask, db: Any, kind: str, tenants: list[str] = TENANTS) -> None:
    """The models' and the records' tables, in each tenant's database."""
    with app.app_context():
        for tenant in tenants:
            metadatas = [Base.metadata, *([] if kind == "lite" else [db.metadatas[tenant]])]
            for metadata in metadatas:
                metadata.create_all(db.engines[tenant])


@idempotent
def pay() -> Any:
    """Write one row, in steps that a worker may die between."""
    from flask import current_app

    session = current_app.extensions["db"].session
    key = request.headers["Idempotency-Key"]
    payment = Payment(key=key, tenant=g.tenant)
    session.add(payment)
    session.flush()
    die_at("written")
    session.commit()
    die_at("committed")
    attempt = current_operation.attempt if current_operation else 0
    return {"id": payment.id, "tenant": g.tenant, "attempt": attempt}, 201


def create_app() -> Flask:
    """What gunicorn loads."""
    lock.PROBE_AFTER_SECONDS = 0.1
    kind, urls = os.environ["SESSIONS"], {name: os.environ[name.upper()] for name in TENANTS}
    redis = os.environ.get("REDIS_URL") or None
    app, db, _ = make_app(kind, urls, IDEMPOTENCY_REDIS_URL=redis)
    create_tables(app, db, kind)
    return app
