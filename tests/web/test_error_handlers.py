"""Handlers for every error, on blueprints and applications, and what stands in Flask's own place."""

import pytest
import sqlalchemy as sa
from flask import Blueprint, Flask, g
from werkzeug.exceptions import HTTPException

from flask_idempotency import (
    IdempotencyError,
    KeyRequired,
    KeyReused,
    OperationInterrupted,
    RequestInProgress,
    idempotent,
)
from flask_idempotency.core.errors import Problem

PLACES = "app", "outer", "inner"
CONFLICT = "do $$ begin raise sqlstate '40001'; end $$"

pytestmark = pytest.mark.parametrize("store", ["postgres"], indirect=True)


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


def executing(world, statement):
    return lambda: [world.db.session.execute(sa.text(statement))]


def saying(place, kind):
    return lambda error: {"by": f"{place} {kind.__name__}", "type": error.type}


KINDS = IdempotencyError, Problem, KeyRequired
HANDLERS = [
    ([], None),
    ([("app", KeyReused)], None),
    *(([(place, kind)], f"{place} {kind.__name__}") for place in PLACES for kind in KINDS),
    # As Flask looks for handlers: the place counts more than the class.
    ([("app", KeyRequired), ("outer", IdempotencyError), ("outer", Problem)], "outer Problem"),
]


@pytest.mark.parametrize(("handlers", "by"), HANDLERS)
def test_a_handler_for_problems_wins_wherever_it_is_and_one_for_all_errors_gets_none(
    shop, assert_problem, handlers, by
):
    """And functions after requests may rely on those before it."""

    @shop.app.after_request
    def rely_on_sign_in(response):
        response.headers["X-Account"] = g.account_id
        return response

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


def test_an_atomic_view_that_does_not_know_is_rolled_back_and_may_try_again(make_world, assert_problem):
    """Its own 409s would be final as stored responses, and nobody is there to decide."""
    world = make_world()
    ends = [None, OperationInterrupted("Silent."), RequestInProgress(retry_after=1)]

    def pay():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        if (end := ends.pop()) is not None:
            raise end
        return {}, 201

    world.app.post("/payments")(idempotent(pay))
    assert_problem(world.post(), 409, "request-in-progress", retry=True)
    assert_problem(world.post(), 503, "try-again", retry=True)
    assert world.count() == 0
    assert world.post().status_code == 201


class Watched(Flask):
    """As frameworks and tools that report errors do: every error comes by here, and is a 500."""

    def handle_user_exception(self, *ctx):  # and then the error: Flask 3.2 asks for the first name
        *_, error = ctx
        self.logger.error("reported: %s", type(error).__name__)
        return {"reported": True}, 500

    def handle_exception(self, *ctx):
        return self.finalize_request(*ctx[:-1], ({"unhandled": True}, 500))


CONFIGS = [
    {"PROPAGATE_EXCEPTIONS": True},
    {"TESTING": True},
    {"TRAP_HTTP_EXCEPTIONS": True, "TRAP_BAD_REQUEST_ERRORS": True},
    {"PROPAGATE_EXCEPTIONS": False, "CLASS": Watched},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_nothing_that_lets_errors_out_or_catches_them_gets_a_problem(
    make_world, assert_problem, caplog, config
):
    """Nor does whoever calls a view without dispatch: it returns the response."""
    world = make_world(**config)
    world.app.__class__ = config.get("CLASS", Flask)
    world.app.register_error_handler(Exception, caught)

    @idempotent(atomic=False)
    def retry():
        raise RequestInProgress

    world.app.post("/payments", endpoint="pay")(idempotent(executing(world, CONFLICT)))
    world.app.post("/retries")(retry)
    assert_problem(world.post(key=None), 400, "key-required")
    assert_problem(world.post(), 503, "transaction-conflict", retry=True)
    assert [record.state for record in world.records()] == ["in_progress"]
    assert_problem(world.post("/retries"), 409, "request-in-progress")
    assert "reported" not in caplog.text
    for headers, status in ({}, 400), ({"Idempotency-Key": "key-2"}, 503):
        with world.app.test_request_context("/payments", method="POST", headers=headers):
            g.account_id = "alice"
            assert world.app.view_functions["pay"]().status_code == status
