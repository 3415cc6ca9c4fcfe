"""Every way Flask has to write a view, and what stands above and below ``@idempotent`` in it."""

from __future__ import annotations

import asyncio
import functools

import pytest
from flask import Blueprint, Flask, abort, g
from flask.views import MethodView

from flask_idempotency import ConfigurationError, current_operation, idempotent


@pytest.fixture
def pay(world):
    """What the views below do; the number of the payment is their answer."""

    def write():
        payment = world.Payment(amount=5)
        world.db.session.add(payment)
        world.db.session.commit()
        return {"id": payment.id}, 201

    return write


@pytest.fixture
def assert_runs_once(world, assert_replayed):
    def check(path="/payments", **kwargs):
        before = world.count()
        assert_replayed(world.post(path, **kwargs), world.post(path, **kwargs))
        assert world.count() == before + 1

    return check


def test_a_view_of_a_blueprint_in_two_places_is_two(app, world, pay, assert_runs_once):
    inner = Blueprint("inner", __name__)
    inner.post("/payments")(idempotent(pay))
    for name in "a", "b":
        outer = Blueprint(name, __name__, url_prefix=f"/{name}")
        outer.register_blueprint(inner)
        app.register_blueprint(outer)
    assert_runs_once("/a/payments")
    assert_runs_once("/b/payments")
    assert [record.name for record in world.records()] == ["a.inner.write", "b.inner.write"]


@pytest.mark.parametrize("by_method", [True, False])
def test_a_class_of_views(app, client, world, pay, assert_runs_once, by_method):
    async def put(_self):
        return pay()

    members = {"get": lambda _self: "list", "post": lambda _self: pay(), "put": put}
    if by_method:
        members.update(post=idempotent(members["post"]), put=idempotent(put))
    else:
        members["decorators"] = [idempotent]
    view = type("Payments", (MethodView,), members).as_view("payments")
    app.add_url_rule("/payments", view_func=view)
    assert_runs_once()
    assert_runs_once(method="PUT", key="key-2")
    assert world.post(method="PUT").status_code == 422
    assert client.get("/payments").data == b"list"


def test_an_async_view_and_what_surrounds_it(app, world, assert_problem, assert_replayed):
    """Its errors are handled, and a function after the request may use the session."""
    errors, found = [ZeroDivisionError(), LookupError()], []

    @app.errorhandler(LookupError)
    async def handled(_error):
        await asyncio.sleep(0)
        return {}, 404

    @app.after_request
    def read(response):
        found.append(world.db.session.query(world.Payment).count())
        return response

    @app.post("/payments")
    @idempotent
    async def payments():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        await asyncio.sleep(0)
        raise errors.pop(0)

    assert world.post().status_code == 500
    first, again = world.post(), world.post()
    assert first.status_code == 404
    assert_replayed(first, again)
    assert_problem(world.post(key=None), 400, "key-required")
    assert found == [0, 1, 1, 1]


def awaiting(function):
    """What an async decorator does: here it also notes its event loop."""

    @functools.wraps(function)
    async def inner():
        g.loop = asyncio.get_running_loop()
        return await function()

    return inner


@pytest.mark.parametrize("options", [{}, {"atomic": False}, {"enforce": False}], ids=str)
@pytest.mark.parametrize("fails", [False, True])
def test_an_async_view_runs_in_the_event_loop_of_what_awaits_it(app, world, options, fails):
    is_protected = options.get("enforce", True)
    runs = []

    @idempotent
    async def part():
        return g.loop is asyncio.get_running_loop()

    @app.post("/payments")
    @awaiting
    @idempotent(**options)
    async def payments():
        runs.append(g.loop is asyncio.get_running_loop())
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        if fails:
            abort(410)
        return [await part() if is_protected else True], 201

    first, again = world.post(), world.post()
    assert first.status_code == again.status_code == (410 if fails else 201)
    assert fails or first.json == again.json == [True]
    assert (runs, world.count()) == (([True], 1) if is_protected else ([True] * 2, 2))
    assert ("Idempotent-Replayed" in again.headers) == is_protected


def guarded(view):
    """What login extensions do."""

    @functools.wraps(view)
    def inner(*args, **kwargs):
        return view(*args, **kwargs) if g.account_id else abort(401)

    return inner


def nameless(view):
    """Like it, forgetting whom it wraps."""
    inner = guarded(view)
    del inner.__wrapped__, inner.__dict__["__idempotency_route__"]
    return inner


@pytest.mark.parametrize("guard", [guarded, nameless])
def test_decorators_above_guard_replays_too(app, world, pay, assert_runs_once, assert_problem, guard):
    view = guard(idempotent(scope=None)(pay))
    app.add_url_rule("/payments", "pay", view, methods=["POST"])
    assert_runs_once()
    assert world.post(user="").status_code == 401
    assert_problem(world.post(key="canary,"), 400, "key-malformed")


def test_decorators_below_run_once(app, world, pay, assert_runs_once):
    app.post("/payments")(idempotent(scope=None)(guarded(pay)))
    assert world.post(user="", key="other").status_code == 401
    assert_runs_once()
    assert world.post(user="").headers["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize("config", [{}, {"IDEMPOTENCY_ENABLED": False}], ids=["safe", "switched off"])
def test_safe_methods_pass_untouched_and_switched_off_all_do(make_world, pay, config):
    world, operations = make_world(**config), []

    def payments():
        operations.append(bool(current_operation))
        return "", 201

    methods = ["GET", "HEAD", "OPTIONS", *(["POST"] if config else [])]
    world.app.route("/payments", methods=methods)(idempotent(payments))
    for method in methods:
        for key in None, "key-1", "key-1", "mal,formed":
            assert world.post(method=method, key=key, user="").status_code == 201
    assert operations == [False] * 4 * len(methods)
    assert world.records() == []


def test_the_view_keeps_its_name_and_its_signature():
    @idempotent(ttl=60)
    def pay(order: int) -> str:
        """Pays."""
        return ""

    assert (pay.__name__, pay.__doc__) == ("pay", "Pays.")
    assert pay.__annotations__.keys() == {"order", "return"}


def test_an_application_without_the_extension_is_told_so():
    app = Flask("forgetful")
    app.testing = True
    app.post("/payments")(idempotent(lambda: "paid"))
    with pytest.raises(ConfigurationError, match=r"idempotency\.init_app\(app, db, scope="):
        app.test_client().post("/payments")
