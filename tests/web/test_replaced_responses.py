"""A decorator above ``@idempotent`` that makes a response of its own is noticed, where that is sure."""

import contextlib
import functools
import gzip
import logging

import flask_restful.fields
import flask_restx
import pytest
from flask import Response, abort, jsonify, make_response, redirect

from flask_idempotency import idempotent
from tests.log import ours


@pytest.fixture
def store():
    return "postgres"


FIELDS = {
    flask_restful: {"id": flask_restful.fields.Integer(default=None)},
    flask_restx: {"id": flask_restx.fields.Integer},
}


@pytest.fixture
def resource(make_world):
    """A resource of a framework, with decorators from the outside to the inside."""
    world = make_world(PROPAGATE_EXCEPTIONS=False)

    def add(framework, *decorators):
        def post(_self):
            world.db.session.add(world.Payment(amount=5))
            world.db.session.commit()
            return {"id": 7, "secret": "inner"}, 201

        for decorator in reversed(decorators):
            post = decorator(post)
        api = framework.Api(world.app)
        api.add_resource(type("Payments", (framework.Resource,), {"post": post}), "/payments")
        return world

    return add


@pytest.mark.parametrize("framework", FIELDS)
def test_marshal_with_above_invents_a_response_and_is_warned_about_once(resource, caplog, framework):
    world = resource(framework, framework.marshal_with(FIELDS[framework]), idempotent)
    for key in "key-1", "key-1", "key-2":
        response = world.post(key=key)
        assert (response.status_code, response.json) == (200, {"id": None})
    (warning,) = ours(caplog)
    assert (warning.name, warning.levelno) == ("flask_idempotency", logging.WARNING)
    assert warning.getMessage() == (
        "the stored response of payments (201) is not the one that left the view's decorators (200):"
        " one of them, such as marshal_with, replaced it. Put that decorator below @idempotent"
    )


@pytest.mark.parametrize("framework", FIELDS)
def test_marshal_with_below_is_the_views(resource, caplog, assert_replayed, framework):
    world = resource(framework, idempotent, framework.marshal_with(FIELDS[framework]))
    first, again = world.post(), world.post()
    assert (first.status_code, first.json) == (201, {"id": 7})
    assert_replayed(first, again)
    assert ours(caplog) == []


@pytest.fixture
def above(make_world):
    """A view that answers 200 with JSON, below a decorator that does this with its response."""

    def add(change, view=lambda: {"id": 7}, **options):
        world = make_world()
        protected = idempotent(**options)(view)

        @functools.wraps(protected)
        def wrapper():
            return change(protected())

        world.app.add_url_rule("/payments", "pay", wrapper, methods=["POST"])
        return world

    return add


def with_header(response):
    response.headers["X-Own"] = "yes"
    return response


WELL_DONE = {
    "the same": lambda response: response,
    "a header": with_header,
    "make_response": make_response,
    "headers as a tuple": lambda response: (response, {"X-Own": "yes"}),
    "a status as a tuple": lambda response: (response, 202),
    "jsonify what is no response": lambda result: (
        jsonify(result) if isinstance(result, dict) else result
    ),
    "a copy": lambda response: Response(response.data, response.status_code, response.headers),
    "compressed": lambda response: Response(
        gzip.compress(response.data), headers={"Content-Encoding": "gzip"}
    ),
    "streamed": lambda response: Response(iter([response.data])),
    "an envelope": lambda response: {"data": response.json, "version": 1},
    "an envelope in place": lambda response: response.set_data('{"data": {}}') or response,
}


@pytest.mark.parametrize("change", WELL_DONE)
def test_what_decorators_do_well_is_not_warned_about(above, caplog, change):
    world = above(WELL_DONE[change])
    assert [world.post().status_code // 100 for _ in range(2)] == [2, 2]
    assert ours(caplog) == []


BADLY = {
    "another status": lambda response: jsonify(response.json),
    "another body": lambda response: ({"id": None}, 201),
    "both": lambda response: {"id": None},
    "the response as text": str,
    "elsewhere": lambda response: redirect("/"),
}


@pytest.mark.parametrize("change", BADLY)
def test_what_is_another_response_is_warned_about(above, caplog, change):
    world = above(BADLY[change], lambda: ({"id": 7}, 201))
    assert world.post().status_code < 400
    (warning,) = ours(caplog)
    assert "Put that decorator below @idempotent" in warning.getMessage()


def test_what_is_not_stored_may_be_replaced(above, caplog):
    world = above(lambda response: ("sign in", 302), lambda: ({}, 401))
    assert world.post().text == "sign in"
    assert ours(caplog) == []


def test_an_error_of_a_decorator_is_its_error(above, caplog):
    world = above(lambda response: abort(409))
    assert world.post().status_code == 409
    assert ours(caplog) == []


def test_what_no_response_can_be_made_of_is_flasks_to_refuse(above, caplog):
    world = above(lambda response: None)
    world.app.config["PROPAGATE_EXCEPTIONS"] = False
    world.app.register_error_handler(TypeError, lambda error: ("not asked, as without us", 409))
    assert world.post().status_code == 500
    assert [record.name for record in caplog.records] == ["shop"]


def test_after_an_error_of_the_view_too_and_the_operation_is_over(make_world):
    world = make_world(PROPAGATE_EXCEPTIONS=False)

    def swallow(view):
        @functools.wraps(view)
        def wrapper():
            with contextlib.suppress(LookupError):
                return view()

        return wrapper

    def pay():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        raise LookupError

    world.app.add_url_rule("/payments", "pay", swallow(idempotent(pay)), methods=["POST"])
    with world.app.test_client() as client:
        for _ in range(2):
            response = client.post(
                "/payments", json={}, headers={"Idempotency-Key": "key-1", "X-User": "alice"}
            )
            assert (response.status_code, world.count()) == (500, 0)
            world.assert_clean()


def test_a_view_that_calls_a_protected_function_makes_a_response_of_its_own(make_world, caplog):
    world = make_world()
    inner = idempotent(lambda: ({"id": 7}, 201))

    @world.app.post("/payments")
    def view():
        return {"wrapped": inner().json["id"]}

    assert [world.post().json for _ in range(2)] == [{"wrapped": 7}] * 2
    assert ours(caplog) == []
