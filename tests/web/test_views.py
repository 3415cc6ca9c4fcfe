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


def test_a_class_of_views(app, client, world, pay, assert_runs_once):
    class Payments(MethodView):
        decorators = [idempotent]  # noqa: RUF012 -- as Flask's documentation has it

        def get(self):
            return "list"

        def post(self):
            return pay()

        def delete(self):
            return pay()

    app.add_url_rule("/payments", view_func=Payments.as_view("payments"))
    assert_runs_once()
    assert_runs_once(method="DELETE", key="key-2")
    assert world.post(method="DELETE").status_code == 422
    assert client.get("/payments").data == b"list"


@pytest.mark.parametrize("status", [201, 409])
def test_an_after_request_function_may_use_the_session_after_an_async_view(app, world, status):
    @app.post("/payments")
    @idempotent
    async def payments():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        if status >= 400:
            abort(status)
        return {}, status

    @app.after_request
    def read(response):
        found.append(world.db.session.query(world.Payment).count())
        return response

    found = []
    assert world.post().status_code == status
    assert found == [1]


def test_an_async_view_that_fails(app, world, pay, assert_problem):
    errors = [ZeroDivisionError(), LookupError(), None]

    @app.errorhandler(LookupError)
    async def handled(error):
        await asyncio.sleep(0)
        return {}, 404

    @app.post("/payments")
    @idempotent
    async def payments():
        pay()
        await asyncio.sleep(0)
        if error := errors.pop(0):
            raise error
        return {}, 201

    assert world.post().status_code == 500
    assert world.count() == 0
    assert world.post().status_code == 404
    assert world.post().headers["Idempotent-Replayed"] == "true"
    assert world.count() == 1
    assert_problem(world.post(key=None), 400, "key-required")
    assert len(errors) == 1


def test_an_async_method_of_a_class(app, pay, assert_runs_once):
    class Payments(MethodView):
        init_every_request = False

        @idempotent
        async def post(self):
            return pay()

    app.add_url_rule("/payments", view_func=Payments.as_view("payments"))
    assert_runs_once()


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
        return [await part() if options.get("enforce", True) else True], 201

    first, again = world.post(), world.post()
    is_protected = options.get("enforce", True)
    assert first.status_code == again.status_code == (410 if fails else 201)
    assert fails or first.json == again.json == [True]
    assert (runs, world.count()) == (([True], 1) if is_protected else ([True] * 2, 2))
    assert ("Idempotent-Replayed" in again.headers) == is_protected


def guarded(view):
    """What login extensions do."""

    @functools.wraps(view)
    def inner(*args, **kwargs):
        if not g.account_id:
            abort(401)
        return view(*args, **kwargs)

    return inner


def nameless(view):
    """Like it, forgetting whom it wraps."""

    def inner(*args, **kwargs):
        response = view(*args, **kwargs)
        return response if g.account_id else abort(401)

    return inner


def test_decorators_above_guard_replays_too(app, world, pay, assert_runs_once):
    app.post("/payments")(guarded(idempotent(scope=None)(pay)))
    assert_runs_once()
    assert world.post(user="").status_code == 401


def test_decorators_below_run_once(app, world, pay, assert_runs_once):
    app.post("/payments")(idempotent(scope=None)(guarded(pay)))
    assert world.post(user="", key="other").status_code == 401
    assert_runs_once()
    assert world.post(user="").headers["Idempotent-Replayed"] == "true"


def test_decorators_above_that_hide_the_view(app, world, pay, assert_runs_once, assert_problem):
    app.add_url_rule("/payments", "pay", nameless(idempotent(pay)), methods=["POST"])
    assert_runs_once()
    assert_problem(world.post(key=None), 400, "key-required")
    assert_problem(world.post(key="canary,"), 400, "key-malformed")
    assert world.count() == 1


def test_safe_methods_pass_through_untouched(app, world, pay):
    operations = []

    @app.route("/payments", methods=["GET", "HEAD", "OPTIONS", "POST"])
    @idempotent
    def payments():
        operations.append(bool(current_operation))
        return pay()

    for method in "GET", "HEAD", "OPTIONS":
        for key in None, "key-1", "key-1", "mal,formed":
            assert world.post(method=method, key=key).status_code == 201
    assert operations == [False] * 12
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


def test_switched_off_a_view_is_as_if_undecorated(make_world, add_view):
    world = make_world(IDEMPOTENCY_ENABLED=False)
    runs = add_view(world)
    for key in "key-1", "key-1", None, "mal,formed":
        assert world.post(key=key, user="").status_code == 201
    assert runs == [0] * 4
    assert world.records() == []
