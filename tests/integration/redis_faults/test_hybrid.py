"""Redis fails, forgets or lies before a request or while its view runs: it costs speed alone."""

import time

import pytest

import servers
from flask_idempotency import store_failed
from flask_idempotency.stores import lock as redis_store
from tests.waiting import wait_until


@pytest.fixture
def world(make_world, own_redis):
    return make_world(IDEMPOTENCY_REDIS_URL=own_redis.url)


def is_full(_server, behind):
    behind.config_set("maxmemory-policy", "noeviction")
    behind.config_set("maxmemory", "1")


def says_done(_server, behind):
    for name in behind.keys("*"):
        behind.set(name, b"1:done", px=60_000)


def holds_lists(_server, behind):
    for name in behind.keys("*"):
        behind.delete(name)
        behind.rpush(name, "a list")


FAULTS = {
    "is emptied": lambda _server, behind: behind.flushall(),
    "is killed": lambda server, _behind: server.kill(),
    "is paused": lambda server, _behind: server.pause(),
    "is a replica": lambda _server, behind: behind.replicaof("127.0.0.1", servers.free_port()),
    "is full": is_full,
    "says done": says_done,
    "holds lists": holds_lists,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_redis_that_fails_or_lies_costs_speed_and_lets_nobody_else_in(
    world, own_redis, behind, add_view, gate, background, assert_problem, assert_replayed, fault
):
    add_view(world)
    runs = add_view(world, "/held", endpoint="held", during=gate)
    before = world.post(key="before")
    first = background(world.post, "/held")
    gate.wait_until_reached()
    FAULTS[fault](own_redis, behind)
    started = time.monotonic()
    # Redis refuses the first of them, where it still can; the row refuses all the others.
    for _ in range(3):
        assert_problem(world.post("/held"), 409, "request-in-progress", retry=True)
    assert_problem(world.post("/held", json={"amount": 6}), 422, "key-reused")
    gate.open()
    assert first.result().status_code == 201
    assert_replayed(first.result(), world.post("/held"))
    assert_replayed(before, world.post(key="before"))
    if fault == "is emptied":
        assert behind.mget(behind.keys()) == [b"1:done"] * 2, "retries remind it of the end"
    assert [world.post(key="another").status_code for _ in range(2)] == [201, 201]
    assert time.monotonic() - started < 1.5, "a time-out or two, no more"
    assert (runs, world.count()) == ([1], 3)
    world.assert_clean()


def test_a_redis_slower_than_its_timeout_costs_one_timeout_and_leaves_a_lock_that_blocks_nobody(
    make_world, postgres, own_redis, proxy, behind, add_view, assert_replayed
):
    """The lock is set after we have stopped waiting for it, and nobody gives it back."""
    url = postgres.database("slow_redis")
    world = make_world(SQLALCHEMY_DATABASE_URI=url, IDEMPOTENCY_REDIS_URL=proxy.url)
    other_worker = make_world(SQLALCHEMY_DATABASE_URI=url, IDEMPOTENCY_REDIS_URL=own_redis.url)
    runs, others = add_view(world), add_view(other_worker)
    assert world.post(key="while-quick").status_code == 201
    (before,) = behind.keys()
    proxy.delay = 0.15
    started = time.monotonic()
    answers = [world.post(key=f"key-{number}") for number in range(5)]
    assert time.monotonic() - started < 1.0, "one of them waited, the others did not ask"
    assert [answer.status_code for answer in answers] == [201] * 5
    proxy.delay = 0.0
    (ghost,) = wait_until(lambda: set(behind.keys()) - {before}, "the lock arrives")
    assert behind.get(ghost) != b"1:done"
    started = time.monotonic()
    while (retry := other_worker.post(key="key-0")).status_code == 409:
        assert time.monotonic() - started < 1.5, "a young lock is believed for a second"
    assert_replayed(answers[0], retry)
    assert (len(runs), others, world.count()) == (6, [], 6)


def test_a_marker_of_what_a_restored_backup_has_lost_hides_no_first_request(
    world, behind, add_view, assert_replayed
):
    runs = add_view(world)
    assert world.post().status_code == 201
    world.sql("truncate payment, idempotency_record")
    assert behind.mget(behind.keys()) == [b"1:done"]
    assert_replayed(world.post(), world.post())
    assert (runs, world.count()) == ([1, 1], 1)


def test_a_redis_that_fails_is_signalled_once_without_its_password_and_asked_again(
    make_world, own_redis, behind, add_view, caplog, monkeypatch
):
    world = make_world(IDEMPOTENCY_REDIS_URL=own_redis.url)
    add_view(world)
    own_redis.kill()
    failures = []
    note = lambda app, event: failures.append((app, type(event.error).__name__))  # noqa: E731
    with store_failed.connected_to(note):
        for key in "abc":
            assert world.post(key=key).status_code == 201
    assert failures == [(world.app, "ConnectionError")]
    assert "Redis failed, going on without it" in caplog.text
    assert own_redis.password not in caplog.text
    monkeypatch.setattr(redis_store, "PAUSE_SECONDS", 0.05)
    own_redis.start()

    def has_the_next_one():
        assert world.post(key=f"after-{time.monotonic()}").status_code == 201
        return behind.keys()

    wait_until(has_the_next_one, "Redis is asked again")
