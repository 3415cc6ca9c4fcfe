"""Handlers for every error, on blueprints and applications, and what stands in Flask's own place."""

import functools
import logging
from contextlib import suppress

import flask_restful
import flask_restx
import pytest
import sqlalchemy as sa
from flask import Blueprint, Flask, abort, g
from flask_sqlalchemy import SQLAlchemy
from werkzeug.exceptions import HTTPException

from flask_idempotency import (
    IdempotencyError,
    KeyRequired,
    KeyReused,
    NotAtomic,
    RequestInProgress,
    idempotent,
)
from flask_idempotency.core.errors import Problem


@pytest.fixture
def store():
    return "postgres"


@pytest.fixture
def shop(make_world):
    """An application in production, with a view in a blueprint in a blueprint."""
    world = make_world(PROPAGATE_EXCEPTIONS=False)
    world.outer, world.inner = Blueprint("outer", __name__), Blueprint("inner", __name__)

    def register(view=dict, **options):
        world.inner.add_url_rule(
            "/payments", "pay", idempotent(**options)(view), methods=["POST", "DELETE"]
        )
        world.outer.register_blueprint(world.inner)
        world.app.register_blueprint(world.outer)

    world.register = register
    return world


def caught(_error):
    return {"caught": True}, 418


def saying(name):
    return lambda error: {"by": name, "type": error.type}


PLACES = ["app", "outer", "inner"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [Exception, HTTPException, 400, 422, 500])
def test_a_handler_for_all_errors_does_not_get_problems(shop, assert_problem, place, kind):
    getattr(shop, place).register_error_handler(kind, caught)
    shop.register()
    assert_problem(shop.post(key=None), 400, "key-required")
    assert shop.post().status_code == 200
    assert_problem(shop.post(json={"amount": 6}), 422, "key-reused")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [IdempotencyError, Problem, KeyRequired])
def test_a_handler_for_problems_wins_wherever_it_is(shop, place, kind):
    for each in PLACES:
        getattr(shop, each).register_error_handler(Exception, caught)
    getattr(shop, place).register_error_handler(kind, saying(place))
    shop.register()
    refused = shop.post(key=None)
    assert refused.json == {"by": place, "type": "key-required"}
    assert refused.headers["Cache-Control"] == "no-store"


def test_a_blueprint_comes_before_the_application_and_a_class_before_those_above_it(shop):
    """As Flask looks for handlers: the place counts more than the class."""
    shop.app.register_error_handler(KeyRequired, saying("the application's, exact"))
    shop.outer.register_error_handler(IdempotencyError, saying("outer, all"))
    shop.outer.register_error_handler(Problem, saying("outer, problems"))
    shop.register()
    assert shop.post(key=None).json["by"] == "outer, problems"
    shop.app.error_handler_spec["outer.inner"][None][IdempotencyError] = saying("inner, all")
    assert shop.post(key=None).json["by"] == "inner, all"


class HandlesFirst(SQLAlchemy):
    """Registers the error handler when the database is set up, before the extension is."""

    def init_app(self, app):
        super().init_app(app)
        app.register_error_handler(IdempotencyError, saying("app"))


def test_a_handler_may_be_there_before_the_extension(make_world, add_view):
    world = make_world(db=HandlesFirst())
    add_view(world)
    assert world.post(key=None).json == {"by": "app", "type": "key-required"}


def test_a_handler_for_one_problem_leaves_the_others_to_us(shop, assert_problem):
    """And those pass the functions around requests, on which the application may rely."""

    @shop.app.after_request
    def rely_on_sign_in(response):
        response.headers["X-Account"] = g.account_id
        return response

    shop.app.register_error_handler(KeyReused, lambda error: ({"by": error.detail}, error.status + 10))
    shop.register()
    assert shop.post().status_code == 200
    changed = shop.post(json={"amount": 6})
    assert (changed.status_code, bool(changed.json["by"])) == (432, True)
    refused = shop.post(key=None)
    assert_problem(refused, 400, "key-required")
    assert refused.headers["X-Account"] == "alice"


