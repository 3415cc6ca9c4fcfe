"""The application factory puts everything together in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flask import Flask, g
from sqlalchemy.engine import make_url
from werkzeug.exceptions import HTTPException

from example import accounts, pages, payments, seed
from example.auth import operator
from example.errors import as_problem
from example.extensions import idempotency
from example.models import db

# A view that hangs must not hold an account's row forever. gunicorn cannot end one thread, so the
# database ends the transaction: after 10 s in one statement, or 30 s between two.
_LIMITS = "-c statement_timeout=10s -c idle_in_transaction_session_timeout=30s"


def create_app(config: Mapping[str, Any] | None = None) -> Flask:
    """The shop, configured by ``DATABASE_URL`` and ``REDIS_URL`` (optional); ``config`` wins."""
    app = Flask(__name__)
    app.config.update(
        SQLALCHEMY_DATABASE_URI=_database_url(),
        SQLALCHEMY_ENGINE_OPTIONS={
            # After a restart of Postgres, no request fails on a stale connection.
            "pool_pre_ping": True,
            "connect_args": {"options": _LIMITS},
        },
        IDEMPOTENCY_REDIS_URL=os.environ.get("REDIS_URL") or None,
        # Both are for the operator's page: the one signs its forms, the other lets in.
        SECRET_KEY=os.environ.get("SECRET_KEY"),
        OPERATOR_PASSWORD=os.environ.get("OPERATOR_PASSWORD"),
    )
    app.config.update(config or {})
    if not app.config["SQLALCHEMY_DATABASE_URI"]:
        raise RuntimeError("DATABASE_URL is missing: postgresql+psycopg2://user@host/database")
    db.init_app(app)
    idempotency.init_app(app, db, scope=lambda: g.account_id)
    for part in (accounts, payments, pages):
        app.register_blueprint(part.blueprint)
    console = idempotency.console_blueprint(authorize=operator)
    app.register_blueprint(console, url_prefix="/operations")
    app.register_error_handler(HTTPException, as_problem)
    app.cli.add_command(seed.command)
    return app


def _database_url() -> str | None:
    """``DATABASE_URL`` with the driver named, because hosting services write ``postgres://``."""
    url = os.environ.get("DATABASE_URL")
    if not url:
        return None
    named = make_url(url).set(drivername="postgresql+psycopg2")
    return named.render_as_string(hide_password=False)
