"""The explorer: it runs every order once, and finds what only one order shows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.drivers import EACH
from tests.faults.explore import schedules
from tests.faults.explore.bounds import BOUNDS, MUTANTS, Explorer, mutated
from tests.faults.explore.schedules import Actor, Choice, Kind, Stage, Violation, explore

# Least numbers of schedules, well below what there are: so that a bound which shrinks is noticed.
SHORT = {
    "two": 2,
    "a changed body": 100,
    "a changed body, no Redis": 50,
    "two, connection lost": 12,
    "two, answer lost": 6,
    "two, expiry and purge": 100,
    "two retries after a failure": 30,
    "three, FLUSHALL": 40,
}


class Toy:
    """Threads that take steps on things of their own or shared; no server."""

    def __init__(
        self, *bodies: Callable[[Actor], Any], promise: Callable[[], bool] = lambda: True
    ) -> None:
        self.promise, self.stage, self.order = promise, Stage(), ""
        for name, body in zip("ABC", bodies, strict=False):
            self.stage.add(name, lambda body=body: body(_me()))

    def choices(self) -> list[Choice]:
        return [actor.pending for actor in self.stage.actors if actor.pending]

    def do(self, choice: Choice) -> list[Choice]:
        self.order += choice.actor
        actor = self.stage[choice.actor]
        actor.go()
        self.stage.settle(actor)
        return []

    def check(self) -> str:
        if not self.promise():
            raise Violation("broken")
        return self.order

    def dismiss(self) -> None:
        self.stage.dismiss()


def _me() -> Actor:
    actor = Actor.current()
    assert actor
    return actor


def steps(count: int, kind: Kind) -> Callable[[Actor], None]:
    def body(actor: Actor) -> None:
        for number in range(count):
            actor.stop_before(f"step {number}", kind)

    return body


@pytest.mark.parametrize("counts", [(1,), (2, 2), (3, 2), (2, 1, 2)])
@pytest.mark.parametrize("reduced", [True, False])
def test_every_order_of_steps_that_others_notice_is_run_once(
    counts: tuple[int, ...], reduced: bool
) -> None:
    report = explore(lambda: Toy(*(steps(n, Kind.COMMIT) for n in counts)), reduced=reduced)
    orders = math.factorial(sum(counts)) // math.prod(map(math.factorial, counts))
    assert (report.schedules, len(report.outcomes), report.exhausted) == (orders, orders, True)
    assert report.deepest == sum(counts)


def test_of_orders_that_nobody_notices_one_is_run() -> None:
    def toy() -> Toy:
        return Toy(steps(3, Kind.LOOK), steps(3, Kind.LOOK))

    assert explore(toy).schedules == 1
    assert explore(toy, reduced=False).schedules == 20


def test_a_step_is_reordered_only_with_those_that_notice_it() -> None:
    def toy() -> Toy:
        return Toy(steps(2, Kind.REDIS), steps(1, Kind.COMMIT), steps(1, Kind.REDIS))

    assert explore(toy).schedules == 3  # where C comes among the two steps of A


def test_beyond_its_depth_a_schedule_goes_on_in_one_way() -> None:
    report = explore(lambda: Toy(steps(3, Kind.COMMIT), steps(3, Kind.COMMIT)), depth=2)
    assert (report.schedules, report.deepest, report.exhausted) == (4, 6, True)


def test_a_limit_leaves_schedules_out_and_says_so() -> None:
    report = explore(lambda: Toy(steps(2, Kind.COMMIT), steps(2, Kind.COMMIT)), limit=3)
    assert (report.schedules, report.exhausted) == (3, False)


def _two_counters(*, locked: bool) -> Toy:
    counter = {"value": 0}

    def increment(actor: Actor) -> None:
        actor.stop_before("read", Kind.COMMIT)
        value = counter["value"]
        if not locked:
            actor.stop_before("write", Kind.COMMIT)
        counter["value"] = value + 1

    return Toy(increment, increment, promise=lambda: counter["value"] == 2)


def test_a_lost_update_is_found() -> None:
    assert explore(lambda: _two_counters(locked=True)).violations == []
    found = explore(lambda: _two_counters(locked=False))
    assert found.violations == ["broken; after A:read, B:read, A:write, B:write"]
    every = explore(lambda: _two_counters(locked=False), stop_at_violation=False)
    assert (every.schedules, len(every.violations)) == (6, 4)


def test_what_cannot_be_repeated_is_a_violation() -> None:
    runs = iter(("same", "same", "other", "other"))

    def body(actor: Actor) -> None:
        actor.stop_before(next(runs), Kind.COMMIT)

    assert "not repeatable" in explore(lambda: Toy(body, body)).violations[0]


@pytest.fixture(scope="module")
def explorer(postgres: Any, redis_server: Any) -> Explorer:
    return Explorer(postgres, redis_server)


@EACH
@pytest.mark.parametrize("name", SHORT)
def test_every_schedule_keeps_every_guarantee(explorer: Explorer, name: str) -> None:
    report = explorer.run(BOUNDS[name])
    assert report.violations == []
    assert report.exhausted
    assert report.schedules >= SHORT[name], report.outcomes


def test_what_the_last_look_shows_is_believed(explorer: Explorer) -> None:
    """Found here, at schedule 383: a lock timed out, then all had finished, and the answer was 503."""
    assert explorer.run(BOUNDS["two, no Redis"], limit=400).violations == []


@EACH
@pytest.mark.of_tests
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(explorer: Explorer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "PATIENCE_SECONDS", 3)  # one of them shows by hanging
    apply, bound = MUTANTS[name]
    with mutated(apply):
        report = explorer.run(bound, limit=200)
    assert report.violations, report.outcomes
    assert "not repeatable" not in report.violations[0]
