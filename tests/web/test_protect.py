"""What is protected and with whose options: ``@idempotent``, ``idempotency.protect`` and ``exempt``.

``@idempotent`` above the decorator that registers the view is refused by name, and nothing else is.
"""

import functools
import io
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import flask_restful
import flask_restx
import pytest
from flask import Blueprint, Flask, abort, request
from flask.views import MethodView, View
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import ConfigurationError, Idempotency, idempotent
from flask_idempotency.cli import cli
from tests.stores import on_sqlite

OWN = idempotent(authorize_replay=lambda _operation: False)
"""By this option the tests know whose options count."""

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def wrapping(view):
    return functools.wraps(view)(nameless(view))


def nameless(view):
    """A decorator that forgets whom it wraps."""
    return lambda *args, **kwargs: view(*args, **kwargs)  # noqa: PLW0108


class Shop:
    """An application that needs no server. Its view ``pay`` counts its runs."""

    def __init__(self, idempotency=None):
        self.app = Flask("shop")
        self.app.config.update(on_sqlite(self), TESTING=True)
        db = SQLAlchemy(self.app)
        self.idempotency = idempotency or Idempotency()
        self.idempotency.init_app(self.app, db, scope=None)
        with self.app.app_context():
            db.create_all()
        self.runs = 0

        def pay(**_values):
            self.runs += 1
            return {"run": self.runs}, 201

        self.pay = pay

    def add(self, path, target=None, view=None):
        """Register a view, ``pay`` unless given, of the endpoint that the path names."""
        options = {"endpoint": path.strip("/"), "methods": METHODS}
        (target or self.app).add_url_rule(path, view_func=view or self.pay, **options)

    def post(self, path="/payments", key="key-1", method="POST"):
        headers = {} if key is None else {"Idempotency-Key": key}
        return self.app.test_client().open(path, method=method, json={}, headers=headers)

    def found(self, path="/payments", method="POST"):
        """A view has its "own" options, is "covered" without them, or "plain"; or it is "refused"."""
        before = self.runs
        try:
            first, again = (self.post(path, f"for-{method}", method) for _ in range(2))
        except ConfigurationError as error:
            is_misplaced = "Put @idempotent below" in str(error) and self.runs == before
            return "refused" if is_misplaced else str(error)
        assert first.status_code == 201
        if again.status_code == 403:
            return "own"
        assert again.status_code == 201
        return "covered" if "Idempotent-Replayed" in again.headers else "plain"

    def covered_methods(self, path):
        return " ".join(method for method in METHODS[1:] if self.found(path, method) == "covered")


@pytest.fixture
def shop():
    return Shop()


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


def respond(_self):
    return {}, 201


# Where a class has a decorator; whether that counts for its other methods, too.
DECORATORS = {"decorators": [OWN]}, True
METHOD = {"post": OWN(respond)}, False
DISPATCH = {"methods": ["POST", "PATCH"], "dispatch_request": OWN(respond)}, True
AROUND_METHODS = {"method_decorators": [OWN]}, True
PLACES = {
    "View, dispatch": (View, DISPATCH),
    "MethodView, dispatch": (MethodView, DISPATCH),
    "MethodView, decorators": (MethodView, DECORATORS),
    "MethodView, one method": (MethodView, METHOD),
    "restful, decorators": (flask_restful, DECORATORS),
    "restful, method_decorators": (flask_restful, AROUND_METHODS),
    "restful, by method": (flask_restful, ({"method_decorators": {"post": [OWN]}}, False)),
    "restful, one method": (flask_restful, METHOD),
    "restx, method_decorators": (flask_restx, AROUND_METHODS),
}


