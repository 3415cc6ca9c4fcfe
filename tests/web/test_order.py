"""``@idempotent`` above the decorator that registers the view: refused by name, and nothing else is."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from apiflask import APIFlask
from flask import Blueprint, Flask
from flask.views import MethodView
from flask_smorest import Api
from flask_smorest import Blueprint as SmorestBlueprint

from flask_idempotency import ConfigurationError, idempotent
from tests.web.plain_shop import Shop, nameless, shop, wrapping

__all__ = ["shop"]

ROUTE = "the route's decorator"
COVERED = pytest.mark.parametrize("is_covered", [False, True])
WRONG = {
    "at once": [idempotent, ROUTE],
    "with options": [idempotent(required=False), ROUTE],
    "above two": [idempotent, wrapping, wrapping, ROUTE],
    "below another": [wrapping, idempotent, ROUTE],
    "below one that hides it": [nameless, idempotent, ROUTE],
    "above a decorated view": [idempotent, ROUTE, wrapping],
    "the route above a hidden view": [idempotent, ROUTE, nameless],
    "above a partial": [idempotent, functools.partial, ROUTE],
}
RIGHT = {
    "at once": [ROUTE, idempotent],
    "below two": [ROUTE, nameless, wrapping, idempotent],
    "above another": [ROUTE, idempotent, wrapping],
    "above one that hides the view": [ROUTE, idempotent, nameless],
    "a decorator above the route": [wrapping, ROUTE, idempotent],
    "twice": [ROUTE, idempotent, idempotent],
    "below a partial": [ROUTE, functools.partial, idempotent],
}


def register(shop: Shop, order: list[Any], target: Any = None) -> None:
    """Decorate the view as in a source: the first on top."""
    route = (target or shop.app).route("/payments", methods=["GET", "POST", "PUT"], endpoint="pay")
    view = shop.pay
    for decorator in reversed(order):
        view = route(view) if decorator is ROUTE else decorator(view)


@pytest.mark.parametrize("skip", [None, lambda _request: True], ids=["covered", "skipped"])
@COVERED
@pytest.mark.parametrize("order", WRONG.values(), ids=WRONG)
def test_above_the_route_it_is_refused_by_name(shop, order, is_covered, skip):
    """Where ``protect`` covers the view, too: whoever put it there meant its options."""
    register(shop, order)
    if is_covered:
        shop.idempotency.protect(shop.app, skip=skip)
    assert shop.post(method="GET").status_code == 201
    found = {shop.found(method=method) for method in ("POST", "PUT")}  # one that protect() leaves out
    assert found == {"refused"}


@pytest.mark.parametrize("order", RIGHT.values(), ids=RIGHT)
def test_below_the_route_it_protects(shop, order):
    register(shop, order)
    assert shop.found() == "covered"


def test_of_a_blueprint_in_two_places_and_applications_all_are_refused_unless_exempt(shop):
    blueprint, shops = Blueprint("bills", __name__), (shop, Shop())
    register(shop, WRONG["at once"], blueprint)
    for each in shops:
        for name in "a", "b":
            each.app.register_blueprint(blueprint, name=name, url_prefix=f"/{name}")
        assert {each.found(f"/{name}/payments") for name in "ab"} == {"refused"}
    named = r"tests\.web\.plain_shop\.Shop\.__init__.*\.pay, the view of the endpoint 'a\.pay'"
    with pytest.raises(ConfigurationError, match=named):
        shop.post("/a/payments")
    shop.idempotency.exempt(shop.pay)
    assert shop.found("/a/payments") == "plain"


def as_method(view: Any) -> Any:
    """A view whose POST is this one."""
    return type("Bills", (MethodView,), {"post": staticmethod(view)}).as_view("pay")


def test_a_class_of_views_takes_it_in_its_list_of_decorators(shop):
    view = as_method(shop.pay)
    shop.app.add_url_rule("/payments", view_func=view, methods=["POST"])
    for use in idempotent, idempotent(ttl=60):
        with pytest.raises(ConfigurationError, match=r"Bills.*decorators = \[idempotent\]"):
            use(view.view_class)
    idempotent(view)
    assert shop.found() == "refused"


@pytest.mark.parametrize("hide", [lambda view: view, wrapping, functools.partial, as_method])
@COVERED
@pytest.mark.parametrize("first", ["/plain", "/payments"])
def test_beside_its_protected_self_a_plain_view_is_left_alone(shop, hide, first, is_covered):
    """Also where that is in another application, or is called by it."""
    other = Shop()
    if is_covered:
        shop.idempotency.protect(shop.app)
    shop.add("/plain")
    other.add("/payments")
    other.add("/calls", view=functools.wraps(shop.pay)(nameless(idempotent(shop.pay))))
    shop.app.add_url_rule("/payments", "pay", hide(idempotent(shop.pay)), methods=["POST"])
    shop.post(first)
    assert shop.found("/plain") == ("covered" if is_covered else "plain")
    assert (shop.found(), other.found(), other.found("/calls")) == ("covered", "plain", "covered")


@pytest.mark.parametrize("kind", [APIFlask, Flask], ids=["APIFlask", "Flask-Smorest"])
def test_with_a_frameworks_own_route(kind):
    shop, blueprint = Shop(kind), SmorestBlueprint("bills", "bills")
    target = shop.app if kind is APIFlask else blueprint
    shaped = shop.app.output({}, status_code=201) if kind is APIFlask else blueprint.response(201)
    for name in "wrong", "right":

        def view():
            return {}

        route = target.route(f"/{name}", methods=["POST"], endpoint=name)
        idempotent(route(shaped(view))) if name == "wrong" else route(idempotent(shaped(view)))
    if kind is Flask:
        Api(shop.app).register_blueprint(blueprint)
    assert (shop.found("/wrong"), shop.found("/right")) == ("refused", "covered")
