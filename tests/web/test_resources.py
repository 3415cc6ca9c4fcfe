"""The resources of Flask-RESTful and Flask-RESTX: every place that they have for a decorator."""

import flask_restful
import flask_restx
import pytest

from flask_idempotency import ConfigurationError, idempotent
from flask_idempotency.web.routes import protected_routes
from tests.web.plain_shop import Shop

DAY = 86400
"""The default of ``ttl``, in seconds."""


@pytest.fixture(params=[flask_restful, flask_restx], ids=["restful", "restx"])
def package(request):
    return request.param


@pytest.fixture
def shop():
    return Shop()


def add(shop, package, **members):
    """A resource whose methods are views of the shop."""
    methods = {name: lambda _self: shop.pay() for name in ("post", "put")}
    resource = type("Payments", (package.Resource,), {**methods, **members})
    package.Api(shop.app).add_resource(resource, "/payments", endpoint="pay")


def protected(shop):
    state = shop.app.extensions["idempotency"]
    return {(method, route.ttl) for _, method, route in protected_routes(state)}


@pytest.mark.parametrize("place", ["decorators", "method_decorators"])
@pytest.mark.parametrize("ttl", [DAY, 60])
def test_all_methods_are_protected_and_known_to_be(shop, package, place, ttl):
    add(shop, package, **{place: [idempotent if ttl == DAY else idempotent(ttl=ttl)]})
    assert protected(shop) == {("POST", ttl), ("PUT", ttl)}
    assert shop.protected_methods("/payments", "POST", "PUT") == {"POST", "PUT"}
    assert shop.post("/payments", None).status_code == 400


def test_one_method_is_protected(shop, package):
    add(shop, package, post=idempotent(lambda _self: shop.pay()))
    assert protected(shop) == {("POST", DAY)}
    assert shop.protected_methods("/payments", "POST", "PUT") == {"POST"}


def test_decorators_by_method_are_known(shop):
    add(shop, flask_restful, method_decorators={"post": [idempotent(ttl=60)]})
    assert protected(shop) == {("POST", 60)}
    assert shop.protected_methods("/payments", "POST", "PUT") == {"POST"}


def test_protect_leaves_them_their_own_options(shop, package):
    shop.idempotency.protect(shop.app, ttl=5)
    add(shop, package, method_decorators=[idempotent(ttl=60)])
    assert protected(shop) == {("POST", 60), ("PUT", 60)}
    assert shop.is_protected("/payments")
    assert protected(shop) == {("POST", 60), ("PUT", 60)}


def test_protect_covers_them(shop, package):
    shop.idempotency.protect(shop.app)
    add(shop, package)
    assert shop.protected_methods("/payments", "POST", "PUT") == {"POST"}


def test_above_the_route_it_is_refused(shop):
    route = flask_restx.Api(shop.app).route("/payments")
    with pytest.raises(ConfigurationError, match=r"above the class .*Payments: put it into"):

        @idempotent
        @route
        class Payments(flask_restx.Resource):
            pass
