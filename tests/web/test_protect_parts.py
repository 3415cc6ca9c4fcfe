"""What ``protect`` leaves out: methods, requests that ``skip`` lets pass, and what is exempt."""

import functools
import gc
import io
import weakref

import pytest
from flask import Blueprint, Flask, abort, request
from flask.views import MethodView, View

from flask_idempotency import ConfigurationError, Idempotency, idempotent
from tests.web.plain_shop import Shop


@pytest.fixture
def shop():
    return Shop()


# Methods


def test_the_methods_are_those_that_are_named(shop):
    shop.idempotency.protect(shop.app, methods=["PUT", "DELETE"])
    shop.add("/payments")
    assert shop.protected_methods("/payments") == {"PUT", "DELETE"}


def test_each_blueprint_has_its_own_methods(shop):
    for name, methods in {"a": {"POST"}, "b": {"PUT", "PATCH"}}.items():
        blueprint = Blueprint(name, __name__, url_prefix=f"/{name}")
        shop.idempotency.protect(blueprint, methods=methods)
        shop.add("/payments", blueprint)
        shop.app.register_blueprint(blueprint)
    assert shop.protected_methods("/a/payments") == {"POST"}
    assert shop.protected_methods("/b/payments") == {"PUT", "PATCH"}


@pytest.mark.parametrize(
    "methods",
    [(), "POST", ["put"], ["GET"], ["POST", "HEAD"], ["BREW"], [""], [5], None, 5, b"POST"],
    ids=repr,
)
def test_methods_that_cannot_be_protected_are_refused(shop, methods):
    with pytest.raises(ConfigurationError, match=r"^methods is .*allowed: .*DELETE, PATCH, POST, PUT"):
        shop.idempotency.protect(shop.app, methods=methods)


# skip


def test_skip_lets_a_request_pass_as_if_it_were_not_protected(shop):
    asked = []

    def skip(asking):
        asked.append(asking.path)
        assert asking == request
        return asking.args.get("skip")

    shop.idempotency.protect(shop.app, skip=skip)
    shop.add("/payments")
    for key in None, "key-1", "key-1", "mal,formed":
        answer = shop.post("/payments?skip=1", key)
        assert (answer.status_code, "Idempotent-Replayed" in answer.headers) == (201, False)
    assert shop.runs == len(asked) == 4, "once for each request"
    assert shop.post("/payments", None).status_code == 400
    assert shop.is_protected("/payments")
    assert len(asked) == 7
    shop.post("/payments", method="PUT")
    assert len(asked) == 7, "not for a method that is not protected"


def test_of_a_request_that_skip_lets_pass_the_body_is_left_to_the_view(shop):
    body = io.BytesIO(b"a film")
    shop.idempotency.protect(shop.app, skip=lambda _request: True)

    @shop.app.post("/upload")
    def upload():
        return {"read_before": body.tell(), "film": request.stream.read().decode()}

    answer = shop.app.test_client().post(
        "/upload",
        headers={"Idempotency-Key": "key-1"},
        environ_overrides={"wsgi.input": body, "CONTENT_LENGTH": "6"},
    )
    assert answer.json == {"read_before": 0, "film": "a film"}


def test_skip_lets_a_natural_key_be(shop):
    shop.idempotency.protect(shop.app, skip=lambda _request: True, key=lambda: "order-1")
    shop.add("/payments")
    assert not shop.is_protected("/payments")


def test_skip_is_not_asked_for_a_view_with_options_of_its_own(shop):
    shop.idempotency.protect(shop.app, skip=lambda _request: True)
    shop.add("/own", view=idempotent(shop.pay))
    assert shop.is_protected("/own")


def test_a_protected_function_that_a_skipped_view_calls_is_protected(shop):
    shop.idempotency.protect(shop.app, skip=lambda _request: True)
    inner = idempotent(shop.pay)
    shop.add("/outer", view=lambda: inner())  # noqa: PLW0108
    assert shop.post("/outer", None).status_code == 400
    assert shop.is_protected("/outer")


def test_what_skip_raises_is_the_applications_own(shop):
    shop.idempotency.protect(shop.app, skip=lambda _request: abort(418))
    shop.add("/payments")
    assert shop.post("/payments").status_code == 418
    assert shop.runs == 0


