"""The example with one more view: a payment whose first attempt never ends by itself.

It debits the account and inserts the payment, tells its process id through the named pipe of
``SLOW_SHOP_PIPE``, and stays: in Python, or inside a statement.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from flask import Blueprint, Flask, request
from sqlalchemy import func, select

from example import create_app as create_shop
from example.accounts import require_token
from example.extensions import csrf, db
from example.models import Payment
from example.payments import lock_account
from flask_idempotency import current_operation, idempotent

blueprint = Blueprint("slow", __name__)
blueprint.before_request(require_token)


@blueprint.post("/slow-payments")
@idempotent
def pay() -> Any:
    asked = request.get_json()
    account = lock_account()
    account.balance -= asked["amount"]
    payment = Payment(account_id=account.id, amount=asked["amount"], description="slow")
    db.session.add(payment)
    db.session.commit()
    if current_operation.attempt == 1:
        stay(asked["where"])
    return {"id": payment.id, "attempt": current_operation.attempt}, 201


def stay(where: str) -> None:
    if where == "statement":
        db.session.connection()  # so that only the sleep itself comes after the message
    with open(os.environ["SLOW_SHOP_PIPE"], "w") as pipe:  # noqa: PTH123 -- waits for its reader
        pipe.write(str(os.getpid()))
    if where == "statement":
        db.session.execute(select(func.pg_sleep(60)))
    threading.Event().wait(60)


def create_app() -> Flask:
    app = create_shop()
    csrf.exempt(blueprint)
    app.register_blueprint(blueprint)
    return app
