"""AdCP's storyboard on idempotency, over HTTP and without a profile.

``static/compliance/source/universal/idempotency.yaml`` 1.0.0 of adcontextprotocol/adcp, commit 4439b187
(22 August 2026): its phases, by their names. The key is a member of the body, so nothing of HTTP is
fixed but what the body says. What does not hold is expected as it is, with the reason.
"""

import pytest
from flask import request

from flask_idempotency import IdempotencyError, idempotent

CODES = {
    "key-required": "INVALID_REQUEST",
    "key-malformed": "INVALID_REQUEST",
    "key-reused": "IDEMPOTENCY_CONFLICT",
    "request-in-progress": "IDEMPOTENCY_IN_FLIGHT",
}
COMPARED = ["/account", "/brand", "/start_time", "/end_time", "/packages"]
"""All members of the request but the key and ``context``, which differs from call to call."""


@pytest.fixture
def created(world):
    """A seller's endpoint; the list to which each run adds its buy."""
    buys = []

    @world.app.post("/create_media_buy")
    @idempotent(
        key="json:/idempotency_key",
        fingerprint=COMPARED,
        store=lambda response: response.status_code < 400,  # "Only successful responses are cached"
    )
    def create_media_buy():
        during = world.app.config.get("DURING")
        buys.append(f"mb_{len(buys) + 1}")
        if during is not None:
            during()
        return {"media_buy_id": buys[-1], "context": request.json["context"]}

    def answer(error):
        body = {"code": CODES[error.type], "message": error.detail, "retry_after": error.retry_after}
        return {"error": body, "context": request.json.get("context")}, error.status

    world.app.register_error_handler(IdempotencyError, answer)
    return buys


@pytest.fixture
def call(world):
    def post(key, step, budget=5000, user="agent"):
        body = {"packages": [{"budget": budget}], "context": {"correlation_id": step}}
        body |= {"idempotency_key": key} if key else {}
        response = world.post("/create_media_buy", key=None, user=user, json=body)
        return response, response.json

    return post


def test_missing_key(created, call):
    response, body = call(None, "missing")
    assert (response.status_code, body["error"]["code"]) == (400, "INVALID_REQUEST")
    assert body["context"] == {"correlation_id": "missing"}
    assert created == []


def test_replay_same_payload(created, call):
    first, initial = call("replay-key", "initial")
    again, replayed = call("replay-key", "replay")
    assert replayed["media_buy_id"] == initial["media_buy_id"] == "mb_1"
    assert created == ["mb_1"]
    assert "Idempotent-Replayed" not in first.headers
    # The storyboard wants both in the envelope of the replay. A replay is the stored bytes: the mark is
    # a header, and the context is that of the first call. An AdCP server puts its envelope around it.
    assert again.headers["Idempotent-Replayed"] == "true"
    assert "replayed" not in replayed
    assert replayed["context"] == {"correlation_id": "initial"}


def test_key_reuse_conflict(created, call):
    call("replay-key", "initial")
    response, body = call("replay-key", "conflict", budget=9999)
    assert (response.status_code, body["error"]["code"]) == (422, "IDEMPOTENCY_CONFLICT")
    assert body["context"] == {"correlation_id": "conflict"}
    assert "mb_1" not in response.text  # idempotency.conflict_no_payload_leak
    assert "5000" not in response.text
    assert created == ["mb_1"]


def test_fresh_key_new_resource(created, call):
    call("replay-key", "initial")
    assert call("fresh-key", "fresh")[1]["media_buy_id"] == "mb_2"
    assert created == ["mb_1", "mb_2"]


def test_concurrent_retry(world, created, call, gate, background):
    world.app.config["DURING"] = gate
    first = background(call, "concurrent-key", "concurrent")
    gate.wait_until_reached()
    _, refused = call("concurrent-key", "concurrent")
    gate.open()
    assert refused["error"]["code"] == "IDEMPOTENCY_IN_FLIGHT"
    assert refused["error"]["retry_after"] > 0
    assert first.result()[1]["media_buy_id"] == "mb_1"
    assert call("concurrent-key", "concurrent")[1]["media_buy_id"] == "mb_1"
    assert created == ["mb_1"]


def test_concurrent_retry_of_another_agent_sees_nothing(world, created, call, gate, background):
    world.app.config["DURING"] = gate
    first = background(call, "concurrent-key", "concurrent")
    gate.wait_until_reached()
    world.app.config["DURING"] = None
    assert call("concurrent-key", "other", user="thief")[1]["media_buy_id"] == "mb_2"
    gate.open()
    assert first.result()[0].status_code == 200
    assert created == ["mb_1", "mb_2"]


@pytest.mark.parametrize("status", [400, 403, 409, 422, 429, 500])
def test_rate_limit_replay_invariant_and_every_other_error(world, created, call, status):
    """Only what succeeded is stored; the limiter of new keys is the application's."""
    world.app.config["DURING"] = lambda: world.app.config.pop("DURING") and fail(status)

    class Refused(Exception):
        pass

    def fail(status):
        raise Refused

    world.app.register_error_handler(Refused, lambda _error: ({"error": {"code": "X"}}, status))
    assert call("limited-key", "tripped")[0].status_code == status
    response, body = call("limited-key", "again")
    assert (response.status_code, body["media_buy_id"]) == (200, "mb_2")
    assert "Idempotent-Replayed" not in response.headers
