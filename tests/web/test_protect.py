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
from tests.web.plain_shop import Shop, nameless, shop, wrapping

__all__ = ["shop"]


def never(_operation):
    """The option ``authorize_replay``, by which the tests know whose options count."""
    return False


OWN = idempotent(authorize_replay=never)


def answers(shop, path="/payments", method="POST"):
    """201 and 403: these options of its own; 201 twice: replayed, or not protected."""
    return [shop.post(path, method=method).status_code for _ in range(2)]


def test_a_blueprint_protects_its_own_views_with_its_own_options(shop):
    """They come before those of a blueprint around it, and those before the application's."""
    one, inner, other = (Blueprint(name, __name__) for name in ("one", "inner", "other"))
    for path, target in {"/a": one, "/b": inner, "/c": other, "/d": shop.app}.items():
        shop.add(path, target)
    one.register_blueprint(inner)
    for blueprint in one, other:
        shop.app.register_blueprint(blueprint)
    shop.idempotency.protect(one, authorize_replay=never)
    assert [answers(shop, path)[1] for path in ("/a", "/b")] == [403, 403]
    assert not shop.protected_methods("/c") | shop.protected_methods("/d")
    shop.idempotency.protect(shop.app)
    shop.idempotency.protect(other, methods={"PUT"})
    assert shop.protected_methods("/d") == {"POST", "PATCH"}
    assert shop.protected_methods("/c") == {"PUT"}


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
    for method in order:
        if method == "PATCH" or is_exempt:
            assert shop.is_protected(method=method) == (method == "PATCH")
        else:
            assert answers(shop, method=method) == [201, 403]


@pytest.mark.parametrize("kind", [View, MethodView])
def test_a_class_whose_dispatch_is_idempotent_keeps_its_own_options(shop, kind):
    class Payments(kind):
        methods = ["POST"]  # noqa: RUF012 -- as Flask's documentation has it

        @OWN
        def dispatch_request(self):
            return shop.pay()

        def post(self):
            """So that it takes this method."""

    shop.idempotency.protect(shop.app)
    shop.app.add_url_rule("/payments", view_func=Payments.as_view("pay"))
    assert answers(shop) == [201, 403]


def test_a_views_own_options_count_unless_a_decorator_hides_them(shop):
    """As of a protected function that a covered view calls, those of ``protect`` count then."""
    shop.idempotency.protect(shop.app)
    shop.add("/own", view=OWN(shop.pay))
    shop.add("/wrapped", view=wrapping(OWN(shop.pay)))
    shop.add("/hidden", view=nameless(OWN(shop.pay)))
    shop.add("/exempt", view=shop.idempotency.exempt(OWN(shop.pay)))
    found = {path: answers(shop, path)[1] for path in ("/own", "/wrapped", "/hidden", "/exempt")}
    assert found == {"/own": 403, "/wrapped": 403, "/hidden": 201, "/exempt": 403}


PLACES = {
    "decorators": {"decorators": [OWN]},
    "method_decorators": {"method_decorators": [OWN]},
    "by method": {"method_decorators": {"post": [OWN]}},
    "one method": {},
}


@pytest.mark.parametrize("package", [flask_restful, flask_restx], ids=["restful", "restx"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("is_covered", [True, False])
def test_every_place_that_a_resource_has_for_a_decorator(shop, package, place, is_covered):
    """``protect`` leaves it the options that it has there, and covers its other methods."""
    if place == "by method" and package is flask_restx:
        return  # which has no such place
    members = {name: lambda _self: shop.pay() for name in ("post", "patch")} | PLACES[place]
    if place == "one method":
        members["post"] = OWN(members["post"])
    if is_covered:
        shop.idempotency.protect(shop.app)
    resource = type("Payments", (package.Resource,), members)
    package.Api(shop.app).add_resource(resource, "/payments", endpoint="pay")
    assert answers(shop) == [201, 403]
    if place in ("decorators", "method_decorators"):
        assert answers(shop, method="PATCH") == [422, 422], "the same key for another method"
    else:
        assert shop.is_protected(method="PATCH") == is_covered


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
    assert shop.is_protected("/payments")
    shop.post("/payments", method="PUT")
    assert len(asked) == 8, "not for a method that is not protected"
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
    assert not shop.is_protected("/natural")
    assert shop.is_protected("/own")
    assert shop.post("/outer", None).status_code == 400
    assert shop.is_protected("/outer")


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
    shop.idempotency.protect(shop.app)
    shop.idempotency.protect(sibling)
    shop.add("/search", inner, views.get(way), methods=["POST"])
    shop.add("/own", inner, idempotent(shop.pay))
    shop.add("/sibling", sibling, lambda: shop.pay())  # noqa: PLW0108
    for blueprint in inner, sibling:
        api.register_blueprint(blueprint)
    shop.app.register_blueprint(api)
    shop.add("/payments", view=nameless(shop.pay))
    if when == "after":
        shop.idempotency.exempt(target)
    assert not shop.is_protected("/search")
    assert shop.is_protected("/own"), "it has options of its own"
    assert shop.is_protected("/sibling"), "its blueprint is protected by itself"
    assert shop.is_protected("/payments")


@pytest.mark.parametrize("what", ["application", "blueprint"])
def test_what_is_protected_after_the_first_request_is_so_from_then_on(shop, what):
    api = Blueprint("api", __name__)
    shop.add("/payments", api)
    shop.app.register_blueprint(api)
    assert not shop.is_protected("/payments")
    shop.idempotency.protect(shop.app if what == "application" else api)
    assert shop.is_protected("/payments")
    shop.idempotency.exempt(shop.pay)
    assert shop.is_protected("/payments"), "what is protected stays so"


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
        assert shop.protected_methods("/payments") == {"POST", "PATCH"}
        assert not shop.is_protected("/search")
        gone += [weakref.ref(shop.app), weakref.ref(own)]
    del shop, own, blueprint
    gc.collect()
    assert [each() for each in gone[2:]] == [None] * 4, "the views of the first are the blueprint's"


METHODS = (), "POST", ["put"], ["POST", "HEAD"], ["BREW"], [5], None, 5, b"POST"


def test_what_cannot_be_protected_or_exempt_is_named(shop):
    protect, exempt = shop.idempotency.protect, shop.idempotency.exempt
    one, two = Blueprint("one", __name__), Blueprint("two", __name__)
    for target in shop.app, one:
        protect(target)
    exempt(two)
    wrong = [
        *((protect, each, {}, "an application or a blueprint") for each in ("a", None, Blueprint)),
        *(
            (protect, shop.app, {"methods": each}, "^methods is .*allowed: .*DELETE, PATCH, POST, PUT")
            for each in METHODS
        ),
        *(
            (protect, shop.app, {"skip": each}, "^skip is .*: a callable")
            for each in (True, "a", ["/"])
        ),
        (protect, shop.app, {"name": "shared"}, "name is not an option"),
        (protect, Flask("other"), {}, "call idempotency.init_app"),
        *(
            (exempt, each, {}, "allowed: a view, a blueprint, or the name of an end")
            for each in (None, 5, ["search"], Flask("other"), b"search")
        ),
        (protect, shop.app, {"methods": ["PUT"]}, "protected already with other methods"),
        (protect, one, {"methods": ["PUT"]}, "protected already with other methods"),
        (exempt, one, {}, "one is protected"),
        (protect, two, {}, "two is exempt"),
        (lambda _, **options: idempotent(**options), None, {"skip": ["POST"]}, "skip is not an option"),
    ]
    for use, target, options, said in wrong:
        with pytest.raises(ConfigurationError, match=said):
            use(target, **options)
