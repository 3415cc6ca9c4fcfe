"""``wait``: a duplicate that waits for the first to finish in place of its 409."""

from __future__ import annotations

import time

import pytest

PROMPTLY_SECONDS = 0.5
"""The lock's release wakes the waiter; polling or a whole time-out would take longer than this."""


def timed(function):
    def run():
        result = function()
        return result, time.monotonic()

    return run


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


def test_another_request_does_not_wait_to_be_refused(world, add_view, gate, background, assert_problem):
    add_view(world, during=gate, wait=30)
    first = background(world.post)
    gate.wait_until_reached()
    begun = time.monotonic()
    assert_problem(world.post(json={"amount": 6}), 422, "key-reused")
    assert time.monotonic() - begun < 5
    gate.open()
    assert first.result().status_code == 201


def test_other_keys_do_not_wait(world, add_view, gate, background):
    calls = []

    def hold_the_first():
        calls.append(1)
        if len(calls) == 1:
            gate()

    add_view(world, during=hold_the_first, wait=30)
    first = background(world.post)
    gate.wait_until_reached()
    assert world.post(key="other").status_code == 201
    assert world.post(user="bob").status_code == 201
    gate.open()
    assert first.result().status_code == 201
