"""The look-up of outcomes: what it says of an operation in each of its states."""

import secrets

import pytest
from flask import Response

from flask_idempotency import Retryable, idempotent
from tests.killed import Killed
from tests.web.leased.records import begun, end_lease


def test_a_finished_operation_says_where_its_result_is(app, world, look):
    links = [("Location", "/payments/7"), ("Link", "</a>; rel=a"), ("Link", "</b>; rel=b")]
    view = idempotent(lambda: Response("canary", 201, [*links, ("X-Other", "1")]))
    app.add_url_rule("/payments", "pay", view, methods=["POST"])
    world.post()
    answer = look()
    assert (answer.status_code, answer.headers["Cache-Control"]) == (200, "no-store")
    assert answer.json == {
        "operation": "pay",
        "state": "completed",
        "attempt": 1,
        "detail": "The operation has finished. The same request gets its response.",
        "answer": {"status": 201, "location": "/payments/7", "link": "</a>; rel=a, </b>; rel=b"},
    }
    assert "canary" not in answer.text


@pytest.mark.parametrize(
    "config", [{"IDEMPOTENCY_ENCRYPTION_KEYS": [secrets.token_urlsafe(32)]}], ids=["keys"]
)
def test_a_sealed_response_is_opened(app, world, look):
    view = idempotent(lambda: ({}, 201, {"Location": "/payments/7"}))
    app.add_url_rule("/payments", "pay", view, methods=["POST"])
    world.post()
    assert look().json["answer"] == {"status": 201, "location": "/payments/7"}


def test_an_expired_record_is_not_known(world, look, add_view, assert_problem):
    add_view(world)
    world.post()
    world.sql("update idempotency_record set expires_at = clock_timestamp()")
    assert_problem(look(), 404, "outcome-unknown")


def test_a_running_operation_is_in_progress(world, look, add_view, gate, background):
    add_view(world, during=gate)
    first = background(world.post)
    gate.wait_until_reached()
    answer = look()
    assert (answer.json["state"], answer.json["attempt"]) == ("in_progress", 1)
    assert "answer" not in answer.json
    assert answer.headers["Retry-After"] == "1"
    gate.open()
    first.result()
    assert look().json["state"] == "completed"


def test_an_operation_that_was_rolled_back_may_be_sent_again(world, look, add_view):
    def fail():
        raise RuntimeError

    add_view(world, during=fail)
    assert world.post().status_code == 500
    assert look().json["state"] == "in_progress"
    assert "Send the same request again" in look().json["detail"]


@pytest.mark.parametrize(
    ("policy", "advice"), [("hold", "operator must decide"), ("retry", "Send the same request again")]
)
def test_an_interrupted_operation_is_told_with_its_way_out(world, look, add_view, policy, advice):
    def die():
        raise Killed

    add_view(world, during=die, atomic=False, on_interrupted=policy)
    with pytest.raises(Killed):
        world.post()
    answer = look()
    assert answer.json["state"] == "interrupted"
    assert advice in answer.json["detail"]
    assert "Retry-After" not in answer.headers


def test_what_began_long_ago_is_not_to_be_sent_again(world, look, add_view):
    def die():
        raise Killed

    add_view(world, during=die, atomic=False, on_interrupted="retry", ttl=60)
    with pytest.raises(Killed):
        world.post()
    end_lease(world)
    begun(world, ago="61 seconds")
    assert "operator must decide" in look().json["detail"]


@pytest.mark.parametrize(
    ("ago", "state", "advice"),
    [
        ("59 seconds", "in_progress", "Send the same request again"),
        ("61 seconds", "interrupted", "An operator must decide"),
    ],
)
def test_what_was_released_may_be_sent_again_while_it_is_open(
    world, look, add_view, ago, state, advice
):
    def die():
        raise Killed

    add_view(world, during=die, atomic=False, ttl=60)
    with pytest.raises(Killed):
        world.post()
    world.sql("update idempotency_record set completed_at = clock_timestamp()")  # as `release` does
    begun(world, ago=ago)
    answer = look()
    assert (answer.json["state"], advice in answer.json["detail"]) == (state, True)


def test_a_failed_operation_is_told(world, look, add_view):
    def fail():
        raise RuntimeError

    add_view(world, during=fail, atomic=False)
    assert world.post().status_code == 500
    assert (look().json["state"], look().json["answer"]) == ("failed", {"status": 500})


def test_an_operation_that_is_free_again_is_not_finished(world, look, add_view):
    def fail():
        raise Retryable

    add_view(world, during=fail, atomic=False)
    world.post()
    assert look().json["state"] == "in_progress"


@pytest.mark.parametrize("config", [{"IDEMPOTENCY_MAX_RESPONSE_BYTES": 1}], ids=["short"])
def test_a_response_that_was_too_large_is_not_promised(world, look, add_view):
    add_view(world)
    world.post()
    answer = look()
    assert answer.json["state"] == "completed"
    assert "too large to store" in answer.json["detail"]
