"""Redis fails, forgets or lies before a request or while its view runs: it costs speed alone."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
import redis

import servers
from flask_idempotency import KeyReused, store_failed
from flask_idempotency.core.engine import Replay
from flask_idempotency.core.ports import Glance
from flask_idempotency.core.records import StoredResponse
from flask_idempotency.stores import lock as redis_store
from tests.contract.test_locks import FIRST, OTHER, SAME, SECOND, THIRD
from tests.waiting import wait_until


def is_emptied(server):
    ask(server).flushall()


def is_restarted_empty(server):
    server.restart(crash=True)


def is_killed(server):
    server.kill()


def is_paused(server):
    server.pause()


def is_a_replica(server):
    ask(server).replicaof("127.0.0.1", servers.free_port())


def is_full(server):
    ask(server).config_set("maxmemory-policy", "noeviction")
    ask(server).config_set("maxmemory", "1")


def forges(value):
    def forge(server):
        for name in ask(server).keys("*"):
            ask(server).set(name, value, px=60_000)

    return forge


def holds_lists(server):
    for name in ask(server).keys("*"):
        ask(server).delete(name)
        ask(server).rpush(name, "a list")


def ask(server):
    return redis.Redis.from_url(server.url)


FAULTS = [
    is_emptied,
    is_restarted_empty,
    is_killed,
    is_paused,
    is_a_replica,
    is_full,
    holds_lists,
    *(pytest.param(forges(value), id=str(value)) for value in (b"1:done", b"2:", b"", b"\xff" * 9)),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_redis_that_fails_or_lies_costs_speed_and_lets_nobody_else_in(
    redis_world, own_redis, add_view, gate, background, assert_problem, assert_replayed, fault
):
    world = redis_world
    add_view(world)
    runs = add_view(world, "/held", endpoint="held", during=gate)
    before = world.post(key="before")
    first = background(world.post, "/held")
    gate.wait_until_reached()
    fault(own_redis)
    started = time.monotonic()
    # Redis refuses the first of them, where it still can; the row refuses all the others.
    for _ in range(3):
        assert_problem(world.post("/held"), 409, "request-in-progress", retry=True)
    assert_problem(world.post("/held", json={"amount": 6}), 422, "key-reused")
    gate.open()
    assert first.result().status_code == 201
    assert_replayed(first.result(), world.post("/held"))
    assert_replayed(before, world.post(key="before"))
    assert [world.post(key="another").status_code for _ in range(2)] == [201, 201]
    assert time.monotonic() - started < 1.5, "a time-out or two, no more"
    assert runs == [1]
    assert world.count() == 3
    world.assert_clean()


def test_a_redis_slower_than_its_timeout_costs_one_timeout_and_leaves_a_lock_that_blocks_nobody(
    make_world, own_redis, add_view, assert_replayed, monkeypatch
):
    """The lock is set after we have stopped waiting for it, and nobody gives it back."""
    with servers.FaultProxy(own_redis.url) as proxy:
        world = make_world(IDEMPOTENCY_REDIS_URL=proxy.url)
        runs = add_view(world)
        assert world.post(key="while-quick").status_code == 201
        (before,) = ask(own_redis).keys()
        proxy.delay = 0.15
        started = time.monotonic()
        answers = [world.post(key=f"key-{number}") for number in range(5)]
        assert time.monotonic() - started < 1.0, "one of them waited, the others did not ask"
        assert [answer.status_code for answer in answers] == [201] * 5
        proxy.delay = 0.0
        ghosts = wait_until(lambda: set(ask(own_redis).keys()) - {before}, "the lock arrives")
        (ghost,) = ghosts
        assert ask(own_redis).get(ghost) != b"1:done"

        other_worker = world.app.extensions["idempotency"].lock
        monkeypatch.setattr(other_worker, "_skip_until", 0.0)  # it has not seen Redis fail
        started = time.monotonic()
        while (retry := world.post(key="key-0")).status_code == 409:
            assert time.monotonic() - started < 1.5, "a young lock is believed for a second"
        assert_replayed(answers[0], retry)
        assert len(runs) == world.count() == 6
        world.assert_clean()


@pytest.mark.parametrize("lost", ["its way to Redis", "its lock, which ran out"])
def test_a_worker_whose_lock_nobody_sees_lets_nobody_in(
    make_world, postgres, own_redis, add_view, gate, background, monkeypatch, lost
):
    """The lock's time is shorter than the view, or Redis can be reached by the other worker alone."""
    url = postgres.database("split_redis")
    with servers.FaultProxy(own_redis.url) as proxy:
        world = make_world(SQLALCHEMY_DATABASE_URI=url, IDEMPOTENCY_REDIS_URL=own_redis.url)
        first_worker = make_world(SQLALCHEMY_DATABASE_URI=url, IDEMPOTENCY_REDIS_URL=proxy.url)
        if lost == "its way to Redis":
            proxy.refuse()
            proxy.cut()
        else:
            monkeypatch.setattr(redis_store, "LOCK_SECONDS", 0.05)
            monkeypatch.setattr(redis_store, "PROBE_AFTER_SECONDS", 0.02)
        runs, others = add_view(first_worker, during=gate), add_view(world)
        first = background(first_worker.post)
        gate.wait_until_reached()
        wait_until(lambda: not ask(own_redis).keys(), "there is no lock")
        assert [world.post().status_code for _ in range(2)] == [409, 409]
        gate.open()
        assert first.result().status_code == 201
        assert world.post().headers["Idempotent-Replayed"] == "true"
        assert (runs, others, world.count()) == ([1], [], 1)
        world.assert_clean()
        first_worker.assert_clean()


