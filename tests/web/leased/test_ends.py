"""Operations that are not atomic: every end is kept, or frees the key."""

from __future__ import annotations

import pytest
from flask import abort

from flask_idempotency import Retryable


@pytest.mark.parametrize("status", [500, 503, 402])
def test_a_response_that_says_it_failed_is_stored(world, add, status):
    runs = add(lambda: ({"sorry": True}, status))
    first, retry = world.post(), world.post()
    assert (first.status_code, first.data) == (retry.status_code, retry.data) == (status, retry.data)
    assert retry.headers["Idempotent-Replayed"] == "true"
    assert runs == [1]
    assert world.records()[0].state == ("failed" if status >= 500 else "completed")


def test_a_response_about_the_caller_frees_the_key(world, add, assert_problem):
    runs = add(lambda: ({}, 429) if len(runs) == 1 else ({}, 201))
    assert world.post().status_code == 429
    assert_problem(world.post(json={"amount": 6}), 422, "key-reused")
    assert world.post().status_code == 201
    assert runs == [1, 2]


def test_the_route_may_say_what_is_stored(world, add):
    runs = add(lambda: ({}, 500), store=lambda response: response.status_code < 500)
    assert [world.post().status_code for _ in range(2)] == [500, 500]
    assert runs == [1, 2]


def test_an_exception_is_stored_as_the_response_that_the_application_gives_it(app, world, add):
    @app.errorhandler(500)
    def sorry(error):
        return {"sorry": type(error.original_exception).__name__}, 500

    def view():
        raise LookupError("canary")

    runs = add(view)
    first, retry = world.post(), world.post()
    assert first.json == retry.json == {"sorry": "LookupError"}
    assert retry.headers["Idempotent-Replayed"] == "true"
    assert runs == [1]


def test_an_exception_that_flask_lets_out_is_stored_first(app, world, add):
    app.config["PROPAGATE_EXCEPTIONS"] = True

    def view():
        raise LookupError

    runs = add(view)
    with pytest.raises(LookupError):
        world.post()
    assert world.post().status_code == 500
    assert runs == [1]


def test_a_handled_exception_is_stored_as_its_response(world, add):
    runs = add(lambda: abort(418))
    assert [world.post().status_code for _ in range(2)] == [418, 418]
    assert runs == [1]


def test_retryable_frees_the_key(world, add, assert_problem):
    def view():
        if len(runs) == 1:
            raise Retryable("The provider is busy.", retry_after=7)
        return {}, 201

    runs = add(view)
    refused = world.post()
    problem = assert_problem(refused, 503, "try-again", retry=True)
    assert problem["detail"] == "The provider is busy."
    assert refused.headers["Retry-After"] == "7"
    assert world.post().status_code == 201
    assert runs == [1, 2]
