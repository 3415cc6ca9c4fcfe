"""The state tables, walked cell by cell, the illegal cells included."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.machine import (
    FOLLOWS,
    NEXT,
    Comparison,
    Next,
    Phase,
    Situation,
    compare,
    decide,
    runs_again,
    situation,
)
from flask_idempotency.core.records import Claim, Record, State

MINE = Fingerprint(1, b"a" * 16)
CLAIM = Claim(b"k" * 23, "pay", MINE, "owner", 60.0)
FINGERPRINTS = {
    Comparison.SAME: MINE,
    Comparison.OTHER: Fingerprint(1, b"b" * 16),
    Comparison.UNKNOWN: Fingerprint(2, b"a" * 16),
}

DECISIONS = {
    Situation.ABSENT: {Comparison.UNKNOWN: Next.CLAIM},
    Situation.EXPIRED: dict.fromkeys(Comparison, Next.TAKE_OVER),
    Situation.IN_PROGRESS: {
        Comparison.SAME: Next.TAKE_OVER,
        Comparison.OTHER: Next.REFUSE,
        Comparison.UNKNOWN: Next.TAKE_OVER,
    },
    Situation.LEASED: {
        Comparison.SAME: Next.LET_RUN,
        Comparison.OTHER: Next.REFUSE,
        Comparison.UNKNOWN: Next.LET_RUN,
    },
    Situation.INTERRUPTED: {
        Comparison.SAME: Next.ASK_ROUTE,
        Comparison.OTHER: Next.REFUSE,
        Comparison.UNKNOWN: Next.ASK_ROUTE,
    },
    Situation.COMPLETED: {
        Comparison.SAME: Next.REPLAY,
        Comparison.OTHER: Next.REFUSE,
        Comparison.UNKNOWN: Next.REPLAY,
    },
}


def record(how: Situation, fingerprint: Fingerprint) -> Record | None:
    if how is Situation.ABSENT:
        return None
    state = State.COMPLETED if how is Situation.COMPLETED else State.IN_PROGRESS
    lease_left = {Situation.LEASED: 1.0, Situation.INTERRUPTED: 0.0}.get(how)
    expired = how is Situation.EXPIRED
    return Record(b"k" * 32, "pay", state, fingerprint, 1, expired=expired, lease_left=lease_left)


@pytest.mark.parametrize(("how", "match"), list(product(Situation, Comparison)))
def test_every_cell_of_the_decision_table(how, match):
    expected = DECISIONS[how].get(match)
    if expected is None:
        assert (how, match) not in NEXT
        return
    found = record(how, FINGERPRINTS[match])
    assert situation(found) is how
    assert compare(found, MINE) is match
    assert decide(found, CLAIM) is expected


def test_the_table_holds_nothing_else():
    assert {(s, m) for s, row in DECISIONS.items() for m in row} == set(NEXT)


@pytest.mark.parametrize(("phase", "following"), list(product(Phase, Phase)))
def test_every_pair_of_phases_of_an_attempt(phase, following):
    back = phase in (Phase.AWAITING, Phase.WAITING) and following is Phase.IN_VIEW
    begins = (phase, following) == (Phase.OPEN, Phase.IN_VIEW)
    leaves = phase is Phase.IN_VIEW and following in (Phase.AWAITING, Phase.WAITING)
    ends = phase is not Phase.OVER and following is Phase.OVER
    is_abandoned = phase not in (Phase.OPEN, Phase.OVER) and following is Phase.OPEN
    assert (following in FOLLOWS[phase]) is (back or begins or leaves or ends or is_abandoned)


@pytest.mark.parametrize(("how", "match"), list(NEXT))
@pytest.mark.parametrize("spent", [False, True])
def test_what_was_begun_often_enough_is_begun_no_more(how, match, spent):
    usual = NEXT[how, match]
    would_run = usual in (Next.TAKE_OVER, Next.ASK_ROUTE) and how is not Situation.EXPIRED
    found = record(how, FINGERPRINTS[match])
    expected = Next.GIVE_UP if spent and would_run else usual
    assert decide(found, replace(CLAIM, max_attempts=1 if spent else 2)) is expected


@pytest.mark.parametrize(
    ("attempt", "released", "spent"),
    [(2, None, False), (3, None, True), (9, 9, False), (11, 9, False), (12, 9, True)],
)
def test_attempts_count_since_the_last_release(attempt, released, spent):
    found = record(Situation.IN_PROGRESS, MINE)
    found = replace(found, attempt=attempt, released_attempt=released)
    claim = replace(CLAIM, max_attempts=3)
    assert decide(found, claim) is (Next.GIVE_UP if spent else Next.TAKE_OVER)


def test_an_expired_record_counts_as_new_whatever_it_says():
    for state in State:
        old = Record(b"k" * 32, "pay", state, FINGERPRINTS[Comparison.OTHER], 3, expired=True)
        assert decide(old, CLAIM) is Next.TAKE_OVER


@pytest.mark.parametrize(
    ("age", "released", "hold", "retry", "other"),
    [
        (59, None, False, True, True),
        (60, None, False, False, True),
        (59, 10, True, True, True),
        (60, 10, False, False, False),  # what an operator released is open as long as a retry is
    ],
)
def test_what_was_interrupted_is_run_again_by_its_age_and_policy(age, released, hold, retry, other):
    found = replace(record(Situation.INTERRUPTED, MINE), age=age, released=released)
    expected = {"hold": hold, "retry": retry, id: other}
    assert {policy: runs_again(found, policy, 60) for policy in expected} == expected
