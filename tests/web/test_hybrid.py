"""Redis beside Postgres: how it is reached, and that it holds nothing worth having."""

from __future__ import annotations

import pytest
from redis import Redis

from flask_idempotency import idempotent


@pytest.fixture
def redis(redis_server):
    with Redis.from_url(redis_server.url) as client:
        client.flushdb()
        yield client


def test_a_ready_client_takes_the_place_of_the_url(make_world, add_view, redis):
    world = make_world(init={"redis": redis}, IDEMPOTENCY_REDIS_URL="redis://127.0.0.1:1/0")
    add_view(world)
    assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert len(redis.keys()) == 1


def test_what_redis_holds_is_no_key_and_no_response(make_world, redis, gate, background):
    world = make_world(IDEMPOTENCY_REDIS_PREFIX="shop:")

    @world.app.post("/payments")
    @idempotent
    def pay():
        gate()
        return "canary-answer", 201

    def held():
        names = redis.keys()
        assert all(name.startswith(b"shop:") for name in names)
        return repr([(name, redis.get(name), redis.ttl(name) > 0) for name in names])

    first = background(world.post, key="canary-1", user="canary-2", json="canary-3")
    gate.wait_until_reached()
    running = held()
    gate.open()
    assert first.result().status_code == 201
    for text in running, held():
        assert "True" in text
        assert "canary" not in text


def test_two_databases_may_share_one_redis(make_world, add_view, redis, gate, background):
    one, other = make_world(), make_world()
    add_view(one, during=gate)
    runs = add_view(other)
    first = background(one.post)
    gate.wait_until_reached()
    assert other.post().status_code == 201
    gate.open()
    assert first.result().status_code == 201
    assert runs == [1]
