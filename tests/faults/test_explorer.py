"""The explorer: it runs every order once, and finds what only one order shows."""

import math
import time
from types import SimpleNamespace

import pytest

from flask_idempotency.core.engine import ROUNDS, DecisionEngine
from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.ports import Lock
from flask_idempotency.core.records import Claim, Record, Sealer, State, StoredResponse
from tests.drivers import EACH
from tests.faults.explore import schedules
from tests.faults.explore.schedules import Actor, Kind, Stage, explore
from tests.faults.explore.world import BOUNDS, explore_bound
from tests.faults.mutants import MUTANTS

# Well below what there are: so that a bound which shrinks is noticed.
LEAST = {
    "two": 2,
    "a changed body": 100,
    "a changed body, no Redis": 50,
    "two, connection lost": 12,
    "two, answer lost": 6,
    "two retries after a failure": 30,
    "three, FLUSHALL": 40,
}
LOSSES = ("two, connection lost", "two, answer lost")  # what drivers say in words of their own
SHORT = [(name, "psycopg2") for name in LEAST] + [(name, "psycopg") for name in LOSSES]


class Toy:
    """Threads that take steps of their own; no server."""

    def __init__(self, *bodies):
        self.stage, self.order = Stage(), ""
        for name, body in zip("ABC", bodies, strict=False):
            self.stage.add(name, lambda body=body: body(Actor.current()))

    def choices(self):
        return [actor.pending for actor in self.stage.actors if actor.pending]

    def do(self, choice):
        self.order += choice.actor
        actor = self.stage[choice.actor]
        actor.go()
        self.stage.settle(actor)
        return []

    def check(self):
        return self.order

    def dismiss(self):
        self.stage.dismiss()


def steps(count, kind):
    def body(actor):
        for number in range(count):
            actor.stop_before(f"step {number}", kind)

    return body


@pytest.mark.parametrize("counts", [(1,), (2, 2), (3, 2), (2, 1, 2)])
def test_every_order_of_steps_that_others_notice_is_run_once(counts):
    report = explore(lambda: Toy(*(steps(n, Kind.COMMIT) for n in counts)))
    orders = math.factorial(sum(counts)) // math.prod(map(math.factorial, counts))
    assert (report.schedules, len(report.outcomes), report.exhausted) == (orders, orders, True)


@pytest.mark.parametrize(
    ("kinds", "schedules"),
    [
        (((3, Kind.LOOK), (3, Kind.LOOK)), 1),
        (((2, Kind.REDIS), (1, Kind.COMMIT), (1, Kind.REDIS)), 3),  # where C is among the two of A
    ],
    ids=["nobody notices", "some notice"],
)
def test_of_orders_that_nobody_notices_one_is_run(kinds, schedules):
    report = explore(lambda: Toy(*(steps(count, kind) for count, kind in kinds)))
    assert report.schedules == schedules


def test_what_cannot_be_repeated_is_a_violation():
    runs = iter(("same", "same", "other", "other"))

    def body(actor):
        actor.stop_before(next(runs), Kind.COMMIT)

    assert "not repeatable" in explore(lambda: Toy(body, body)).violations[0]


@pytest.mark.parametrize(("name", "driver"), SHORT, indirect=["driver"])
def test_every_schedule_keeps_every_guarantee(postgres, redis_server, name):
    report = explore_bound(BOUNDS[name], postgres, redis_server)
    assert report.violations == []
    assert report.exhausted
    assert report.schedules >= LEAST[name], report.outcomes


def test_what_the_last_look_shows_is_believed():
    """Found here: each look showed a change, and the last one the answer; the client was told 503."""
    claim = Claim(b"k" * 32, "pay", Fingerprint(1, b"a" * 16), "owner", 60)
    answer = StoredResponse(201, (), b"")
    completed = Record(claim.key, "pay", State.COMPLETED, claim.fingerprint, 1, response=answer)
    looks = iter([None] * (ROUNDS - 1) + [completed])
    records = SimpleNamespace(claim=lambda claim: None, look=lambda key: next(looks))
    assert DecisionEngine(records, Lock(), Sealer(), time).decide(claim).response == answer


@EACH
@pytest.mark.of_tests
@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.bound])
def test_a_mutant_is_caught(postgres, redis_server, name, monkeypatch):
    monkeypatch.setattr(schedules, "PATIENCE_SECONDS", 3)  # one of them shows by hanging
    with MUTANTS[name].apply():
        report = explore_bound(MUTANTS[name].bound, postgres, redis_server, limit=200)
    assert report.violations, report.outcomes
    assert "not repeatable" not in report.violations[0]
