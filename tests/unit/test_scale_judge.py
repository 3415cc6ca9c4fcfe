"""The judge of ``make scale``: what it must notice of a key, and what it must not."""

from __future__ import annotations

from collections import Counter

import pytest

from scale.judge import Books, Verdict, judge
from scale.load import Answer

pytestmark = pytest.mark.of_tests


def judged(*seen: int | None, body: bytes = b"1", payments: int = 1, later: int = 1) -> Verdict:
    """Statuses that clients have seen, what they are told later, and the payments then and later."""
    answers = [Answer("key", 0.0, 1.0, status, b"1") for status in seen]
    audit = [Answer("key", 0.0, 1.0, 201, body)]
    then, at_last = (Books(Counter(key=count), Counter(key=count)) for count in (payments, later))
    return judge(answers, then, audit, at_last, [])


@pytest.mark.parametrize(
    ("verdict", "wrong"),
    [
        (judged(201, later=2), {"doubled"}),
        (judged(None, later=2), {"doubled"}),
        (judged(201, payments=0), {"lost"}),
        (judged(201, body=b"2"), {"two_responses"}),
        (judged(201), set()),
        (judged(503, payments=0), set()),
    ],
)
def test_what_is_wrong_is_noticed(verdict, wrong):
    found = {name for name in ("doubled", "lost", "two_responses", "stuck") if getattr(verdict, name)}
    assert (found, verdict.is_clean) == (wrong, not wrong)
