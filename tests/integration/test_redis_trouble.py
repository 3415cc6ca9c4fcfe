"""Redis down, paused, full or lying before a request: it costs speed, never a second run."""

from __future__ import annotations

import time

import pytest
import redis

import servers
from flask_idempotency import current_operation, idempotent
from flask_idempotency.stores.redis import lock as redis_store
from tests.waiting import wait_until

pytestmark = pytest.mark.parametrize("store", ["hybrid"], indirect=True)


@pytest.fixture
def own_redis():
    with servers.Redis() as server:
        yield server


@pytest.fixture
def redis_world(make_world, own_redis):
    return make_world(IDEMPOTENCY_REDIS_URL=own_redis.url)


def pay_view(world):
    """Register the protected view of POST /payments."""

    @world.app.post("/payments")
    @idempotent
    def pay():
        world.db.session.add(world.Payment(amount=1))
        world.db.session.commit()
        return {"attempt": current_operation.attempt}, 201


def redis_is_killed(server):
    server.kill()


def redis_is_paused(server):
    server.pause()


def redis_is_read_only(server):
    redis.Redis.from_url(server.url).replicaof("127.0.0.1", servers.free_port())


def redis_is_full(server):
    client = redis.Redis.from_url(server.url)
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "1")


@pytest.mark.parametrize(
    "trouble", [redis_is_killed, redis_is_paused, redis_is_read_only, redis_is_full]
)
def test_redis_in_trouble_costs_speed_never_a_second_run(redis_world, own_redis, trouble):
    world = redis_world
    pay_view(world)
    assert world.post(key="before").status_code == 201
    trouble(own_redis)
    started = time.monotonic()
    for key in ("before", "during", "during"):
        assert world.post(key=key).status_code == 201
    assert time.monotonic() - started < 1.5, "one time-out, then Redis is left alone"
    assert world.count() == 2


@pytest.mark.parametrize("value", [b"", b"1:", b"9:later:version", b"\xff\xfe", b"1:done", b"x" * 500])
def test_whatever_stands_in_redis_postgres_decides(redis_world, own_redis, value):
    world = redis_world
    pay_view(world)
    client = redis.Redis.from_url(own_redis.url)
    # A busy machine may let Redis time out; then a replay leaves the marker.
    wait_until(lambda: world.post().status_code == 201 and client.keys(), "Redis has a marker")
    (key,) = client.keys()
    client.set(key, value)
    assert world.post().headers["Idempotent-Replayed"] == "true"
    client.delete(key)
    client.rpush(key, "a list")
    assert world.post().headers["Idempotent-Replayed"] == "true"
    assert world.count() == 1


def test_redis_comes_back_into_use_by_itself(redis_world, own_redis, monkeypatch):
    world = redis_world
    monkeypatch.setattr(redis_store, "PAUSE_SECONDS", 0.05)
    pay_view(world)
    own_redis.kill()
    assert world.post(key="while-down").status_code == 201
    own_redis.start()
    client = redis.Redis.from_url(own_redis.url)
    deadline = time.monotonic() + 10
    number = 0
    while not client.keys():
        assert time.monotonic() < deadline
        number += 1
        assert world.post(key=f"after-{number}").status_code == 201


def test_redis_holds_neither_keys_nor_answers(redis_world, own_redis):
    world = redis_world
    pay_view(world)
    world.post(key="canary-key")
    client = redis.Redis.from_url(own_redis.url)
    (key,) = client.keys()
    assert client.get(key) == b"1:done"
    assert 0 < client.pttl(key) <= redis_store.MARKER_SECONDS * 1000
    assert b"canary" not in key
