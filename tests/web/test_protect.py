"""``idempotency.protect``: what it covers, what it leaves out, and whose options count."""

import gc
import io
import weakref

import flask_restful
import flask_restx
import pytest
from flask import Blueprint, Flask, abort, request
from flask.views import MethodView, View

from flask_idempotency import ConfigurationError, Idempotency, idempotent
from tests.web.plain_shop import OWN, Shop, nameless, shop, wrapping

__all__ = ["shop"]


def test_a_blueprint_protects_its_own_views_with_its_own_options(shop):
    """They come before those of a blueprint around it, and those before the application's."""
    one, inner, other = (Blueprint(name, __name__) for name in ("one", "inner", "other"))
    for path, target in {"/a": one, "/b": inner, "/c": other, "/d": shop.app}.items():
        shop.add(path, target)
    one.register_blueprint(inner)
    for blueprint in one, other:
        shop.app.register_blueprint(blueprint)
    shop.idempotency.protect(one, authorize_replay=lambda _operation: False)
    assert [shop.found(path) for path in ("/a", "/b", "/c", "/d")] == ["own"] * 2 + ["plain"] * 2
    shop.idempotency.protect(shop.app)
    shop.idempotency.protect(other, methods={"PUT"})
    assert shop.covered_methods("/d") == "POST PATCH"
    assert shop.covered_methods("/c") == "PUT"


@pytest.mark.parametrize("order", [["POST", "PATCH"], ["PATCH", "POST"]], ids=str)
@pytest.mark.parametrize("is_exempt", [True, False])
def test_a_method_with_options_of_its_own_or_exempt_stays_so_whoever_comes_first(
    shop, order, is_exempt
):
    def post(_self):
        return shop.pay()

    own = shop.idempotency.exempt(post) if is_exempt else OWN(post)
    members = {"post": own, "patch": lambda _self: shop.pay()}
    shop.idempotency.protect(shop.app)
    shop.app.add_url_rule("/payments", view_func=type("Pay", (MethodView,), members).as_view("pay"))
    found = {method: shop.found(method=method) for method in order}
    assert found == {"POST": "plain" if is_exempt else "own", "PATCH": "covered"}


@pytest.mark.parametrize("kind", [View, MethodView])
def test_a_class_whose_dispatch_is_idempotent_keeps_its_own_options(shop, kind):
    dispatch = {"methods": ["POST"], "dispatch_request": OWN(lambda _self: shop.pay())}
    shop.idempotency.protect(shop.app)
    shop.app.add_url_rule("/payments", view_func=type("Pay", (kind,), dispatch).as_view("pay"))
    assert shop.found() == "own"


def test_a_views_own_options_count_unless_a_decorator_hides_them(shop):
    """As of a protected function that a covered view calls, those of ``protect`` count then."""
    shop.idempotency.protect(shop.app)
    shop.add("/own", view=OWN(shop.pay))
    shop.add("/wrapped", view=wrapping(OWN(shop.pay)))
    shop.add("/exempt", view=shop.idempotency.exempt(OWN(shop.pay)))
    shop.add("/hidden", view=nameless(OWN(shop.pay)))
    found = [shop.found(path) for path in ("/own", "/wrapped", "/exempt", "/hidden")]
    assert found == ["own"] * 3 + ["covered"]


PLACES = {
    "decorators": ({"decorators": [OWN]}, "own"),
    "method_decorators": ({"method_decorators": [OWN]}, "own"),
    "by method": ({"method_decorators": {"post": [OWN]}}, None),
    "one method": ({"post": OWN(lambda _self: ({}, 201))}, None),
}


