"""Flask-CORS: a browser may send the key and read our headers, on a replay and on a refusal, too."""

from __future__ import annotations

from typing import Any

import pytest
from flask_cors import CORS, cross_origin

from flask_idempotency import idempotent

ALLOW = {
    "origins": ["https://one.example", "https://two.example"],
    "allow_headers": ["Content-Type", "Idempotency-Key"],
    "expose_headers": ["Idempotent-Replayed", "Retry-After"],
}
ONE, TWO = ALLOW["origins"]


def pay_in(world: Any) -> Any:
    def pay() -> Any:
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        return {}, 201

    return pay


@pytest.fixture(params=["idempotent", "protect"])
def shop(request: Any, world: Any) -> Any:
    view = pay_in(world)
    if request.param == "protect":
        world.idempotency.protect(world.app)
    else:
        view = idempotent(view)
    CORS(world.app, **ALLOW)
    world.app.add_url_rule("/payments", "pay", view, methods=["POST"])
    return world


def post(shop: Any, origin: str, **how: Any) -> Any:
    return shop.post(headers={"Origin": origin}, **how)


def test_a_preflight_needs_no_key_and_allows_to_send_it(shop):
    asked = {
        "Origin": ONE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type,idempotency-key",
    }
    allowed = shop.client.options("/payments", headers=asked)
    assert allowed.status_code == 200
    assert "idempotency-key" in allowed.headers["Access-Control-Allow-Headers"].lower()
    assert shop.records() == []


def test_a_replay_and_a_refusal_can_be_read_by_the_origin_that_asks(shop):
    first, replay = post(shop, ONE), post(shop, TWO)
    reused, malformed = post(shop, ONE, json={"amount": 6}), post(shop, ONE, key="a,b")
    answers = first, replay, reused, malformed
    assert [each.status_code for each in answers] == [201, 201, 422, 400]
    assert replay.headers["Idempotent-Replayed"] == "true"
    assert "Origin" in replay.headers["Vary"]
    for answer, origin in zip(answers, (ONE, TWO, ONE, ONE), strict=True):
        assert answer.headers.getlist("Access-Control-Allow-Origin") == [origin]
        [exposed] = answer.headers.getlist("Access-Control-Expose-Headers")
        assert exposed == "Idempotent-Replayed, Retry-After"
    assert shop.count() == 1


def test_the_decorator_sees_a_refusal_as_any_response(world):
    view = cross_origin(**ALLOW)(idempotent(pay_in(world)))
    world.app.add_url_rule("/payments", "pay", view, methods=["POST"])
    answers = post(world, ONE), post(world, ONE), post(world, ONE, key="a,b")
    allowed = [(each.status_code, each.headers.get("Access-Control-Allow-Origin")) for each in answers]
    assert allowed == [(201, ONE), (201, ONE), (400, ONE)]
