"""The state tables, walked cell by cell; what becomes of an operation by the error of its view."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flask_idempotency import ConfigurationError, KeyReused, Retryable, TransactionConflict
from flask_idempotency.core.errors import LeaseLost, RecordBroken
from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.machine import (
    NEXT,
    Next,
    Situation,
    decide,
    outcome_after,
    runs_again,
    situation,
)
from flask_idempotency.core.records import Claim, Record, State

MINE, OTHER, UNKNOWN = (Fingerprint(1, b"a" * 16), Fingerprint(1, b"b" * 16), Fingerprint(2, b"a" * 16))
CLAIM = Claim(b"k" * 23, "pay", MINE, "owner", 60.0)


def record(how: Situation, fingerprint: Fingerprint) -> Record | None:
    if how is Situation.ABSENT:
        return None
    state = State.COMPLETED if how is Situation.COMPLETED else State.IN_PROGRESS
    lease_left = {Situation.LEASED: 1.0, Situation.INTERRUPTED: 0.0}.get(how)
    expired = how is Situation.EXPIRED
    return Record(b"k" * 32, "pay", state, fingerprint, 1, expired=expired, lease_left=lease_left)


@pytest.mark.parametrize("stored", [MINE, OTHER, UNKNOWN])
@pytest.mark.parametrize("spent", [False, True])
@pytest.mark.parametrize("how", Situation)
def test_every_cell_of_the_decision_table(how, stored, spent):
    found = record(how, stored)
    assert situation(found) is how
    expected = NEXT[how][stored is OTHER and found is not None]
    would_run = expected in (Next.TAKE_OVER, Next.ASK_ROUTE) and how is not Situation.EXPIRED
    claim = replace(CLAIM, max_attempts=1 if spent else 2)
    assert decide(found, claim) is (Next.GIVE_UP if spent and would_run else expected)


def test_a_changed_request_is_refused_whatever_became_of_the_first():
    lives = set(Situation) - {Situation.ABSENT, Situation.EXPIRED}
    assert {how for how, row in NEXT.items() if row[1] is Next.REFUSE} == lives


@pytest.mark.parametrize(
    ("attempt", "released", "spent"),
    [(2, None, False), (3, None, True), (9, 9, False), (11, 9, False), (12, 9, True)],
)
def test_attempts_count_since_the_last_release(attempt, released, spent):
    found = record(Situation.IN_PROGRESS, MINE)
    found = replace(found, attempt=attempt, released_attempt=released)
    claim = replace(CLAIM, max_attempts=3)
    assert decide(found, claim) is (Next.GIVE_UP if spent else Next.TAKE_OVER)


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


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (LookupError(), None),
        (Retryable(), "released"),
        (TransactionConflict(), "released"),
        (KeyReused(), "interrupted"),
        (LeaseLost(), "interrupted"),
        (ConfigurationError("wrong"), "interrupted"),
        (RecordBroken(), "interrupted"),
    ],
)
def test_an_error_fails_the_operation_or_says_more(error, outcome):
    assert outcome_after(error) == outcome