@pytest.mark.parametrize("package", [flask_restful, flask_restx], ids=["restful", "restx"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("is_covered", [True, False])
def test_every_place_that_a_resource_has_for_a_decorator(shop, package, place, is_covered):
    """``protect`` leaves it the options that it has there, and covers its other methods."""
    if place == "by method" and package is flask_restx:
        return  # which has no such place
    own, of_patch = PLACES[place]
    members = {name: lambda _self: shop.pay() for name in ("post", "patch")} | own
    if is_covered:
        shop.idempotency.protect(shop.app)
    package.Api(shop.app).add_resource(type("Payments", (package.Resource,), members), "/payments")
    expected = of_patch or ("covered" if is_covered else "plain")
    assert (shop.found(), shop.found(method="PATCH")) == ("own", expected)


def test_skip_lets_a_request_pass_as_if_it_were_not_protected(shop):
    """Asked once for each request to what is protected; its body is left to the view."""
    asked = []

    def skip(asking):
        asked.append(asking.path)
        return abort(418) if "fail" in asking.args else asking.args.get("skip")

    body = io.BytesIO(b"a film")
    shop.idempotency.protect(shop.app, skip=skip)
    shop.add("/payments")
    shop.app.post("/upload")(lambda: {"before": body.tell(), "film": request.stream.read().decode()})
    for key in None, "key-1", "key-1", "mal,formed":
        answer = shop.post("/payments?skip=1", key)
        assert (answer.status_code, "Idempotent-Replayed" in answer.headers) == (201, False)
    assert shop.runs == len(asked) == 4
    assert shop.post("/payments", None).status_code == 400
    assert shop.post("/payments?fail=1").status_code == 418
    shop.post("/payments", method="PUT")
    assert len(asked) == 6, "not for a method that is not protected"
    environ = {"wsgi.input": body, "CONTENT_LENGTH": "6"}
    client, headers = shop.app.test_client(), {"Idempotency-Key": "key-1"}
    upload = client.post("/upload?skip=1", headers=headers, environ_overrides=environ)
    assert upload.json == {"before": 0, "film": "a film"}


def test_skip_skips_a_natural_key_and_no_view_or_function_with_options_of_its_own(shop):
    shop.idempotency.protect(shop.app, skip=lambda _request: True, key=lambda: "order-1")
    inner = idempotent(shop.pay)
    shop.add("/natural")
    shop.add("/own", view=inner)
    shop.add("/outer", view=nameless(inner))
    assert shop.post("/outer", None).status_code == 400
    found = [shop.found(path) for path in ("/natural", "/own", "/outer")]
    assert found == ["plain", "covered", "covered"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", ["view", "decorated view", "class", "name", "blueprint", "parent"])
def test_what_is_exempt_is_left_out_and_given_back(shop, way, when):
    """Before and after registration. A function that takes an exempt one is not exempt itself."""
    api, inner, sibling = (Blueprint(name, __name__) for name in ("api", "inner", "sibling"))
    kind = type("Search", (MethodView,), {"post": lambda _self: shop.pay()})
    views = {"decorated view": wrapping(shop.pay), "class": kind.as_view("search")}
    targets = {"name": "api.inner.search", "blueprint": inner, "parent": api, "class": kind}
    target = targets.get(way, shop.pay)
    if when == "before":
        assert shop.idempotency.exempt(target) is target
    for protected in shop.app, sibling:
        shop.idempotency.protect(protected)
    shop.add("/search", inner, views.get(way))
    shop.add("/own", inner, OWN(nameless(shop.pay)))
    shop.add("/sibling", sibling, nameless(shop.pay))
    shop.add("/calling", view=nameless(shop.pay))
    for blueprint in inner, sibling:
        api.register_blueprint(blueprint)
    shop.app.register_blueprint(api)
    if when == "after":
        shop.idempotency.exempt(target)
    found = [shop.found(path) for path in ("/search", "/own", "/sibling", "/calling")]
    assert found == ["plain", "own", "covered", "covered"]


@pytest.mark.parametrize("what", ["application", "blueprint"])
def test_what_is_protected_after_the_first_request_is_so_from_then_on(shop, what):
    api = Blueprint("api", __name__)
    shop.add("/payments", api)
    shop.app.register_blueprint(api)
    assert shop.found() == "plain"
    shop.idempotency.protect(shop.app if what == "application" else api)
    assert shop.found() == "covered"
    shop.idempotency.exempt(shop.pay)
    assert shop.found() == "covered", "what is protected stays so"


def test_a_factory_protects_its_blueprint_for_each_application():
    """The blueprint and the extension belong to modules, the rest is done anew each time.

    Nothing keeps an application, or a blueprint, that is gone.
    """
    idempotency, api, gone = Idempotency(), Blueprint("api", __name__), []
    for number in range(3):
        shop, own = Shop(idempotency=idempotency), Blueprint("own", __name__)
        idempotency.protect(api, authorize_replay=lambda _operation: True)
        idempotency.protect(own)
        idempotency.exempt("api.search")
        if number == 0:
            shop.add("/payments", api)
            shop.add("/search", api)
        for blueprint in api, own:
            shop.app.register_blueprint(blueprint)
        assert shop.covered_methods("/payments") == "POST PATCH"
        assert shop.found("/search") == "plain"
        gone += [weakref.ref(shop.app), weakref.ref(own)]
    del shop, own, blueprint
    gc.collect()
    assert [each() for each in gone[2:]] == [None] * 4, "the views of the first are the blueprint's"


METHODS = (), "POST", ["put"], ["POST", "HEAD"], ["BREW"], [5], None, 5, b"POST"
NO_TARGET, NO_EXEMPTION = "an application or a blueprint", "a view, a blueprint, or the name of an end"


def test_what_cannot_be_protected_or_exempt_is_named(shop):
    protect, exempt = shop.idempotency.protect, shop.idempotency.exempt
    app, one, two = shop.app, Blueprint("one", __name__), Blueprint("two", __name__)
    for target in app, one:
        protect(target)
    exempt(two)
    wrong = [
        *((protect, each, {}, NO_TARGET) for each in ("a", None, Blueprint)),
        *((protect, app, {"methods": each}, "^methods is .*: .*DELETE, PATCH") for each in METHODS),
        *((protect, app, {"skip": each}, "^skip is .*: a callable") for each in (True, "a", ["/"])),
        (protect, app, {"name": "shared"}, "name is not an option"),
        (protect, Flask("other"), {}, "call idempotency.init_app"),
        *(
            (exempt, each, {}, NO_EXEMPTION)
            for each in (None, 5, ["search"], Flask("other"), b"search")
        ),
        (protect, app, {"methods": ["PUT"]}, "protected already with other methods"),
        (exempt, one, {}, "one is protected"),
        (protect, two, {}, "two is exempt"),
        (idempotent, None, {"skip": len}, "skip is not an option"),
    ]
    for use, target, options, said in wrong:
        with pytest.raises(ConfigurationError, match=said):
            use(target, **options)
