"""``idempotency.protect``: every POST and PATCH view of an application or a blueprint."""

import functools

import pytest
from flask import Blueprint, abort, g
from flask.views import MethodView

from flask_idempotency import ConfigurationError, current_operation, idempotent


@pytest.fixture
def add(app, world):
    """Adds plain views that write a payment."""

    def add(path, target=None, methods=("POST",), view=None):
        endpoint = path.strip("/").replace("/", "_")
        (target or app).add_url_rule(
            path, endpoint, view or (lambda: pay(world)), methods=list(methods)
        )

    return add


def pay(world):
    world.db.session.add(world.Payment(amount=5))
    world.db.session.commit()
    return {"options": current_operation.namespace if current_operation else None}, 201


@pytest.fixture
def is_protected(world, assert_problem):
    """Whether a view is: asked with and without a key, before and after the answer."""

    def check(path="/payments", method="POST"):
        without = world.post(path, key=None, method=method)
        if without.status_code == 201:
            answers = [world.post(path, method=method) for _ in range(2)]
            assert not any("Idempotent-Replayed" in answer.headers for answer in answers)
            return False
        assert_problem(without, 400, "key-required")
        key = f"key-{len(world.records())}"
        first, again = (world.post(path, key=key, method=method) for _ in range(2))
        assert (first.status_code, again.status_code) == (201, 201), first.text
        assert "Idempotent-Replayed" not in first.headers
        return again.headers.get("Idempotent-Replayed") == "true"

    return check


def test_an_application_protects_its_post_and_patch_views(app, world, add, is_protected):
    world.idempotency.protect(app)
    add("/payments", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    assert is_protected(method="POST")
    assert is_protected(method="PATCH")
    assert not is_protected(method="PUT")
    assert not is_protected(method="DELETE")
    assert not is_protected(method="GET")


def test_a_blueprint_protects_its_own_views(app, world, add, is_protected):
    shop, other = Blueprint("shop", __name__), Blueprint("other", __name__)
    inner = Blueprint("inner", __name__)
    for path, target in {"/a": shop, "/b": other, "/c": inner, "/d": app}.items():
        add(path, target)
    shop.register_blueprint(inner)
    for blueprint in shop, other:
        app.register_blueprint(blueprint)
    world.idempotency.protect(shop)
    assert is_protected("/a")
    assert not is_protected("/b")
    assert is_protected("/c")
    assert not is_protected("/d")


def test_the_options_of_a_blueprint_come_before_those_of_the_application(app, world, add):
    shop = Blueprint("shop", __name__)
    world.idempotency.protect(app, namespace="by-app")
    world.idempotency.protect(shop, namespace="by-blueprint")
    add("/a", shop)
    add("/b")
    app.register_blueprint(shop)
    assert world.post("/a").json == {"options": "by-blueprint"}
    assert world.post("/b").json == {"options": "by-app"}


class Views(MethodView):
    """One method with options of its own, one exempt, one without either."""

    world = None

    @idempotent(namespace="own")
    def post(self):
        return pay(self.world)

    def patch(self):
        return pay(self.world)


@pytest.mark.parametrize("order", [["POST", "PATCH", "POST"], ["PATCH", "POST", "PATCH"]], ids=str)
def test_a_method_with_options_of_its_own_keeps_them_whoever_comes_first(app, world, add, order):
    world.idempotency.protect(app, namespace="by-app")
    view = type("Both", (Views,), {"world": world}).as_view("both")
    add("/payments", view=view, methods=["POST", "PATCH"])
    names = {"POST": "own", "PATCH": "by-app"}
    for number, method in enumerate(order):
        response = world.post(method=method, key=f"key-{number}")
        assert response.json == {"options": names[method]}, number


@pytest.mark.parametrize("order", [["POST", "PATCH", "POST"], ["PATCH", "POST", "PATCH"]], ids=str)
def test_an_exempt_method_stays_exempt_whoever_comes_first(app, world, add, is_protected, order):
    world.idempotency.protect(app)

    class Half(MethodView):
        @world.idempotency.exempt
        def post(self):
            return pay(world)

        def patch(self):
            return pay(world)

    add("/payments", view=Half.as_view("half"), methods=["POST", "PATCH"])
    for method in order:
        assert is_protected(method=method) == (method == "PATCH"), method


def login_required(view):
    @functools.wraps(view)
    def inner(**values):
        return view(**values) if g.account_id else abort(403)

    return inner


def test_a_guard_below_is_made_up_for_by_the_scope(app, world, add, assert_problem):
    """The replay does not come to the view's own decorators; the scope finds nobody."""
    world.idempotency.protect(app)
    add("/payments", view=login_required(lambda: pay(world)))
    assert world.post().status_code == 201
    assert_problem(world.post(user=""), 401, "scope-unknown")
    assert world.post(user="bob").headers.get("Idempotent-Replayed") is None


def test_a_guard_below_is_made_up_for_by_authorize_replay(app, world, add, assert_problem):
    world.idempotency.protect(app, scope=None, authorize_replay=lambda operation: bool(g.account_id))
    add("/payments", view=login_required(lambda: pay(world)))
    assert world.post().status_code == 201
    assert_problem(world.post(user=""), 403, "replay-forbidden")
    assert world.post().headers["Idempotent-Replayed"] == "true"


def test_an_async_view_and_a_class_are_protected_too(app, world, add, is_protected):
    world.idempotency.protect(app)

    async def view():
        return pay(world)

    class Payments(MethodView):
        def post(self):
            return pay(world)

    add("/a", view=view)
    add("/b", view=Payments.as_view("payments"))
    assert is_protected("/a")
    assert is_protected("/b")


@pytest.mark.parametrize("target", ["orders", None, 5, Blueprint])
def test_only_an_application_or_a_blueprint_is_protected(world, target):
    with pytest.raises(ConfigurationError, match="allowed: an application or a blueprint"):
        world.idempotency.protect(target)


def test_a_name_is_for_one_view_alone(world):
    with pytest.raises(ConfigurationError, match="name is not an option"):
        world.idempotency.protect(Blueprint("shop", __name__), name="shared")
