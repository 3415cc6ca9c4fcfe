"""``wait``: a duplicate that waits for the first to finish in place of its 409."""

import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest

from flask_idempotency import extension
from tests.stores import BOTH
from tests.waiting import PATIENCE_SECONDS

pytestmark = BOTH
KINDS = pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "leased"])
PROMPTLY_SECONDS = 0.5
"""The lock's release wakes the waiter; polling or a whole time-out would take longer than this."""


@pytest.fixture
def begin(add_view, gate, background):
    """Sends a first request, which is held in its view; gives its future, and the list of runs."""

    def begin(world, during=gate, **options):
        runs = add_view(world, during=during, **options)
        first = background(world.post)
        gate.wait_until_reached()
        return first, runs

    return begin


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_a_duplicate_gets_the_replay_as_soon_as_the_first_has_finished(
    world, begin, gate, background, assert_replayed, isolation
):
    database = world.sql("select current_database()")[0][0]
    world.sql(f"alter database {database} set default_transaction_isolation = '{isolation}'")
    with world.app.app_context():
        world.db.engine.dispose()
    first, runs = begin(world, wait=30)
    duplicates = [background(lambda: (world.post(), time.monotonic())) for _ in range(2)]
    world.wait_until_blocked()
    gate.open()
    answer, finished = first.result(), time.monotonic()
    for duplicate in duplicates:
        replay, replayed = duplicate.result()
        assert_replayed(answer, replay)
        assert replayed - finished < PROMPTLY_SECONDS
    assert (runs, world.count()) == ([1], 1)


def test_a_duplicate_runs_when_the_first_has_failed(world, begin, gate, background):
    failures = [RuntimeError("once")]

    def fail_once():
        gate()
        if failures:
            raise failures.pop()

    first, runs = begin(world, fail_once, wait=30)
    duplicate = background(world.post)
    world.wait_until_blocked()
    gate.open()
    assert (first.result().status_code, duplicate.result().status_code) == (500, 201)
    assert "Idempotent-Replayed" not in duplicate.result().headers
    assert (runs, world.count()) == ([1, 2], 1)


@pytest.mark.parametrize("as_setting", [False, True], ids=["option", "setting"])
def test_a_duplicate_is_refused_when_its_wait_ran_out_and_a_changed_one_at_once(
    make_world, begin, gate, assert_problem, monkeypatch, as_setting
):
    monkeypatch.setattr(extension, "MAX_WAITERS", 1)
    seconds = 0.2
    world = make_world(IDEMPOTENCY_WAIT=seconds if as_setting else 30)
    first, runs = begin(world, **({} if as_setting else {"wait": seconds}))
    begun = time.monotonic()
    assert_problem(world.post(json={"amount": 6}), 422, "key-reused")
    assert time.monotonic() - begun < seconds
    for _ in range(3):
        begun = time.monotonic()
        assert_problem(world.post(), 409, "request-in-progress", retry=True)
        assert seconds <= time.monotonic() - begun < seconds + 2
    gate.open()
    assert (first.result().status_code, runs) == (201, [1])


@KINDS
def test_of_many_only_as_many_wait_as_may(make_world, begin, gate, assert_problem, monkeypatch, atomic):
    monkeypatch.setattr(extension, "MAX_WAITERS", 2)
    world = make_world(IDEMPOTENCY_WAIT=PATIENCE_SECONDS)
    first, runs = begin(world, atomic=atomic)
    with ThreadPoolExecutor(10) as clients:
        ended = as_completed([clients.submit(world.post) for _ in range(10)])
        for _ in range(8):
            assert_problem(next(ended).result(), 409, "request-in-progress", retry=True)
        for _ in range(60):  # nor does a newcomer take their places
            assert_problem(world.post(), 409, "request-in-progress", retry=True)
        gate.open()
        assert [each.result().status_code for each in ended] == [201] * 2
    assert (first.result().status_code, runs) == (201, [1])


@pytest.mark.parametrize("few", ["connections", "threads"])
def test_who_waits_leaves_half_of_a_small_pool_to_others(make_world, begin, gate, few):
    """Of connections; or, by default, of the eight threads that a worker of gunicorn may have."""
    small = {"pool_size": 4, "max_overflow": 0, "pool_timeout": 1}
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=small if few == "connections" else {})
    calls = []

    def hold_the_first():
        calls.append(1)
        if len(calls) == 1:
            gate()

    begin(world, hold_the_first, wait=2 * PATIENCE_SECONDS)
    with ThreadPoolExecutor(7) as threads:
        duplicates = [threads.submit(world.post) for _ in range(3 if few == "connections" else 20)]
        assert next(as_completed(duplicates)).result().status_code == 409
        assert threads.submit(world.post, key="other").result(PATIENCE_SECONDS).status_code == 201
        gate.open()
    assert {each.result().status_code for each in duplicates} == {201, 409}