@pytest.mark.parametrize(("package", "place"), PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("is_covered", [True, False])
@pytest.mark.parametrize("order", [["POST", "PATCH"], ["PATCH", "POST"]], ids=str)
def test_every_place_that_a_class_has_for_a_decorator(shop, package, place, is_covered, order):
    """``protect`` leaves it the options that it has there, and covers its other methods."""
    own, has_all = place
    if is_covered:
        shop.idempotency.protect(shop.app)
    kind = getattr(package, "Resource", package)
    members = own if kind is View else {"post": respond, "patch": respond, **own}
    payments = type("Payments", (kind,), members)
    if kind is package:
        shop.app.add_url_rule("/payments", view_func=payments.as_view("pay"))
    else:
        package.Api(shop.app).add_resource(payments, "/payments")
    other = "own" if has_all else "covered" if is_covered else "plain"
    found = {method: shop.found(method=method) for method in order}
    assert found == {"POST": "own", "PATCH": other}


def test_skip_lets_a_request_pass_as_if_it_were_not_protected(shop):
    """Asked once for each request to what is protected; its body is left to the view."""
    asked, body = [], io.BytesIO(b"a film")

    def skip(asking):
        asked.append(asking.path)
        return abort(418) if "fail" in asking.args else asking.args.get("skip")

    shop.idempotency.protect(shop.app, skip=skip)
    shop.add("/payments")
    shop.app.post("/upload")(lambda: {"before": body.tell(), "film": request.stream.read().decode()})
    for key in None, "key-1", "key-1", "mal,formed":
        assert shop.post("/payments?skip=1", key).status_code == 201
    assert shop.runs == len(asked) == 4
    assert shop.post("/payments", None).status_code == 400
    assert shop.post("/payments?fail=1").status_code == 418
    shop.post("/payments", method="PUT")
    assert len(asked) == 6, "not for a method that is not protected"
    environ = {"wsgi.input": body, "CONTENT_LENGTH": "6", "HTTP_IDEMPOTENCY_KEY": "key-1"}
    upload = shop.app.test_client().post("/upload?skip=1", environ_overrides=environ)
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
    """Before and after registration. A function that takes an exempt one is not exempt itself.

    A view's own options count unless a decorator hides them.
    """
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
    shop.add("/own", inner, wrapping(OWN(nameless(shop.pay))))
    shop.add("/hidden", view=nameless(OWN(nameless(shop.pay))))
    shop.add("/sibling", sibling, nameless(shop.pay))
    shop.add("/calling", view=nameless(shop.pay))
    for blueprint in inner, sibling:
        api.register_blueprint(blueprint)
    shop.app.register_blueprint(api)
    if when == "after":
        shop.idempotency.exempt(target)
    found = [shop.found(path) for path in ("/search", "/own", "/hidden", "/sibling", "/calling")]
    assert found == ["plain", "own", *["covered"] * 3]


@pytest.mark.parametrize("attempt", range(10))
def test_first_requests_that_come_together_protect_a_view_once(shop, attempt):
    """The response that ``abort`` makes is stored: it is the view's, not that of a function inside."""
    shop.idempotency.protect(shop.app)
    shop.add("/payments", view=lambda: abort(404))
    together, switch = threading.Barrier(8), sys.getswitchinterval()

    def post(number):
        together.wait(10)
        return shop.post(key=f"key-{number}").status_code

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(post, range(8))) == {404}
    finally:
        sys.setswitchinterval(switch)
    for number in range(8):
        assert shop.post(key=f"key-{number}").headers["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize("is_whole", [True, False], ids=["application", "blueprint"])
def test_what_is_protected_after_the_first_request_is_so_from_then_on(shop, is_whole):
    api = Blueprint("api", __name__)
    shop.add("/payments", api)
    shop.app.register_blueprint(api)
    assert shop.found() == "plain"
    shop.idempotency.protect(shop.app if is_whole else api)
    assert shop.found() == "covered"
    shop.idempotency.exempt(shop.pay)
    assert shop.found() == "covered", "what is protected stays so"


def test_a_factory_protects_its_blueprint_for_each_application():
    """The blueprint and the extension belong to modules, the rest is done anew each time."""
    idempotency, api = Idempotency(), Blueprint("api", __name__)
    for number in range(2):
        shop = Shop(idempotency=idempotency)
        idempotency.protect(api)
        idempotency.exempt("api.search")
        for path in () if number else ("/payments", "/search"):
            shop.add(path, api)
        shop.app.register_blueprint(api)
        assert (shop.covered_methods("/payments"), shop.found("/search")) == ("POST PATCH", "plain")


WRONG_METHODS = (), "POST", ["put"], ["POST", "HEAD"], ["BREW"], [5], None, 5, b"POST"
NO_TARGET, NO_EXEMPTION = "an application or a blueprint", "a view, a blueprint, or the name of an end"


def test_what_cannot_be_protected_or_exempt_is_named(shop):
    protect, exempt = shop.idempotency.protect, shop.idempotency.exempt
    app, one, two = shop.app, Blueprint("one", __name__), Blueprint("two", __name__)
    for target in app, one:
        protect(target)
    exempt(two)
    wrong = [
        *((protect, each, {}, NO_TARGET) for each in ("a", None, Blueprint)),
        *((protect, app, {"methods": each}, "^methods is .*: .*DELETE") for each in WRONG_METHODS),
        *((protect, app, {"skip": each}, "^skip is .*: a callable") for each in (True, "a", ["/"])),
        (protect, app, {"name": "shared"}, "name is not an option"),
        (protect, Flask("other"), {}, "call idempotency.init_app"),
        *((exempt, each, {}, NO_EXEMPTION) for each in (None, 5, ["search"], Flask("other"))),
        (protect, app, {"methods": ["PUT"]}, "protected already with other methods"),
        (exempt, one, {}, "one is protected"),
        (protect, two, {}, "two is exempt"),
        (idempotent, None, {"skip": len}, "skip is not an option"),
    ]
    for use, target, options, said in wrong:
        with pytest.raises(ConfigurationError, match=said):
            use(target, **options)


def test_an_endpoint_that_is_too_long_for_a_name_is_named(shop):
    shop.app.add_url_rule("/long", "e" * 256, idempotent(dict), methods=["POST"])
    with pytest.raises(ConfigurationError, match="give that a name=..., which is a string of 1 to 255"):
        shop.post("/long")
    found = shop.app.test_cli_runner().invoke(cli, ["check"])
    assert (found.exit_code, "cannot name its operation" in found.output) == (1, True)


# The order of decorators.

ROUTE = "the route's decorator"
WRONG = {
    "at once": [idempotent, ROUTE],
    "with options": [idempotent(required=False), ROUTE],
    "below another": [wrapping, idempotent, ROUTE],
    "below one that hides it": [nameless, idempotent, ROUTE],
    "above a decorated view": [idempotent, ROUTE, wrapping],
    "the route above a hidden view": [idempotent, ROUTE, nameless],
    "above a partial": [idempotent, functools.partial, ROUTE],
}
RIGHT = {
    "at once": [ROUTE, idempotent],
    "below two": [ROUTE, nameless, wrapping, idempotent],
    "above one that hides the view": [ROUTE, idempotent, nameless],
    "a decorator above the route": [wrapping, ROUTE, idempotent],
    "twice": [ROUTE, idempotent, idempotent],
    "below a partial": [ROUTE, functools.partial, idempotent],
}


def register(shop, order):
    route = shop.app.route("/payments", methods=["GET", "POST", "PUT"], endpoint="pay")
    view = shop.pay
    for decorator in reversed(order):
        view = route(view) if decorator is ROUTE else decorator(view)


@pytest.mark.parametrize(
    "covered", [None, {}, {"skip": lambda _request: True}], ids=["plain", "covered", "skipped"]
)
@pytest.mark.parametrize("order", WRONG.values(), ids=WRONG)
def test_above_the_route_it_is_refused_by_name(shop, order, covered):
    """Where ``protect`` covers the view, too: whoever put it there meant its options."""
    register(shop, order)
    if covered is not None:
        shop.idempotency.protect(shop.app, **covered)
    assert shop.post(method="GET").status_code == 201
    found = {shop.found(method=method) for method in ("POST", "PUT")}  # one that protect() leaves out
    assert found == {"refused"}


@pytest.mark.parametrize("order", RIGHT.values(), ids=RIGHT)
def test_below_the_route_it_protects(shop, order):
    register(shop, order)
    assert shop.found() == "covered"


def as_method(view):
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
@pytest.mark.parametrize("is_covered", [False, True])
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
