"""Handlers for every error, on blueprints and applications, and what stands in Flask's own place."""

import flask_restful
import flask_restx
import pytest
import sqlalchemy as sa
from flask import Blueprint, Flask, g
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

PLACES = "app", "outer", "inner"


@pytest.fixture
def store():
    return "postgres"


@pytest.fixture
def shop(make_world):
    """An application in production, with a view in a blueprint in a blueprint."""
    world = make_world(PROPAGATE_EXCEPTIONS=False)
    world.outer, world.inner = Blueprint("outer", __name__), Blueprint("inner", __name__)

    def register(view=dict):
        world.inner.add_url_rule("/payments", "pay", idempotent(view), methods=["POST"])
        world.outer.register_blueprint(world.inner)
        world.app.register_blueprint(world.outer)

    world.register = register
    return world


def caught(_error):
    return {"caught": True}, 418


def raising(error):
    def view():
        raise error

    return view


def executing(world, statement):
    return lambda: [world.db.session.execute(sa.text(statement))]


CONFLICT, DEADLOCK = (f"do $$ begin raise sqlstate '{code}'; end $$" for code in ("40001", "40P01"))


def saying(place, kind):
    return lambda error: {"by": f"{place} {kind.__name__}", "type": error.type}


KINDS = IdempotencyError, Problem, KeyRequired
HANDLERS = [
    ([], None),
    *(([(place, kind)], f"{place} {kind.__name__}") for place in PLACES for kind in KINDS),
    # As Flask looks for handlers: the place counts more than the class.
    ([("app", KeyRequired), ("outer", IdempotencyError), ("outer", Problem)], "outer Problem"),
]


@pytest.mark.parametrize(("handlers", "by"), HANDLERS)
def test_a_handler_for_problems_wins_wherever_it_is_and_one_for_all_errors_gets_none(
    shop, assert_problem, handlers, by
):
    for each in shop.app, shop.outer, shop.inner:
        for general in Exception, HTTPException, 400, 500:
            each.register_error_handler(general, caught)
    for place, kind in handlers:
        getattr(shop, place).register_error_handler(kind, saying(place, kind))
    shop.register()
    refused = shop.post(key=None)
    if by is None:
        assert_problem(refused, 400, "key-required")
    else:
        assert refused.json == {"by": by, "type": "key-required"}
        assert refused.headers["Cache-Control"] == "no-store"


class HandlesFirst(SQLAlchemy):
    """Registers the error handler when the database is set up, before the extension is."""

    def init_app(self, app):
        super().init_app(app)
        app.register_error_handler(Problem, saying("app", Problem))


def test_a_handler_may_be_there_before_the_extension(make_world, add_view):
    world = make_world(db=HandlesFirst())
    add_view(world)
    world.app.post("/raised", endpoint="raised")(raising(KeyRequired()))
    for path in "/payments", "/raised":
        assert world.post(path, key=None).json == {"by": "app Problem", "type": "key-required"}


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


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_problem_that_run_raises_in_any_view_is_the_response(shop, assert_problem, method):
    """Where the view does not catch it, whether or not the view itself is protected."""

    @shop.inner.route("/invoices/<payload>", methods=[method])
    def send(payload):
        return shop.idempotency.run("key-1", dict, scope="alice", name="invoice", payload=payload)

    shop.app.register_error_handler(Exception, caught)
    shop.register()
    assert shop.post("/invoices/1", key=None, method=method).json == {}
    assert_problem(shop.post("/invoices/2", key=None, method=method), 422, "key-reused")


@pytest.mark.parametrize("place", PLACES)
def test_a_handler_hears_of_a_mistake_once(shop, place):
    heard = []

    async def handle(error):
        heard.append(error)
        return {"mistake": True}, 500

    getattr(shop, place).register_error_handler(NotAtomic, handle)
    shop.register(executing(shop, "commit"))
    assert shop.post().json == {"mistake": True}
    assert len(heard) == 1


@pytest.mark.parametrize("framework", [flask_restful, flask_restx])
def test_a_mistake_in_a_resource_is_the_frameworks_500_and_logged(shop, caplog, framework):
    view = idempotent(executing(shop, "commit"))
    resource = type("Payments", (framework.Resource,), {"post": lambda _self: view()})
    framework.Api(shop.app).add_resource(resource, "/payments")
    refused = shop.post()
    assert (refused.status_code, refused.json) == (500, {"message": "Internal Server Error"})
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [NotAtomic]


class Watched(Flask):
    """As tools that report errors, and frameworks, do: every error comes by here, and is a 500."""

    def handle_user_exception(self, *ctx):  # and then the error: Flask 3.2 asks for the first name
        *_, error = ctx
        self.logger.error("reported: %s", type(error).__name__)
        return {"reported": True}, 500

    def handle_exception(self, *ctx):
        return self.finalize_request(*ctx[:-1], ({"unhandled": True}, 500))


@pytest.mark.parametrize(
    "config",
    [
        {"PROPAGATE_EXCEPTIONS": True},
        {"TESTING": True},
        {"DEBUG": True},
        {"TRAP_HTTP_EXCEPTIONS": True, "TRAP_BAD_REQUEST_ERRORS": True},
        {"PROPAGATE_EXCEPTIONS": False, "CLASS": Watched},
    ],
    ids=str,
)
def test_nothing_that_lets_errors_out_or_catches_them_gets_a_problem(
    make_world, assert_problem, caplog, config
):
    world = make_world(**config)
    world.app.__class__ = config.get("CLASS", Flask)
    world.app.register_error_handler(Exception, caught)
    world.app.post("/payments")(idempotent(executing(world, CONFLICT)))
    world.app.post("/retries", endpoint="retry")(idempotent(atomic=False)(raising(RequestInProgress)))
    assert_problem(world.post(key=None), 400, "key-required")
    assert_problem(world.post(), 503, "transaction-conflict", retry=True)
    assert [record.state for record in world.records()] == ["in_progress"]
    assert_problem(world.post("/retries"), 409, "request-in-progress")
    assert "reported" not in caplog.text


def test_a_view_that_is_called_without_dispatch_returns_the_response_to_a_problem(shop):
    shop.register(executing(shop, DEADLOCK))
    pay = shop.app.view_functions["outer.inner.pay"]
    for headers, status in ({}, 400), ({"Idempotency-Key": "key-1"}, 503):
        with shop.app.test_request_context("/payments", method="POST", headers=headers):
            g.account_id = "alice"
            assert pay().status_code == status
