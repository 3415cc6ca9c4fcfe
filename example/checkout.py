"""``/checkout/<product>``: the same as a page, paid from the balance. It works without JavaScript."""

from flask import Blueprint, abort, flash, redirect, render_template, request, url_for
from flask.typing import ResponseReturnValue
from flask_login import login_required
from flask_wtf import FlaskForm
from flask_wtf.csrf import CSRFError
from wtforms import IntegerField
from wtforms.validators import NumberRange

from example.errors import InsufficientFunds, SoldOut, as_page
from example.extensions import db
from example.models import Product
from example.payments import make_payment
from example.products import MOST, take
from flask_idempotency import IdempotencyError, idempotent
from flask_idempotency.integrations.wtf import IdempotencyField

blueprint = Blueprint("checkout", __name__, url_prefix="/checkout")
blueprint.register_error_handler(IdempotencyError, as_page)
blueprint.register_error_handler(CSRFError, as_page)


class CheckoutForm(FlaskForm):
    """Each time it is shown it has a new key, so it is another purchase."""

    idempotency_key = IdempotencyField()
    quantity = IntegerField("Quantity", [NumberRange(1, MOST)], default=1)


@blueprint.get("/<int:product_id>")
@login_required
def show(product_id: int) -> ResponseReturnValue:
    return _page(product_id, CheckoutForm())


def _purchase() -> bytes:
    """What is bought, without the CSRF token, which templates/error.html may replace."""
    return f"{request.path} {request.form.get('quantity')}".encode()


# `wait`: the browser shows the response to the second click, which should be the payment's, no 409.
@blueprint.post("/<int:product_id>")
@login_required
@idempotent(fingerprint=_purchase, wait=10)
def buy(product_id: int) -> ResponseReturnValue:
    form = CheckoutForm()
    if not form.validate():
        return _page(product_id, form, 400)
    quantity = form.quantity.data or 1
    try:
        product = take(product_id, quantity)
        description = f"{quantity} × {product.name}"
        payment = make_payment({"amount": product.price * quantity, "description": description})
    except (InsufficientFunds, SoldOut) as error:
        db.session.rollback()  # the goods go back
        form.quantity.errors = [error.description]
        return _page(product_id, form, error.code)
    flash(f"Thank you. Payment {payment['id']} is made.")
    return redirect(url_for("accounts.show"), 303)


def _page(product_id: int, form: CheckoutForm, status: int = 200) -> ResponseReturnValue:
    product = db.session.get(Product, product_id) or abort(404, "There is no such product.")
    return render_template("checkout.html", form=form, product=product, most=MOST), status