@pytest.mark.parametrize("skip", [True, "admin", ["/admin"]])
def test_only_a_callable_skips(shop, skip):
    with pytest.raises(
        ConfigurationError, match=r"^skip is .*; allowed: a callable that takes the req"
    ):
        shop.idempotency.protect(shop.app, skip=skip)


def test_skip_and_methods_are_no_options_of_a_view():
    for option in "skip", "methods":
        with pytest.raises(ConfigurationError, match=f"{option} is not an option"):
            idempotent(**{option: ["POST"]})


# exempt


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", ["view", "decorated view", "name", "blueprint", "parent"])
def test_what_is_exempt_is_left_out(shop, way, when):
    """Before and after registration."""
    api, inner = Blueprint("api", __name__), Blueprint("inner", __name__)
    views = {"decorated view": _wrapping(shop.pay)}
    name = {"name": "api.inner.search", "blueprint": inner, "parent": api}.get(way, shop.pay)
    if when == "before":
        shop.idempotency.exempt(name)
    shop.idempotency.protect(shop.app)
    shop.add("/search", inner, views.get(way))
    api.register_blueprint(inner)
    shop.app.register_blueprint(api)
    shop.add("/payments", view=lambda: shop.pay())  # noqa: PLW0108
    if when == "after":
        shop.idempotency.exempt(name)
    assert not shop.protected_methods("/search")
    assert shop.is_protected("/payments")


def _wrapping(view):
    return functools.wraps(view)(lambda *args, **kwargs: view(*args, **kwargs))  # noqa: PLW0108


def _nameless(view):
    return lambda *args, **kwargs: view(*args, **kwargs)  # noqa: PLW0108


def test_a_function_that_takes_an_exempt_one_is_not_exempt_itself(shop):
    shop.idempotency.protect(shop.app)
    shop.idempotency.exempt(shop.pay)
    shop.add("/payments", view=_nameless(shop.pay))
    assert shop.is_protected("/payments")


def test_a_class_of_views_is_exempt_after_its_registration(shop):
    class Search(MethodView):
        def post(self):
            return shop.pay()

    shop.idempotency.protect(shop.app)
    shop.app.add_url_rule("/search", view_func=Search.as_view("search"))
    shop.idempotency.exempt(Search)
    assert not shop.is_protected("/search")


def test_exempt_gives_back_what_it_was_given(shop):
    for target in shop.pay, Blueprint("api", __name__), "search":
        assert shop.idempotency.exempt(target) is target


def test_a_blueprint_inside_of_an_exempt_one_may_be_protected(shop):
    api, inner = Blueprint("api", __name__), Blueprint("inner", __name__)
    shop.idempotency.protect(shop.app)
    shop.idempotency.exempt(api)
    shop.idempotency.protect(inner)
    shop.add("/search", api)
    shop.add("/payments", inner)
    api.register_blueprint(inner)
    shop.app.register_blueprint(api)
    assert not shop.is_protected("/search")
    assert shop.is_protected("/payments")


def test_in_an_exempt_blueprint_a_view_with_options_of_its_own_keeps_them(shop):
    api = Blueprint("api", __name__)
    shop.idempotency.exempt(api)
    shop.add("/payments", api, idempotent(shop.pay))
    shop.app.register_blueprint(api)
    assert shop.is_protected("/payments")


# Views with options of their own


def refuses(_operation):
    return False


@pytest.mark.parametrize("kind", [View, MethodView])
def test_a_class_whose_dispatch_is_idempotent_keeps_its_own_options(shop, kind):
    class Payments(kind):
        methods = ["POST"]  # noqa: RUF012 -- as Flask's documentation has it

        @idempotent(authorize_replay=refuses)
        def dispatch_request(self):
            return shop.pay()

        def post(self):
            """So that it takes this method."""

    shop.idempotency.protect(shop.app)
    shop.app.add_url_rule("/payments", view_func=Payments.as_view("pay"))
    assert [shop.post().status_code for _ in range(2)] == [201, 403]


def test_a_decorator_hides_a_views_own_options_from_protect(shop):
    """As of a protected function that a covered view calls, those of protect() count."""
    shop.add("/payments", view=_nameless(idempotent(authorize_replay=refuses)(shop.pay)))
    shop.idempotency.protect(shop.app)
    assert shop.is_protected("/payments")


