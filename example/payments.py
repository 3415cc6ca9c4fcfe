"""``/payments``: pay from the balance, and list what was paid."""

from typing import Any

from flask import Blueprint, abort, request, url_for
from flask.typing import ResponseReturnValue
from flask_login import current_user

from example import accounts
from example.errors import InsufficientFunds
from example.extensions import db
from example.models import Account, Payment
from flask_idempotency import idempotent

blueprint = Blueprint("payments", __name__, url_prefix="/payments")
blueprint.before_request(accounts.require_token)

MOST = 1_000_000_00  # cents; no payment of this shop is larger, so more is a mistake


@blueprint.post("")
@idempotent
def pay() -> ResponseReturnValue:
    payment = make_payment(request.get_json())
    location = url_for("payments.show", payment_id=payment["id"])
    return payment, 201, {"Location": location}


def make_payment(body: Any) -> dict[str, Any]:
    """Move the money. Raises 400 for a wrong amount, and 402 if there is not enough."""
    amount = body.get("amount") if isinstance(body, dict) else None
    if type(amount) is not int or not 1 <= amount <= MOST:
        abort(400, f"amount must be a number of cents from 1 to {MOST}.")
    account = lock_account()
    if account.balance < amount:
        raise InsufficientFunds
    account.balance -= amount
    description = str(body.get("description", ""))[:200]
    payment = Payment(account_id=account.id, amount=amount, description=description)
    db.session.add(payment)
    db.session.commit()  # together with the response, or not at all
    return payment.to_dict()


def lock_account() -> Account:
    """The caller's account as it is now, locked until the transaction ends: payments wait in line."""
    mine = current_user.id
    return db.session.get_one(Account, mine, with_for_update=True, populate_existing=True)


@blueprint.get("")
def latest() -> dict[str, Any]:
    return {"payments": [payment.to_dict() for payment in accounts.latest(Payment)]}


@blueprint.get("/<int:payment_id>")
def show(payment_id: int) -> dict[str, Any]:
    return accounts.one_of_mine(Payment, payment_id).to_dict()
