"""The application factory puts everything together in one place."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flask import Flask
from sqlalchemy.engine import make_url
from werkzeug.exceptions import HTTPException

from example import accounts, checkout, logs, operations, orders, payments, products, seed, webhooks
from example.errors import as_response
from example.extensions import csrf, db, idempotency, login_manager, migrate

PAGES = (products, checkout, accounts)  # for browsers, which sign in by a form
API = (payments, orders, webhooks)  # for programs, which send a token or a signature

# A silent server must not hold a request for ever, nor a view that hangs an account's row: the database
# ends the transaction after 10 s in one statement, or 15 s between two: Patroni waits for 20 s or more.
_ENGINE = {
    "pool_size": 8,  # one for each thread of a worker: see gunicorn.conf.py
    "max_overflow": 0,
    "pool_timeout": 5,  # seconds
    "pool_pre_ping": True,  # after a restart of PostgreSQL, no page fails on a stale connection
    "connect_args": {
        "connect_timeout": 3,  # seconds
        "tcp_user_timeout": 5000,  # milliseconds
        "keepalives_idle": 5,
        "keepalives_interval": 1,
        "keepalives_count": 3,
        "options": "-c statement_timeout=10s -c idle_in_transaction_session_timeout=15s",
    },
}


def create_app(config: Mapping[str, Any] | None = None) -> Flask:
    """The shop, configured by the environment (see the README); ``config`` wins."""
    app = Flask(__name__)
    app.config.update(
        SQLALCHEMY_DATABASE_URI=_database_url(),
        SQLALCHEMY_ENGINE_OPTIONS=_ENGINE,
        SECRET_KEY=os.environ.get("SECRET_KEY"),
        # A page of another site cannot use the cookie; it needs TLS, except on a developer's machine.
        SESSION_COOKIE_SAMESITE="Lax",
        SESSION_COOKIE_SECURE=os.environ.get("BEHIND_TLS") == "1",
        WTF_CSRF_TIME_LIMIT=None,  # as long as the session: a form may stay open for a day
        MAX_CONTENT_LENGTH=1024 * 1024,
        IDEMPOTENCY_REDIS_URL=os.environ.get("REDIS_URL") or None,
        # Responses and steps say who bought what, so they are encrypted where they lie.
        IDEMPOTENCY_ENCRYPTION_KEYS=os.environ.get("ENCRYPTION_KEYS", "").split(),
        OPERATOR_PASSWORD=os.environ.get("OPERATOR_PASSWORD"),
        PROVIDER_URL=os.environ.get("PROVIDER_URL", "http://127.0.0.1:8001"),
        WEBHOOK_SECRET=os.environ.get("WEBHOOK_SECRET"),
    )
    app.config.update(config or {})
    if not app.testing:  # pytest catches the log itself
        logs.configure(app)
    for name, variable in ("SQLALCHEMY_DATABASE_URI", "DATABASE_URL"), ("SECRET_KEY", "SECRET_KEY"):
        if not app.config[name]:
            raise RuntimeError(f"{variable} is missing: see example/README.md")
    db.init_app(app)
    migrate.init_app(app, db, directory=str(Path(__file__).parent / "migrations"))
    login_manager.init_app(app)
    csrf.init_app(app)
    idempotency.init_app(app, db, scope=accounts.scope)
    for part in (*PAGES, *API):
        app.register_blueprint(part.blueprint)
    for part in API:
        csrf.exempt(part.blueprint)
    operations.init_app(app)
    app.register_error_handler(HTTPException, as_response)
    app.add_template_filter(money)
    app.cli.add_command(seed.command)
    return app


def money(cents: int) -> str:
    return f"€\N{NO-BREAK SPACE}{cents / 100:,.2f}"


def _database_url() -> str | None:
    """``DATABASE_URL`` with the driver named, because hosting services write ``postgres://``."""
    if not (url := os.environ.get("DATABASE_URL")):
        return None
    return make_url(url).set(drivername="postgresql+psycopg2").render_as_string(hide_password=False)
