"""Flask-Limiter: a 429 comes first and stores nothing, and its headers are those of each response."""

from __future__ import annotations

from typing import Any

import pytest
from flask_limiter import Limiter

from flask_idempotency import idempotent

LIMITS = pytest.mark.parametrize("place", ["decorator", "default"])


@pytest.fixture
def limited(make_world: Any) -> Any:
    """A function that gives a shop in which the present client may pay twice an hour."""

    def make(place: str, **options: Any) -> Any:
        world = make_world()
        usual = {"default_limits": ["2/hour"]} if place == "default" else {}
        # With options only the default limits can be told what not to count.
        usual |= {f"default_limits_{name}": value for name, value in options.items() if usual}
        limiter = Limiter(
            lambda: "me", app=world.app, storage_uri="memory://", headers_enabled=True, **usual
        )

        @idempotent
        def pay() -> Any:
            world.db.session.add(world.Payment(amount=5))
            world.db.session.commit()
            return {}, 201

        view = pay if place == "default" else limiter.limit("2/hour", **options)(pay)
        world.app.add_url_rule("/payments", "pay", view, methods=["POST"])
        world.limiter = limiter
        return world

    return make


@LIMITS
def test_a_replay_counts_and_a_429_stores_nothing_so_the_key_is_good_later(limited, place):
    shop = limited(place)
    answers = [shop.post(key=key) for key in ("key-1", "key-1", "key-2")]
    assert [each.status_code for each in answers] == [201, 201, 429]
    assert answers[1].headers["Idempotent-Replayed"] == "true"
    left = [each.headers.getlist("X-RateLimit-Remaining") for each in answers]
    assert left == [["1"], ["0"], ["0"]]  # a replay has the numbers of now
    assert shop.count() == len(shop.records()) == 1
    shop.limiter.reset()
    later = shop.post(key="key-2")
    assert (later.status_code, later.headers.get("Idempotent-Replayed")) == (201, None)


@LIMITS
def test_retries_can_be_left_out_of_the_count(limited, place):
    shop = limited(place, deduct_when=lambda response: "Idempotent-Replayed" not in response.headers)
    assert [shop.post().status_code for _ in range(5)] == [201] * 5
    assert [shop.post(key=f"key-{number}").status_code for number in (2, 3)] == [201, 429]
    assert shop.count() == 2
