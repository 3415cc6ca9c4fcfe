"""``/``: what there is to buy."""

from flask import Blueprint, abort, render_template
from sqlalchemy import select

from example.errors import SoldOut
from example.extensions import db
from example.models import Product

blueprint = Blueprint("products", __name__)

MOST = 10  # of one product in one order; more is a mistake


@blueprint.get("/")
def index() -> str:
    products = db.session.scalars(select(Product).order_by(Product.id))
    return render_template("products.html", products=products.all())


def take(product_id: int, quantity: int) -> Product:
    """Take so many out of stock; the caller commits. Raises 404, and 400 if there are not as many.

    The product is locked before the account, everywhere: one order of locks means no deadlock.
    """
    product = db.session.get(Product, product_id, with_for_update=True, populate_existing=True)
    if product is None:
        abort(404, "There is no such product.")
    if product.stock < quantity:
        raise SoldOut
    product.stock -= quantity
    return product
