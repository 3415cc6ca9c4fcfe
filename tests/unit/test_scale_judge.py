"""The judge of ``make scale``: what it must notice of a key, and what it must not."""

from __future__ import annotations

from collections import Counter

import pytest

from scale.judge import Books, Verdict, judge
from scale.load import Answer

pytestmark = pytest.mark.of_tests


def answer(status=201, body=b"1", began=0.0, ended=1.0):
    return Answer("key", began, ended, status, body)


def books(payments=1, records=1):
    return Books(Counter(key=payments), Counter(key=records))


def judged(seen=(), *, after=None, audit=None, final=None) -> Verdict:
    later = audit or answer()
    return judge(seen or [answer()], after or books(), [later], final or books(), [])


def numbers(verdict):
    names = ("doubled", "lost", "two_responses", "stuck")
    found = {name: len(getattr(verdict, name)) for name in names} | {"torn": verdict.torn}
    return {name: number for name, number in found.items() if number}


@pytest.mark.parametrize(
    ("verdict", "wrong"),
    [
        (judged(final=books(2, 2)), {"doubled": 1}),
        (judged([answer(None)], after=books(), final=books(2, 2)), {"doubled": 1}),
        (judged(after=books(0, 0), audit=answer(body=b"2")), {"lost": 1, "two_responses": 1}),
        (judged([answer(), answer(body=b"2")]), {"two_responses": 1}),
        (judged(audit=answer(body=b"2")), {"two_responses": 1}),
        (judged([answer(503)], after=books(0, 0), audit=answer(503)), {"stuck": 1}),
        (judged(final=books(1, 0)), {"torn": 1}),
    ],
    ids=lambda value: "" if isinstance(value, Verdict) else " and ".join(value),
)
def test_what_is_wrong_is_noticed(verdict, wrong):
    assert numbers(verdict) == wrong
    assert not verdict.is_clean


def test_who_gives_up_is_counted_and_loses_nothing():
    verdict = judged([answer(503)], after=books(0, 0))
    assert numbers(verdict) == {}
    assert verdict.gave_up == 1
