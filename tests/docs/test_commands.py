"""The outputs on the page of the commands are the real ones."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from flask import Blueprint, Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency, current_operation, idempotent
from tests.docs.how_to import outputs
from tests.docs.pages import ROOT, blocks
from tests.killed import Killed


def test_its_outputs_are_the_real_ones(postgres, redis_server):
    app, db = Flask("shop"), SQLAlchemy()
    app.config["SQLALCHEMY_DATABASE_URI"] = postgres.database("docs_commands")
    app.config["IDEMPOTENCY_REDIS_URL"] = redis_server.url
    db.init_app(app)
    idempotency = Idempotency(app, db, scope=None)

    def send_parcel():
        current_operation.step("stamp", lambda: {"number": 17})
        raise Killed

    for path, name, view, options in (
        ("/payments", "create_payment", lambda: ({"amount": 500}, 201), {}),
        ("/refunds", "create_refund", lambda: ({}, 500), {}),
        ("/orders", "send_order", lambda: ({}, 500), {"atomic": False}),
        ("/parcels", "send_parcel", send_parcel, {"atomic": False}),
    ):
        app.add_url_rule(path, name, idempotent(**options)(view), methods=["POST"])
    quotes = Blueprint("quotes", __name__)
    idempotency.protect(quotes, ttl=3600)
    quotes.add_url_rule("/quotes", "create", dict, methods=["POST"])
    app.register_blueprint(quotes)
    app.add_url_rule("/photos", "upload_photo", dict, methods=["PUT"])
    for block in blocks(ROOT / "docs/api.md", "console"):
        for output in outputs(app, block):
            if output.endswith("created the table\n"):
                work(app, db)
    with app.app_context():
        db.engine.dispose()


def work(app, db):
    """Seven records, of which the first has expired, and two are of views that were killed."""
    post = app.test_client().post
    for key, path in enumerate(("/payments", "/payments", "/payments", "/refunds", "/orders")):
        post(path, headers={"Idempotency-Key": str(key)})
    for number in 1, 2:
        with pytest.raises(Killed):
            post("/parcels", headers={"Idempotency-Key": f"parcel-{number}"})
    first = "(SELECT key FROM idempotency_record ORDER BY created_at LIMIT 1)"
    with app.app_context(), db.engine.begin() as connection:
        for change in (
            f"expires_at = clock_timestamp() WHERE key = {first}",
            "lease_expires_at = created_at WHERE lease_expires_at IS NOT NULL",
        ):
            connection.execute(sa.text(f"UPDATE idempotency_record SET {change}"))
