"""``/webhooks/provider``: what the card provider tells, which it does again until it gets a 2xx."""

import hashlib
import hmac
from datetime import timedelta
from typing import Any

from flask import Blueprint, abort, current_app, request
from flask.typing import ResponseReturnValue

from example.extensions import db, idempotency
from example.orders import give_back, lock

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
    idempotency.run(event["id"], handle, event, scope="card-provider", ttl=KNOWN_FOR)
    return "", 204


def handle(event: dict[str, Any]) -> None:
    """The order is paid, unless a later event came first; or the money went back, so the goods do."""
    order_id = int(event["charge"]["reference"].removeprefix("order-"))
    if event["type"] == "charge.refunded":
        give_back(order_id, "refunded")
    elif event["type"] == "charge.succeeded":
        order = lock(order_id)
        if order.status in {"reserved", "confirmed"}:
            order.status = "paid"
        db.session.commit()