@pytest.mark.parametrize("hide", [_wrapping, _nameless])
def test_a_view_whose_options_are_those_of_protect_may_be_hidden(shop, hide):
    shop.add("/payments", view=hide(idempotent(ttl=60)(shop.pay)))
    shop.idempotency.protect(shop.app, ttl=60)
    assert shop.is_protected("/payments")


def test_a_protected_function_that_a_covered_view_calls_is_part_of_it(shop):
    shop.idempotency.protect(shop.app)
    inner = idempotent(authorize_replay=refuses)(shop.pay)
    shop.add("/outer", view=lambda: inner())  # noqa: PLW0108
    assert shop.is_protected("/outer")


# Calls that would do nothing


@pytest.mark.parametrize("target", [None, 5, ["search"], Flask("other"), b"search"], ids=type)
def test_only_a_view_a_blueprint_or_an_endpoint_is_exempt(shop, target):
    with pytest.raises(ConfigurationError, match="allowed: a view, a blueprint, or the name of an end"):
        shop.idempotency.exempt(target)


def test_a_view_with_options_of_its_own_that_is_exempt_stays_protected(shop):
    shop.add("/own", view=shop.idempotency.exempt(idempotent(shop.pay)))
    assert shop.is_protected("/own")


def test_what_one_protect_covers_no_other_may_leave_out(shop):
    api = Blueprint("api", __name__)
    for target in shop.app, api:
        shop.idempotency.protect(target)
        with pytest.raises(ConfigurationError, match="protected already with other methods"):
            shop.idempotency.protect(target, methods=["PUT"])


def test_what_is_protected_is_not_exempt_nor_the_other_way_round(shop):
    one, two = Blueprint("one", __name__), Blueprint("two", __name__)
    shop.idempotency.protect(one)
    shop.idempotency.exempt(two)
    with pytest.raises(ConfigurationError, match="one is protected"):
        shop.idempotency.exempt(one)
    with pytest.raises(ConfigurationError, match="two is exempt"):
        shop.idempotency.protect(two)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_factory_protects_its_blueprint_for_each_application(is_first):
    """The blueprint and the extension belong to modules, the rest is done anew each time."""
    idempotency, api = Idempotency(), Blueprint("api", __name__)

    def create_shop():
        if is_first:
            idempotency.protect(api, authorize_replay=lambda operation: True)
            idempotency.exempt("api.search")
        shop = Shop(idempotency=idempotency)
        if not is_first:
            idempotency.protect(api, authorize_replay=lambda operation: True)
            idempotency.exempt("api.search")
        if not api._got_registered_once:
            shop.add("/payments", api)
            shop.add("/search", api)
        shop.app.register_blueprint(api)
        return shop

    for _ in range(3):
        shop = create_shop()
        assert shop.protected_methods("/payments") == {"POST", "PATCH"}
        assert not shop.is_protected("/search")


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


def test_what_is_protected_for_a_later_application_may_come_after_the_first_request_of_another():
    idempotency = Idempotency()
    first = Shop(idempotency=idempotency)
    first.add("/payments")
    assert not first.is_protected("/payments")
    api = Blueprint("api", __name__)
    idempotency.protect(api)
    second = Shop(idempotency=idempotency)
    second.add("/payments", api)
    second.app.register_blueprint(api)
    idempotency.exempt("payments")
    assert second.is_protected("/payments")


def test_an_application_is_set_up_before_it_is_protected():
    with pytest.raises(ConfigurationError, match="call idempotency.init_app"):
        Idempotency().protect(Flask("other"))


def test_blueprints_that_were_registered_are_forgotten():
    idempotency = Idempotency()

    def create_shop():
        api = Blueprint("api", __name__)
        idempotency.protect(api)
        shop = Shop(idempotency=idempotency)
        shop.app.register_blueprint(api)
        return weakref.ref(api)

    gone = create_shop()
    gc.collect()
    assert gone() is None


def test_applications_that_were_protected_are_forgotten():
    idempotency = Idempotency()
    shop = Shop(idempotency=idempotency)
    idempotency.protect(shop.app)
    idempotency.exempt(shop.pay)
    gone = weakref.ref(shop.app)
    del shop
    gc.collect()
    assert gone() is None
