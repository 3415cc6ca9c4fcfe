"""What became of every key, by what the clients saw and what the database holds."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from scale.load import Answer


@dataclass(frozen=True)
class Window:
    """A fault, from its beginning until everything was whole again; monotonic seconds."""

    began: float
    ended: float

    def meets(self, answer: Answer) -> bool:
        return answer.began < self.ended and answer.ended > self.began


@dataclass
class Books:
    """What the database holds in the end: payments and completed records, by key."""

    payments: Counter[str]
    records: Counter[str]


@dataclass
class Verdict:
    """One row's numbers. Zeros belong in the first four."""

    doubled: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    two_responses: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    torn: int = 0  # payments without a completed record there, or the other way round
    operations: int = 0
    gave_up: int = 0
    evidence: list[str] = field(default_factory=list)
    longest: float = 0.0  # seconds of one call until its response, with all its retries
    blocked: float = 0.0  # seconds in which nobody got a response
    before: float = 0.0  # seconds of a call, median
    during: float = 0.0
    after: float = 0.0
    counts: Mapping[str, int] = field(default_factory=dict)  # of the topology

    @property
    def is_clean(self) -> bool:
        return not (self.doubled or self.lost or self.two_responses or self.stuck or self.torn)


def judge(
    answers: Sequence[Answer],
    books: Books,
    audit: Sequence[Answer],
    final: Books,
    windows: Sequence[Window],
) -> Verdict:
    """Judge a run.

    :param answers: of the clients, in the run.
    :param books: read after it.
    :param audit: of each key that was sent, once more after that.
    :param final: the books after the audit.
    """
    by_key: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        by_key[answer.key].append(answer)
    later = {answer.key: answer for answer in audit}
    verdict = Verdict(operations=len(by_key))
    for key, seen in by_key.items():
        acknowledged = [answer for answer in seen if answer.is_acknowledged]
        if final.payments[key] > 1:
            verdict.doubled.append(key)
        if acknowledged and not books.payments[key]:
            verdict.lost.append(key)
        if later[key].is_acknowledged:
            acknowledged.append(later[key])
        else:
            verdict.stuck.append(key)
        if len({answer.body for answer in acknowledged}) > 1:
            verdict.two_responses.append(key)
    wrong = {*verdict.doubled, *verdict.lost, *verdict.two_responses}
    verdict.evidence = [_told(answer, windows) for key in wrong for answer in by_key[key]]
    apart = (final.payments - final.records) + (final.records - final.payments)
    verdict.torn = apart.total()
    verdict.gave_up = sum(not answer.is_acknowledged for answer in answers)
    _time(verdict, answers, windows)
    return verdict


def _told(answer: Answer, windows: Sequence[Window]) -> str:
    """An answer, in seconds after the beginning of the last fault before it."""
    fault = max((w.began for w in windows if w.began <= answer.ended), default=answer.began)
    began, ended = answer.began - fault, answer.ended - fault
    return f"{answer.key} {answer.status}, {began:.2f} to {ended:.2f} s"


def _time(verdict: Verdict, answers: Sequence[Answer], windows: Sequence[Window]) -> None:
    well = sorted((each for each in answers if each.is_acknowledged), key=lambda each: each.ended)
    if not well:
        return
    verdict.longest = max(each.ended - each.began for each in well)
    verdict.blocked = max((b.ended - a.ended for a, b in pairwise(well)), default=0.0)
    first = min((window.began for window in windows), default=float("inf"))
    met = [each for each in well if any(window.meets(each) for window in windows)]
    rest = [each for each in well if not any(window.meets(each) for window in windows)]
    verdict.before = _median([each for each in rest if each.ended <= first])
    verdict.during = _median(met)
    verdict.after = _median([each for each in rest if each.began > first])


def _median(answers: Sequence[Answer]) -> float:
    return statistics.median([each.ended - each.began for each in answers]) if answers else 0.0
