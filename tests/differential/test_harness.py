"""The instrument itself: it finds each kind of difference, and none between two that are alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.differential import harness
from tests.differential.harness import (
    EQUAL,
    Case,
    Error,
    Observation,
    Outcome,
    Refused,
    Reply,
    State,
    Step,
)
from tests.differential.worlds import Events

pytestmark = pytest.mark.of_tests

CLEAN = State(frozenset())
HEARD = Events(Counter(after_commit=1))


def step(label, *, replayed=False, **changes):
    reply = Reply(201, "{}", "application/json", replayed)
    usual = {"notes": (), "events": HEARD, "rows": {"payment": ["1"]}, "state": CLEAN}
    return Step(label, **{"reply": reply, **usual, **changes})


def observation(first=None):
    steps = [first or step("key 1"), step("key 1 again", replayed=True)]
    write = Reply(201, "{}")
    records = [("completed", 201)]
    return Observation({"payment": []}, CLEAN, steps, write, records)


def outcome(plain=None, protected=None, **options):
    case = Case("a case", lambda _: None, **options)
    return Outcome(case, "postgres", plain or observation(), protected or observation())


ERROR = Error("RuntimeError", None, "no")


@pytest.mark.parametrize(
    "other",
    [
        step("key 1", reply=Reply(200, "{}", "application/json")),
        step("key 1", reply=Reply(201, "[]", "application/json")),
        step("key 1", reply=Reply(201, "{}", "text/plain")),
        step("key 1", replayed=True),
        step("key 1", reply=Reply(201, "{}", "application/json", errors=(ERROR,))),
        step("key 1", reply=Reply(None, "", raised=ERROR)),
        step("key 1", notes=("seen",)),
        step("key 1", rows={"payment": []}),
        step("key 1", rows={"payment": ["1"], "audit": []}),
        step("key 1", state=State(frozenset({"role tenant"}))),
        step("key 1", events=Events()),
        step("key 1", events=Events(Counter(after_commit=2))),
        step("key 1", events=Events(HEARD.session + Counter(after_rollback=1))),
    ],
)
def test_each_kind_of_difference_is_found(other):
    assert outcome().differences == []
    assert outcome(protected=observation(other)).differences != []
    assert outcome(plain=observation(other)).differences != []


def test_a_lost_record_is_found():
    lost = replace(observation(), records=[("in_progress", None)])
    assert outcome(protected=lost).differences != []


def refused(**changes):
    error = Error("NotAtomic", None, "the view did what it must not")
    reply = Reply(500, "<!doctype html>", "text/html", errors=(error,))
    usual = {"reply": reply, "rows": {"payment": []}, "events": Events()}
    steps = [step(label, **{**usual, **changes}) for label in ("key 1", "key 1 again")]
    return replace(observation(), steps=steps, records=[("in_progress", None)])


def test_a_refusal_is_by_name_and_leaves_nothing():
    expect = Refused("must not")
    assert outcome(protected=refused(), expect=expect).problems == []
    assert outcome(protected=refused()).refused
    assert outcome(expect=expect).problems != []
    for changes in (
        {"rows": {"payment": ["1"]}},
        {"state": State(frozenset({"role tenant"}))},
        {"reply": Reply(500, "", errors=(ERROR,))},
        {"reply": Reply(503, "", errors=())},
    ):
        assert outcome(protected=refused(**changes), expect=expect).problems != []
    finished = replace(refused(), records=[("completed", 201)])
    assert outcome(protected=finished, expect=expect).problems != []
    assert outcome(protected=refused(), expect=Refused("another reason")).problems != []


def test_a_case_that_fails_for_another_reason_than_meant_is_noticed():
    assert outcome(status=200).problems != []
    mistake = step("key 1", notes=("NameError[None]: name 'x' is not defined",))
    both = observation(mistake)
    assert outcome(both, both).problems != []
    assert outcome(both, both, mistakes=True).problems == []


def writes(world):
    world.pay(1)
    world.commit()
    return {"payments": world.session.query(world.Payment).count()}, 201


def fails_the_first_time(world):
    """Not kept, so that each retry runs it again."""
    world.here["runs"] = world.here.get("runs", 0) + 1
    writes(world)
    if world.here["runs"] == 1:
        raise RuntimeError("no")


@pytest.mark.parametrize("view", [writes, fails_the_first_time])
def test_two_plain_applications_are_equal(laboratory, view):
    case = Case("a case", view, status=None)
    pair = laboratory.take(case, "postgres")
    one, other = (harness.observe(pair[0], case) for _ in range(2))
    laboratory.give_back(case, "postgres", pair)
    assert harness.differences(one, other) == []
    assert harness.unequal_events(one, other) == []
    assert len(one.rows["payment"]) == 0
    assert one.steps[-1].reply.replayed


def test_what_a_view_leaves_on_its_connection_is_seen(laboratory):
    def view(world):
        world.sql("set application_name = 'left'")
        world.sql("select pg_advisory_lock(1)")
        world.sql("listen left_channel")
        world.sql("prepare left_statement as select 1")
        world.sql("create temporary table left_table (a int)")
        world.sql("set role pg_read_all_data")
        world.commit()

    outcome = laboratory.run_pair(Case("a case", view, expect=EQUAL, status=None), "postgres")
    seen = " ".join(outcome.plain.steps[0].state.lines - outcome.plain.state.lines)
    for left in ("application_name=left", "lock advisory", "channel left_channel", "left_statement"):
        assert left in seen
    assert "temporary table left_table" in seen
    assert "role pg_read_all_data" in seen