@pytest.mark.parametrize("fingerprint", [SAME, OTHER])
def test_who_finishes_without_the_lock_still_tells_it(world, fingerprint):
    """The lock's owner was overtaken, and is there still: its lock must refuse nobody any more."""
    state = world.app.extensions["idempotency"]
    assert state.lock.acquire(FIRST) is Glance.MINE
    overtakes = state.engine.decide(SECOND, wait=1)  # who would wait asks the records, not the lock
    overtakes.complete(StoredResponse(201, (), b"the answer"))
    with nullcontext() if fingerprint is SAME else pytest.raises(KeyReused):
        state.engine.decide(replace(THIRD, fingerprint=fingerprint))
    assert isinstance(state.engine.decide(FIRST), Replay)


def test_a_retry_that_finds_the_end_tells_a_lock_that_forgot(redis_world, own_redis):
    state = redis_world.app.extensions["idempotency"]
    state.engine.decide(FIRST).complete(StoredResponse(201, (), b"the answer"))
    is_emptied(own_redis)
    assert isinstance(state.engine.decide(SECOND), Replay)
    assert state.lock.acquire(THIRD) is Glance.ASK


def test_redis_comes_back_into_use_by_itself(redis_world, own_redis, add_view, monkeypatch):
    world = redis_world
    monkeypatch.setattr(redis_store, "PAUSE_SECONDS", 0.05)
    add_view(world)
    own_redis.kill()
    assert world.post(key="while-down").status_code == 201
    own_redis.start()
    deadline, number = time.monotonic() + 10, 0
    while not ask(own_redis).keys():
        assert time.monotonic() < deadline
        number += 1
        assert world.post(key=f"after-{number}").status_code == 201


@pytest.mark.parametrize("reply", [[5], {}, 7, ["x", "y"], [1, None], RuntimeError("client")])
def test_a_strange_redis_costs_speed_only(make_world, add_view, reply):
    class Strange(redis.Redis):
        def execute_command(self, *_arguments, **_options):
            if isinstance(reply, Exception):
                raise reply
            return reply

    world = make_world(init={"redis": Strange()})
    runs = add_view(world)
    assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert runs == [1]


def test_a_redis_that_fails_is_signalled_once_without_its_password(make_world, add_view, caplog):
    world = make_world(IDEMPOTENCY_REDIS_URL="redis://:canary@127.0.0.1:1/0")
    runs, failures = add_view(world), []

    def note(app, event):
        failures.append((app, type(event.error).__name__))

    with store_failed.connected_to(note):
        assert [world.post().status_code for _ in range(3)] == [201] * 3
    assert failures == [(world.app, "ConnectionError")]
    assert "Redis failed, going on without it" in caplog.text
    assert "canary" not in caplog.text
    assert runs == [1]