def test_a_handler_may_be_an_async_function(shop):
    async def handle(problem):
        return {"by": problem.type}, 400

    shop.inner.register_error_handler(Problem, handle)
    shop.register()
    assert shop.post(key=None).json == {"by": "key-required"}


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_problem_that_run_raises_in_any_view_is_the_response(shop, assert_problem, method, is_async):
    """Where the view does not catch it, whether or not the view itself is protected."""
    run = functools.partial(shop.idempotency.run, "key-1", dict, scope="alice", name="invoice")

    def send(payload):
        return run(payload=payload)

    async def async_send(payload):
        return run(payload=payload)

    view = async_send if is_async else send
    shop.app.register_error_handler(Exception, caught)
    shop.inner.add_url_rule("/invoices/<payload>", "invoice", view, methods=[method])
    shop.register()
    assert shop.post("/invoices/1", key=None, method=method).json == {}
    assert_problem(shop.post("/invoices/2", key=None, method=method), 422, "key-reused")


def test_a_problem_that_a_view_caught_is_not_the_one_it_raises(shop, assert_problem):
    protected = idempotent(dict)

    @shop.app.post("/invoices")
    def refuse():
        with suppress(KeyRequired):
            protected()
        raise RequestInProgress(retry_after=3)

    assert_problem(shop.post("/invoices", key=None), 409, "request-in-progress", retry=True)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("atomic", [False, True])
def test_errors_of_the_application_are_the_applications(shop, caplog, atomic, is_async):
    """The response, the log and the record are what they are where nobody handles the error."""

    def crash():
        raise ValueError("a mistake in the view")

    async def async_crash():
        crash()

    shop.register(async_crash if is_async else crash, atomic=atomic)
    shop.app.add_url_rule("/plain", "plain", async_crash if is_async else crash, methods=["POST"])
    with caplog.at_level(logging.ERROR):
        plain, first = shop.post("/plain"), shop.post()
    assert (first.status_code, first.data) == (plain.status_code, plain.data) == (500, plain.data)
    said = [(record.name, record.exc_info and record.exc_info[0]) for record in caplog.records]
    ours = [] if atomic else [("flask_idempotency", None)]  # it is final: somebody must decide
    assert sorted(said, key=str) == sorted([*ours, *[("shop", ValueError)] * 2], key=str)
    assert ("Idempotent-Replayed" in shop.post().headers) == (not atomic)


def leave_uncommitted(world):
    def view():
        world.db.session.execute(sa.text("INSERT INTO payment (amount) VALUES (1)"))
        return {}, 201

    return view


def test_a_mistake_that_is_refused_is_a_plain_500_and_logged_as_one(shop, caplog):
    shop.app.register_error_handler(Problem, caught)
    shop.app.register_error_handler(HTTPException, lambda error: ("in our form", error.code))
    shop.register(leave_uncommitted(shop))
    refused = shop.post()
    assert (refused.status_code, refused.text) == (500, "in our form")
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [NotAtomic]
    assert shop.count() == 0


def write_elsewhere(world):
    def view():
        world.db.session.execute(sa.text("COMMIT"))
        return {}, 201

    return view


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_hears_of_a_mistake_once(shop, place, is_async):
    heard, view = [], write_elsewhere(shop)

    async def async_view():
        return view()

    getattr(shop, place).register_error_handler(
        NotAtomic, lambda error: heard.append(error) or ({"mistake": True}, 500)
    )
    shop.register(async_view if is_async else view)
    assert shop.post().json == {"mistake": True}
    assert len(heard) == 1


@pytest.mark.parametrize("mistake", [leave_uncommitted, write_elsewhere])
@pytest.mark.parametrize("framework", [flask_restful, flask_restx])
def test_a_mistake_in_a_resource_is_the_frameworks_500_and_logged(shop, caplog, framework, mistake):
    view = idempotent(mistake(shop))
    resource = type("Payments", (framework.Resource,), {"post": lambda _self: view()})
    framework.Api(shop.app).add_resource(resource, "/payments")
    refused = shop.post()
    assert (refused.status_code, refused.json) == (500, {"message": "Internal Server Error"})
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [NotAtomic]
    assert shop.count() == 0


