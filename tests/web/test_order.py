"""``@idempotent`` above the decorator that registers the view: refused by name, and nothing else is."""

from __future__ import annotations

import dataclasses
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

from flask_idempotency import ConfigurationError, current_operation, idempotent
from tests.web.plain_shop import Shop


@pytest.fixture
def shop() -> Shop:
    return Shop()


def wrapping(view: Any) -> Any:
    """A decorator as most are."""

    @functools.wraps(view)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return view(*args, **kwargs)

    return inner


def nameless(view: Any) -> Any:
    """A decorator that forgets whom it wraps."""

    def inner(*args: Any, **kwargs: Any) -> Any:
        return view(*args, **kwargs)

    return inner


def decorated(view: Any, *decorators: Any) -> Any:
    """The view below these decorators, which stand as in a source: the first on top."""
    for decorator in reversed(decorators):
        view = decorator(view)
    return view


ROUTE = "the route's decorator"
WRONG = {
    "at once": [idempotent, ROUTE],
    "with options": [idempotent(required=False), ROUTE],
    "above another": [idempotent, wrapping, ROUTE],
    "above two": [idempotent, wrapping, wrapping, ROUTE],
    "below another": [wrapping, idempotent, ROUTE],
    "below one that hides it": [nameless, idempotent, ROUTE],
    "above a decorated view": [idempotent, ROUTE, wrapping],
    "the route above a hidden view": [idempotent, ROUTE, nameless],
    "above a partial": [idempotent, functools.partial, ROUTE],
}
RIGHT = {
    "at once": [ROUTE, idempotent],
    "below another": [ROUTE, wrapping, idempotent],
    "below one that hides it": [ROUTE, nameless, idempotent],
    "below two": [ROUTE, nameless, wrapping, idempotent],
    "above another": [ROUTE, idempotent, wrapping],
    "above one that hides the view": [ROUTE, idempotent, nameless],
    "between": [ROUTE, wrapping, idempotent, wrapping],
    "a decorator above the route": [wrapping, ROUTE, idempotent],
    "twice": [ROUTE, idempotent, idempotent],
    "below a partial": [ROUTE, functools.partial, idempotent],
}


def register(shop: Shop, order: list[Any], target: Any = None) -> None:
    route = (target or shop.app).route("/payments", methods=["GET", "POST", "PUT"], endpoint="pay")
    decorated(shop.pay, *(route if each is ROUTE else each for each in order))


@pytest.mark.parametrize("order", WRONG.values(), ids=WRONG)
def test_above_the_route_it_is_refused_by_name(shop, order):
    register(shop, order)
    assert shop.post(method="GET").status_code == 201
    shop.assert_refused()
    shop.assert_refused(method="PUT")


@pytest.mark.parametrize("order", RIGHT.values(), ids=RIGHT)
def test_below_the_route_it_protects(shop, order):
    register(shop, order)
    assert shop.is_protected()


@pytest.mark.parametrize("order", WRONG.values(), ids=WRONG)
def test_of_a_blueprint_in_two_places_both_are_refused(shop, order):
    blueprint = Blueprint("bills", __name__)
    register(shop, order, blueprint)
    for name in "a", "b":
        shop.app.register_blueprint(blueprint, name=name, url_prefix=f"/{name}")
    for name in "a", "b":
        shop.assert_refused(f"{name}.pay", f"/{name}/payments")


def test_the_message_names_the_view_and_where_it_stands(shop):
    register(shop, WRONG["at once"])
    with pytest.raises(ConfigurationError, match=r"tests\.web\.plain_shop\.Shop\.__init__.*\.pay"):
        shop.post()


def test_a_view_that_was_registered_and_decorated_afterwards_is_refused(shop):
    class Payments(MethodView):
        def post(self):
            return {}, 201

    view = Payments.as_view("pay")
    shop.app.add_url_rule("/payments", view_func=view)
    idempotent(view)
    shop.assert_refused()


def test_a_view_that_was_replaced_by_its_protected_self_is_protected(shop):
    shop.app.add_url_rule("/payments", "pay", shop.pay, methods=["POST"])
    shop.app.view_functions["pay"] = idempotent(shop.app.view_functions["pay"])
    assert shop.is_protected()


@pytest.mark.parametrize("hide", [lambda view: view, wrapping, functools.partial])
@pytest.mark.parametrize("first", ["/plain", "/payments"])
def test_beside_its_protected_self_a_plain_view_is_left_alone(shop, hide, first):
    shop.app.add_url_rule("/plain", "plain", shop.pay, methods=["POST"])
    shop.app.add_url_rule("/payments", "pay", hide(idempotent(shop.pay)), methods=["POST"])
    shop.post(first)
    assert not shop.is_protected("/plain")
    assert shop.is_protected()


def test_beside_a_protected_method_a_plain_view_is_left_alone(shop):
    class Payments(MethodView):
        post = staticmethod(idempotent(shop.pay))

    shop.app.add_url_rule("/plain", "plain", shop.pay, methods=["POST"])
    shop.app.add_url_rule("/payments", view_func=Payments.as_view("pay"))
    assert not shop.is_protected("/plain")
    assert shop.is_protected()


