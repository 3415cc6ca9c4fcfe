"""``/webhooks/provider``: what the card provider tells, which it does again until it gets a 2xx."""

import hashlib
import hmac
from datetime import timedelta
from typing import Any

from flask import Blueprint, abort, current_app, request
from flask.typing import ResponseReturnValue

from example.extensions import db, idempotency
from example.orders import lock
from example.products import restock

blueprint = Blueprint("webhooks", __name__, url_prefix="/webhooks")

KNOWN_FOR = timedelta(days=30)  # an event; the provider gives up before that


@blueprint.before_request
def check_signature() -> None:
    """Reject what the provider has not signed, before anything else looks at it."""
    secret = current_app.config["WEBHOOK_SECRET"]  # without one, nobody can sign
    ours = hmac.new((secret or "").encode(), request.get_data(), hashlib.sha256).hexdigest()
    if not secret or not hmac.compare_digest(ours, request.headers.get("X-Signature", "")):
        abort(401, "The signature is wrong.")


@blueprint.post("/provider")
def receive() -> ResponseReturnValue:
    """The event's own identifier is the key, so however often it comes, it counts once."""
    event = request.get_json()
    if (handle := HANDLERS.get(event["type"])) is not None:
        charge = event["charge"]
        idempotency.run(event["id"], handle, charge, scope="card-provider", ttl=KNOWN_FOR)
    return "", 204


def succeeded(charge: dict[str, Any]) -> None:
    """The order is paid, unless a later event has come first."""
    order = lock(_order_of(charge))
    if order.status in {"reserved", "confirmed"}:
        order.status = "paid"
    db.session.commit()


def refunded(charge: dict[str, Any]) -> None:
    """The money went back, so the goods do: twice would be as wrong as never."""
    order = lock(_order_of(charge))
    order.status = "refunded"
    restock(order.product_id, order.quantity)
    db.session.commit()


def _order_of(charge: dict[str, Any]) -> int:
    return int(charge["reference"].removeprefix("order-"))


HANDLERS = {"charge.succeeded": succeeded, "charge.refunded": refunded}
