"""An application answers our errors in its own form, or leaves them to us."""

from __future__ import annotations

import pytest
from flask import Blueprint, Flask, g
from flask_sqlalchemy import SQLAlchemy
from werkzeug.exceptions import HTTPException

from flask_idempotency import IdempotencyError, KeyReused, idempotent


def order():
    return {}


def in_own_form(error):
    return {"code": error.type, "because": error.detail}, error.status + 10


class HandlesFirst(SQLAlchemy):
    """Registers the error handler when the database is set up, before the extension is."""

    def init_app(self, app: Flask) -> None:
        super().init_app(app)
        app.register_error_handler(IdempotencyError, in_own_form)


def test_a_handler_for_all_our_errors_registered_before(make_world, add_view):
    world = make_world(db=HandlesFirst())
    add_view(world)
    response = world.post(key=None)
    assert (response.status_code, response.json["code"]) == (410, "key-required")
    assert response.headers["Cache-Control"] == "no-store"


def test_a_handler_for_all_our_errors_registered_after(app, world, add_view):
    add_view(world)
    app.register_error_handler(IdempotencyError, in_own_form)
    response = world.post(key=None)
    assert (response.status_code, response.json["code"]) == (410, "key-required")


def test_a_handler_for_one_error_leaves_the_others_to_us(app, world, add_view, assert_problem):
    add_view(world)
    app.register_error_handler(KeyReused, in_own_form)
    assert world.post().status_code == 201
    response = world.post(json={"amount": 6})
    assert (response.status_code, response.json["code"]) == (432, "key-reused")
    assert response.json["because"]
    assert_problem(world.post(key="canary", user=""), 401, "scope-unknown")


def test_a_blueprint_may_have_a_form_of_its_own(app, world, assert_problem):
    blueprint = Blueprint("shop", __name__)
    blueprint.register_error_handler(IdempotencyError, in_own_form)
    blueprint.post("/orders", endpoint="order")(idempotent(order))
    app.register_blueprint(blueprint)
    app.post("/payments")(idempotent(order))
    assert world.post("/orders", key=None).status_code == 410
    assert_problem(world.post("/payments", key=None), 400, "key-required")


@pytest.mark.parametrize("caught", [HTTPException, Exception, 400, 500, 422])
def test_a_catch_all_leaves_our_problems_alone(app, world, add_view, assert_problem, caught):
    add_view(world)
    app.register_error_handler(caught, lambda error: ("caught", 418))
    assert_problem(world.post(key=None), 400, "key-required")
    assert world.post().status_code == 201
    assert_problem(world.post(json={"amount": 6}), 422, "key-reused")


def test_an_own_form_keeps_retry_after(app, world, add_view, gate, background):
    add_view(world, during=gate)
    app.register_error_handler(IdempotencyError, in_own_form)
    first = background(world.post)
    gate.wait_until_reached()
    refused = world.post()
    gate.open()
    assert first.result().status_code == 201
    assert (refused.status_code, refused.json["code"]) == (419, "request-in-progress")
    assert refused.headers["Retry-After"] == "1"
    assert refused.headers["Cache-Control"] == "no-store"


def test_a_refused_request_passes_the_functions_around_requests_like_any_other(
    app, world, add_view, assert_problem
):
    """What an ``after_request`` function relies on, such as the time a request began, is there."""
    add_view(world)

    @app.after_request
    def rely_on_sign_in(response):
        response.headers["X-Account"] = g.account_id
        return response

    assert world.post().headers["X-Account"] == "alice"
    assert_problem(world.post(json={"amount": 6}), 422, "key-reused")
    assert_problem(world.post(key=None), 400, "key-required")
    assert_problem(world.post(key="canary,"), 400, "key-malformed")