def test_a_view_that_is_protected_in_another_application_may_be_plain_here(shop):
    other = Shop()
    other.app.add_url_rule("/payments", "pay", idempotent(shop.pay), methods=["POST"])
    shop.app.add_url_rule("/payments", "pay", shop.pay, methods=["POST"])
    assert not shop.is_protected()
    assert other.is_protected()


def test_in_the_wrong_order_it_is_refused_in_every_application():
    blueprint = Blueprint("bills", __name__)
    shops = Shop(), Shop()
    register(shops[0], WRONG["at once"], blueprint)
    for shop in shops:
        shop.app.register_blueprint(blueprint)
        shop.assert_refused("bills.pay")


def test_a_view_that_protect_covers_in_another_application_may_be_plain_here(shop):
    other = Shop()
    other.idempotency.protect(other.app)
    for each in other, shop:
        each.app.add_url_rule("/payments", "pay", shop.pay, methods=["POST"])
    assert other.is_protected()
    assert not shop.is_protected()


@pytest.mark.parametrize("order", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("skip", [None, lambda _request: True], ids=["covered", "skipped"])
def test_where_protect_covers_the_view_it_is_refused_too(shop, order, skip):
    """Whoever put it there meant its options, or that nothing lets the view pass."""
    register(shop, order)
    shop.idempotency.protect(shop.app, skip=skip)
    assert shop.post(method="GET").status_code == 201
    shop.assert_refused()
    shop.assert_refused(method="PUT")  # which protect() does not cover


def test_beside_its_protected_self_a_view_that_protect_covers_is_protected(shop):
    shop.idempotency.protect(shop.app)
    shop.app.add_url_rule("/covered", "covered", shop.pay, methods=["POST"])
    shop.app.add_url_rule("/payments", "pay", idempotent(shop.pay), methods=["POST"])
    assert shop.is_protected("/covered")
    assert shop.is_protected()


@dataclasses.dataclass
class Till:
    """Equal to others, and not hashable."""

    number: int = 1

    def pay(self):
        return {}, 201


class Slotted:
    __slots__ = ()

    def __call__(self):
        return {}, 201


@pytest.mark.parametrize("make", [lambda: Till().pay, Slotted])
def test_below_the_route_what_takes_no_attributes_is_protected(shop, make):
    view = make()
    shop.app.add_url_rule("/payments", "pay", idempotent(view), methods=["POST"])
    shop.app.add_url_rule("/plain", "plain", view, methods=["POST"])
    assert not shop.is_protected("/plain")
    assert shop.is_protected()


@pytest.mark.parametrize("is_covered", [True, False])
def test_a_view_that_uses_the_present_operation_is_refused_by_name_too(shop, is_covered):
    """What stands for the operation may not be asked for anything outside of one."""
    if is_covered:
        shop.idempotency.protect(shop.app)

    @idempotent(atomic=False)
    @shop.app.post("/payments")
    def pay():
        return {"paid": current_operation.step("pay", lambda: 1)}, 201

    shop.assert_refused()


def test_a_function_that_was_decorated_is_forgotten():
    def pay():
        return {}, 201

    idempotent(pay)
    gone = weakref.ref(pay)
    del pay
    gc.collect()
    assert gone() is None


def test_an_exempt_view_is_left_alone(shop):
    register(shop, WRONG["at once"])
    shop.idempotency.exempt(shop.pay)
    assert not shop.is_protected()


def test_a_copy_of_the_views_attributes_is_not_the_view(shop):
    idempotent(shop.pay)

    @shop.app.post("/payments", endpoint="pay")
    def other():
        return {}, 201

    vars(other).update(vars(shop.pay))
    assert not shop.is_protected()


def test_a_view_that_calls_protected_functions_is_not_taken_for_one(shop):
    @idempotent
    @shop.app.post("/wrong")
    def wrong():
        return {}, 201

    @shop.app.post("/payments")
    def pay(*args):
        return {"called": bool(wrong)}, 201

    assert not shop.is_protected()
    shop.assert_refused("wrong", "/wrong")


def test_a_view_that_calls_its_protected_self_is_left_alone(shop):
    protected = idempotent(shop.pay)

    @shop.app.post("/payments", endpoint="pay")
    @functools.wraps(shop.pay)
    def around():
        return protected()

    assert shop.is_protected()


class Payments(MethodView):
    def post(self):
        return {}, 201


@pytest.mark.parametrize("use", [idempotent, idempotent(ttl=60)])
def test_a_class_of_views_takes_it_in_its_list_of_decorators(use):
    with pytest.raises(ConfigurationError, match=r"Payments.*decorators = \[idempotent\]"):
        use(Payments)


def test_with_apiflask(shop):
    shop = Shop(APIFlask)

    @idempotent
    @shop.app.post("/payments")
    def pay():
        return {}, 201

    @shop.app.post("/right")
    @idempotent
    def right():
        return {}, 201

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
