"""``wait``: a duplicate that waits for the first to finish in place of its 409."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest

from flask_idempotency import extension
from tests.stores import BOTH
from tests.waiting import PATIENCE_SECONDS

PROMPTLY_SECONDS = 0.5
"""The lock's release wakes the waiter; polling or a whole time-out would take longer than this."""


def timed(function):
    def run():
        result = function()
        return result, time.monotonic()

    return run


@BOTH
def test_a_duplicate_gets_the_replay_as_soon_as_the_first_has_finished(
    world, add_view, gate, background, assert_replayed
):
    runs = add_view(world, during=gate, wait=30)
    first = background(timed(world.post))
    gate.wait_until_reached()
    duplicates = [background(timed(world.post)) for _ in range(2)]
    world.wait_until_blocked()
    gate.open()
    answer, finished = first.result()
    for duplicate in duplicates:
        replay, replayed = duplicate.result()
        assert_replayed(answer, replay)
        assert replayed - finished < PROMPTLY_SECONDS
    assert runs == [1]
    assert world.count() == 1


@BOTH
def test_a_duplicate_runs_when_the_first_has_failed(world, add_view, gate, background):
    failures = [RuntimeError("once")]

    def fail_once():
        gate()
        if failures:
            raise failures.pop()

    runs = add_view(world, during=fail_once, wait=30)
    first = background(world.post)
    gate.wait_until_reached()
    duplicate = background(world.post)
    world.wait_until_blocked()
    gate.open()
    assert first.result().status_code == 500
    assert duplicate.result().status_code == 201
    assert "Idempotent-Replayed" not in duplicate.result().headers
    assert runs == [1, 2]
    assert world.count() == 1


@BOTH
@pytest.mark.parametrize("as_setting", [False, True], ids=["option", "setting"])
def test_a_duplicate_is_refused_when_its_wait_ran_out(
    make_world, add_view, gate, background, assert_problem, as_setting
):
    seconds = 0.2
    world = make_world(IDEMPOTENCY_WAIT=seconds if as_setting else 30)
    runs = add_view(world, during=gate, **({} if as_setting else {"wait": seconds}))
    first = background(world.post)
    gate.wait_until_reached()
    begun = time.monotonic()
    assert_problem(world.post(), 409, "request-in-progress", retry=True)
    assert seconds <= time.monotonic() - begun < seconds + 2
    gate.open()
    assert first.result().status_code == 201
    assert runs == [1]


@BOTH
@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "leased"])
def test_a_wait_ends_on_a_clock_that_a_test_has_stopped(
    world, add_view, gate, background, assert_problem, monkeypatch, atomic
):
    add_view(world, during=gate, wait=0.3, atomic=atomic, **({} if atomic else {"lease": 60}))
    first = background(world.post)
    gate.wait_until_reached()
    now = time.monotonic()
    with monkeypatch.context() as stopped:
        stopped.setattr(time, "monotonic", lambda: now)
        duplicate = background(world.post)
        assert_problem(duplicate.result(PATIENCE_SECONDS), 409, "request-in-progress", retry=True)
    gate.open()
    assert first.result().status_code == 201


@BOTH
def test_another_request_does_not_wait_to_be_refused(world, add_view, gate, background, assert_problem):
    add_view(world, during=gate, wait=30)
    first = background(world.post)
    gate.wait_until_reached()
    begun = time.monotonic()
    assert_problem(world.post(json={"amount": 6}), 422, "key-reused")
    assert time.monotonic() - begun < 5
    gate.open()
    assert first.result().status_code == 201


@BOTH
@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "leased"])
def test_no_more_requests_wait_at_once_than_may(
    make_world, add_view, gate, background, assert_problem, monkeypatch, atomic
):
    """Of many that come at the same time, two wait; the rest get their 409 while the first runs."""
    monkeypatch.setattr(extension, "MAX_WAITERS", 2)
    world = make_world()
    runs = add_view(world, during=gate, wait=30, atomic=atomic)
    first = background(world.post)
    gate.wait_until_reached()
    begun = time.monotonic()
    start = threading.Barrier(10)

    def duplicate():
        start.wait()
        return world.post()

    with ThreadPoolExecutor(10) as clients:
        duplicates = [clients.submit(duplicate) for _ in range(10)]
        refused = [answer.result() for answer in itertools.islice(as_completed(duplicates), 8)]
        assert time.monotonic() - begun < 10
        for answer in refused:
            assert_problem(answer, 409, "request-in-progress", retry=True)
        gate.open()
        answers = [answer.result() for answer in duplicates]
    assert sorted(answer.status_code for answer in answers) == [201] * 2 + [409] * 8
    assert first.result().status_code == 201
    assert runs == [1]


@BOTH
@pytest.mark.parametrize("most", [0, 1])
def test_a_place_is_free_again_when_its_waiter_has_gone(
    make_world, add_view, gate, background, assert_problem, monkeypatch, most
):
    monkeypatch.setattr(extension, "MAX_WAITERS", most)
    world = make_world()
    add_view(world, during=gate, wait=0.2)
    first = background(world.post)
    gate.wait_until_reached()
    for _ in range(3):
        begun = time.monotonic()
        assert_problem(world.post(), 409, "request-in-progress", retry=True)
        assert (time.monotonic() - begun >= 0.2) is bool(most)
    gate.open()
    assert first.result().status_code == 201


@BOTH
def test_who_waits_leaves_half_of_a_small_pool_to_others(
    make_world, add_view, gate, background, assert_problem
):
    options = {"pool_size": 4, "max_overflow": 0, "pool_timeout": 1}
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=options)
    calls = []

    def hold_the_first():
        calls.append(1)
        if len(calls) == 1:
            gate()

    add_view(world, during=hold_the_first, wait=2 * PATIENCE_SECONDS)
    first = background(world.post)
    gate.wait_until_reached()
    duplicates = [background(world.post) for _ in range(3)]
    refused = next(as_completed(duplicates)).result()
    assert_problem(refused, 409, "request-in-progress", retry=True)
    assert world.post(key="other").status_code == 201
    gate.open()
    assert first.result().status_code == 201
    assert sorted(each.result().status_code for each in duplicates) == [201, 201, 409]


@BOTH
def test_who_waits_leaves_the_threads_of_a_worker_to_others(world, add_view, gate, background):
    """By default, with the eight threads that a worker of gunicorn may have."""
    calls = []

    def hold_the_first():
        calls.append(1)
        if len(calls) == 1:
            gate()

    add_view(world, during=hold_the_first, wait=2 * PATIENCE_SECONDS)
    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(world.post)
        gate.wait_until_reached()
        for _ in range(20):
            threads.submit(world.post)
        assert threads.submit(world.post, key="other").result(PATIENCE_SECONDS).status_code == 201
        gate.open()
    assert first.result().status_code == 201


@BOTH
def test_a_duplicate_that_waits_gets_the_replay_at_any_default_isolation(
    app, world, add_view, gate, background
):
    database = world.sql("select current_database()")[0][0]
    world.sql(f"alter database {database} set default_transaction_isolation = 'repeatable read'")
    with app.app_context():
        world.db.engine.dispose()
    runs = add_view(world, during=gate, wait=10)
    first = background(world.post)
    gate.wait_until_reached()
    duplicate = background(world.post)
    world.wait_until_blocked()
    gate.open()
    assert [each.result().status_code for each in (first, duplicate)] == [201, 201]
    assert runs == [1]
