"""The shop without the extension: what a careful developer writes then.

Nothing else is taken away: the account's row is locked, each write is one transaction, the form has its
CSRF token, and the card provider gets a key of its own for each order.
"""

from __future__ import annotations

from flask import Flask, request, url_for
from flask.typing import ResponseReturnValue

import example
from example import orders, provider
from example.errors import CardDeclined


def create_order() -> ResponseReturnValue:
    """``orders.create`` without steps: reserve, charge, confirm."""
    product_id, quantity, card = orders.read_order(request.get_json())
    order = orders.reserve(product_id, quantity)
    charge = provider.charge(
        order["amount"],
        order["reference"],
        order["reference"],  # the key: never two charges for one order
        card=card,
    )
    if charge is None:
        orders.give_back(order["id"])
        raise CardDeclined
    confirmed = orders.confirm(order["id"], charge["id"])
    return confirmed, 201, {"Location": url_for("orders.show", order_id=order["id"])}


def create_app() -> Flask:
    """The shop with the extension switched off: each view runs as if it had no ``@idempotent``."""
    app = example.create_app({"IDEMPOTENCY_ENABLED": False})
    app.view_functions["orders.create"] = create_order
    return app
