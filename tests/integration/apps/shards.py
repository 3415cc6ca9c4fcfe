"""An application for each tenant, behind a router; one extension serves them all."""

import os

from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import Mapped, mapped_column
from werkzeug.exceptions import NotFound

from flask_idempotency import Idempotency, idempotent

db = SQLAlchemy()
idempotency = Idempotency(scope=lambda: request.headers.get("X-Account"))


class Payment(db.Model):
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int]


def create_app(url):
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = url
    db.init_app(app)
    idempotency.init_app(app, db)
    app.add_url_rule("/payments", view_func=pay, methods=["POST"])
    with app.app_context():
        db.create_all()
    return app


@idempotent
def pay():
    payment = Payment(amount=request.get_json()["amount"])
    db.session.add(payment)
    db.session.commit()
    return {"id": payment.id, "amount": payment.amount}, 201


shards = {
    "eu": create_app(os.environ["EU_DATABASE_URL"]),
    "us": create_app(os.environ["US_DATABASE_URL"]),
}


def app(environ, start_response):
    shard = shards.get(environ.get("HTTP_X_TENANT"), NotFound())
    return shard(environ, start_response)
