"""``/orders``: buy by card. The charge is made by another service, which no database can roll back."""

from typing import Any

from flask import Blueprint, abort, request, url_for
from flask.typing import ResponseReturnValue
from flask_login import current_user

from example import accounts, provider
from example.errors import CardDeclined
from example.extensions import db
from example.models import Order
from example.products import MOST, take
from flask_idempotency import current_operation, idempotent

blueprint = Blueprint("orders", __name__, url_prefix="/orders")
blueprint.before_request(accounts.require_token)


@blueprint.post("")
@idempotent(atomic=False, on_interrupted="retry")
def create() -> ResponseReturnValue:
    product_id, quantity, card = read_order(request.get_json())
    operation = current_operation
    order = operation.step("reserve", reserve, product_id, quantity, atomic=True)
    amount, reference, key = order["amount"], order["reference"], operation.derive_key("charge")
    charge = operation.step("charge", provider.charge, amount, reference, key, card=card)
    if charge is None:
        operation.step("give back", give_back, order["id"], atomic=True)
        raise CardDeclined
    confirmed = operation.step("confirm", confirm, order["id"], charge["id"], atomic=True)
    return confirmed, 201, {"Location": url_for("orders.show", order_id=order["id"])}


def reserve(product_id: int, quantity: int) -> dict[str, Any]:
    """An order, and its goods out of stock."""
    amount = take(product_id, quantity).price * quantity
    bought = {"product_id": product_id, "quantity": quantity, "amount": amount}
    db.session.add(order := Order(account_id=current_user.id, **bought))
    db.session.commit()
    return {"id": order.id, "amount": order.amount, "reference": order.reference}


def confirm(order_id: int, charge_id: str) -> dict[str, Any]:
    """Note the charge. The provider's event may have come first, and knows more."""
    order = lock(order_id)
    order.charge_id = charge_id
    if order.status == "reserved":
        order.status = "confirmed"
    db.session.commit()
    return order.to_dict()


def give_back(order_id: int, status: str = "declined") -> None:
    """Not paid, or not any more: the goods are for others. Twice would be as wrong as never."""
    order = lock(order_id)
    order.status = status
    db.session.refresh(order.product, with_for_update=True)
    order.product.stock += order.quantity
    db.session.commit()


def lock(order_id: int) -> Order:
    """The order as it is now, locked until the transaction ends."""
    return db.session.get_one(Order, order_id, with_for_update=True, populate_existing=True)


def read_order(body: Any) -> tuple[int, int, str]:
    """Product, quantity and card of a JSON body."""
    match {"quantity": 1, **body} if isinstance(body, dict) else body:
        case {"product": int(product_id), "quantity": int(quantity), "card": str(card)}:
            if 1 <= quantity <= MOST:
                return product_id, quantity, card
    abort(400, f"An order has a product (a number), a quantity (1 to {MOST}), and a card (a text).")


@blueprint.get("/<int:order_id>")
def show(order_id: int) -> dict[str, Any]:
    return accounts.one_of_mine(Order, order_id).to_dict()
