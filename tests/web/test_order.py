"""``@idempotent`` above the decorator that registers the view: refused by name, and nothing else is."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
from apiflask import APIFlask
from flask import Blueprint
from flask.views import MethodView
from flask_smorest import Api
from flask_smorest import Blueprint as SmorestBlueprint

from flask_idempotency import ConfigurationError, idempotent
from tests.web.plain_shop import Shop


@pytest.fixture
def shop() -> Shop:
    return Shop()


def nameless(view: Any) -> Any:
    """A decorator that forgets whom it wraps."""

    def inner(*args: Any, **kwargs: Any) -> Any:
        return view(*args, **kwargs)

    return inner


def wrapping(view: Any) -> Any:
    """A decorator as most are."""
    return functools.wraps(view)(nameless(view))


ROUTE = "the route's decorator"
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
    "between": [ROUTE, wrapping, idempotent, wrapping],
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
@pytest.mark.parametrize("is_covered", [False, True])
@pytest.mark.parametrize("order", WRONG.values(), ids=WRONG)
def test_above_the_route_it_is_refused_by_name(shop, order, is_covered, skip):
    """Where ``protect`` covers the view, too: whoever put it there meant its options."""
    register(shop, order)
    if is_covered:
        shop.idempotency.protect(shop.app, skip=skip)
    assert shop.post(method="GET").status_code == 201
    shop.assert_refused()
    shop.assert_refused(method="PUT")  # which protect() does not cover


@pytest.mark.parametrize("order", RIGHT.values(), ids=RIGHT)
def test_below_the_route_it_protects(shop, order):
    register(shop, order)
    assert shop.is_protected()


def test_of_a_blueprint_in_two_places_and_applications_all_are_refused(shop):
    blueprint, shops = Blueprint("bills", __name__), (shop, Shop())
    register(shop, WRONG["at once"], blueprint)
    for each in shops:
        for name in "a", "b":
            each.app.register_blueprint(blueprint, name=name, url_prefix=f"/{name}")
        for name in "a", "b":
            each.assert_refused(f"{name}.pay", f"/{name}/payments")
    with pytest.raises(ConfigurationError, match=r"tests\.web\.plain_shop\.Shop\.__init__.*\.pay"):
        shop.post("/a/payments")


class Payments(MethodView):
    def post(self):
        return {}, 201


def test_a_view_that_was_registered_and_decorated_afterwards_is_refused(shop):
    view = Payments.as_view("pay")
    shop.app.add_url_rule("/payments", view_func=view)
    idempotent(view)
    shop.assert_refused()


@pytest.mark.parametrize("use", [idempotent, idempotent(ttl=60)])
def test_a_class_of_views_takes_it_in_its_list_of_decorators(use):
    with pytest.raises(ConfigurationError, match=r"Payments.*decorators = \[idempotent\]"):
        use(Payments)


def as_method(view: Any) -> Any:
    """A view whose POST is this one."""
    return type("Bills", (MethodView,), {"post": staticmethod(view)}).as_view("pay")


@pytest.mark.parametrize("hide", [lambda view: view, wrapping, functools.partial, as_method])
@pytest.mark.parametrize("is_covered", [False, True])
@pytest.mark.parametrize("first", ["/plain", "/payments"])
def test_beside_its_protected_self_a_plain_view_is_left_alone(shop, hide, first, is_covered):
    if is_covered:
        shop.idempotency.protect(shop.app)
    shop.add("/plain")
    shop.app.add_url_rule("/payments", "pay", hide(idempotent(shop.pay)), methods=["POST"])
    shop.post(first)
    assert shop.is_protected("/plain") is is_covered
    assert shop.is_protected()


@pytest.mark.parametrize("is_covered", [False, True])
def test_a_view_that_is_protected_in_another_application_may_be_plain_here(shop, is_covered):
    other = Shop()
    if is_covered:
        other.idempotency.protect(other.app)
    other.add("/payments", view=shop.pay if is_covered else idempotent(shop.pay))
    shop.add("/payments")
    assert not shop.is_protected()
    assert other.is_protected()


def test_a_function_that_was_decorated_is_forgotten():
    def pay():
        return {}, 201

    idempotent(pay)
    gone = weakref.ref(pay)
    del pay
    gc.collect()
    assert gone() is None


def exempt(shop: Shop) -> None:
    register(shop, WRONG["at once"])
    shop.idempotency.exempt(shop.pay)


def with_a_copy_of_its_attributes(shop: Shop) -> None:
    idempotent(shop.pay)
    vars(shop.app.post("/payments", endpoint="pay")(lambda: ({}, 201))).update(vars(shop.pay))


def calling_a_protected_function(shop: Shop) -> None:
    inner = idempotent(shop.app.post("/wrong", endpoint="wrong")(lambda: ({}, 201)))
    shop.app.post("/payments", endpoint="pay")(lambda: ({"called": bool(inner)}, 201))


@pytest.mark.parametrize(
    "register_it", [exempt, with_a_copy_of_its_attributes, calling_a_protected_function]
)
def test_what_only_looks_like_a_misplaced_view_is_left_alone(shop, register_it):
    register_it(shop)
    assert not shop.is_protected()


def test_a_view_that_calls_or_was_replaced_by_its_protected_self_is_protected(shop):
    protected = idempotent(shop.pay)
    shop.add("/payments", view=functools.wraps(shop.pay)(nameless(protected)))
    shop.add("/replaced")
    shop.app.view_functions["replaced"] = idempotent(shop.app.view_functions["replaced"])
    assert shop.is_protected()
    assert shop.is_protected("/replaced")


def test_with_apiflask():
    shop = Shop(APIFlask)
    idempotent(shop.app.post("/payments", endpoint="pay")(lambda: ({}, 201)))
    shop.app.post("/right", endpoint="right")(idempotent(lambda: ({}, 201)))
    shop.assert_refused()
    assert shop.is_protected("/right")


def test_with_flask_smorest(shop):
    blueprint = SmorestBlueprint("bills", "bills")

    @idempotent
    @blueprint.route("/payments", methods=["POST"])
    @blueprint.response(201)
    def pay():
        return {}

    @blueprint.route("/right", methods=["POST"])
    @idempotent
    @blueprint.response(201)
    def right():
        return {}

    Api(shop.app).register_blueprint(blueprint)
    shop.assert_refused("bills.pay")
    assert shop.is_protected("/right")