def test_a_problem_of_the_end_above_the_view_is_written_over_its_response(shop, assert_problem):
    """Its commit fails in our own after_request function: what the others have added stays."""
    seen = []
    shop.sql("ALTER TABLE payment ADD CONSTRAINT late UNIQUE (amount) DEFERRABLE INITIALLY DEFERRED")

    @shop.app.after_request
    def count(response):
        seen.append(response.status_code)
        response.headers["X-Account"] = g.account_id
        return response

    def view():
        shop.db.session.add(shop.Payment(amount=1))
        return {}, 201, {"X-View": "its own"}

    @shop.app.after_request
    def commit(response):
        if response.status_code == 201:
            shop.db.session.commit()
            shop.db.session.execute(sa.text("SELECT 1"))
            kill = "SELECT pg_terminate_backend(:pid)"
            shop.sql(kill, pid=shop.db.session.scalar(sa.text("SELECT pg_backend_pid()")))
        return response

    shop.inner.register_error_handler(Exception, caught)
    shop.register(view)
    refused = shop.post()
    assert_problem(refused, 503, "store-unavailable", retry=True)
    assert (refused.headers["X-Account"], refused.headers.get("X-View")) == ("alice", None)
    assert seen == [201]
    assert shop.count() == 0


def conflict(world):
    def view():
        world.db.session.execute(
            sa.text("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = 'serialization_failure'; END $$")
        )

    return view


@pytest.mark.parametrize(
    "config",
    [
        {"PROPAGATE_EXCEPTIONS": True},
        {"PROPAGATE_EXCEPTIONS": None, "TESTING": True},
        {"PROPAGATE_EXCEPTIONS": None, "DEBUG": True},
        {"TRAP_HTTP_EXCEPTIONS": True},
        {"TRAP_BAD_REQUEST_ERRORS": True},
    ],
)
def test_settings_that_let_errors_out_change_no_problem(make_world, assert_problem, config):
    world = make_world(**config)
    world.app.register_error_handler(Exception, caught)
    world.app.post("/payments")(idempotent(conflict(world)))
    assert_problem(world.post(key=None), 400, "key-required")
    assert_problem(world.post(), 503, "transaction-conflict", retry=True)


@pytest.mark.parametrize("trapped", [False, True])
def test_a_trapped_http_exception_is_an_unhandled_error_with_us_too(make_world, trapped):
    world = make_world(TRAP_HTTP_EXCEPTIONS=trapped, PROPAGATE_EXCEPTIONS=False)
    world.app.post("/plain", endpoint="plain")(functools.partial(abort, 409))
    world.app.post("/payments", endpoint="pay")(idempotent(functools.partial(abort, 409)))
    plain, first = world.post("/plain"), world.post()
    assert (first.status_code, first.data) == (plain.status_code, plain.data)
    assert first.status_code == (500 if trapped else 409)
    assert ("Idempotent-Replayed" in world.post().headers) == (not trapped)


class Watched(Flask):
    """As tools that report errors, and frameworks, do: every error comes by here, and is a 500."""

    def handle_user_exception(self, *ctx):  # and then the error: Flask 3.2 asks for the first name
        *_, error = ctx
        self.logger.error("reported: %s", type(error).__name__)
        return {"reported": True}, 500

    def handle_exception(self, *ctx):
        return self.finalize_request(*ctx[:-1], ({"unhandled": True}, 500))


def test_nothing_that_stands_in_flasks_place_gets_a_problem(shop, caplog, assert_problem):
    shop.app.__class__ = Watched
    shop.app.post("/conflicts")(idempotent(conflict(shop)))
    shop.app.post("/retries", endpoint="retry")(idempotent(atomic=False)(raising(RequestInProgress)))
    shop.app.post("/crashes", endpoint="crash")(idempotent(raising(ValueError)))
    assert_problem(shop.post("/conflicts", key=None), 400, "key-required")
    assert_problem(shop.post("/conflicts"), 503, "transaction-conflict", retry=True)
    assert_problem(shop.post("/retries"), 409, "request-in-progress")
    assert "reported" not in caplog.text
    assert shop.post("/crashes").json == {"reported": True}


def raising(error):
    def view():
        raise error

    return view


def test_a_view_that_is_called_without_dispatch_returns_the_response_to_a_problem(shop):
    shop.register(conflict(shop))
    pay = shop.app.view_functions["outer.inner.pay"]
    with shop.app.test_request_context("/payments", method="POST", headers={"X-User": "alice"}):
        g.account_id = "alice"
        assert pay().status_code == 400
    headers = {"Idempotency-Key": "key-1"}
    with shop.app.test_request_context("/payments", method="POST", headers=headers):
        g.account_id = "alice"
        assert pay().status_code == 503
