"""From what was seen and what is there to what was guaranteed and did not hold. Pure functions.

A key is a register that is written once, so no search is needed: each rule looks at the requests of
one operation (a scope and a key), its rows and its record.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from flask_idempotency.stores.lock import PAUSE_SECONDS
from tests.faults.history import Death, History, Name, Request, Run
from tests.faults.nemesis import CRASH, EMPTIES, KILL, PAUSE
from tests.faults.truth import Kept, Row, Truth

PROBE_SECONDS = 1.0
"""How long a lock in Redis counts as its owner's sign of life."""

DOUBLED, LOST, TWO_ANSWERS, STUCK = COLUMNS = ("doubled", "lost", "two answers", "stuck")


@dataclass(frozen=True)
class Violation:
    """A guarantee that did not hold; ``name`` is the operation's."""

    column: str
    rule: str
    name: Name


@dataclass(frozen=True)
class Limits:
    """How soon after the faults have stopped each key has its answer."""

    longest_view_seconds: float

    def settle_seconds(self, history: History) -> float:
        """A second for some tries, and more of it where the machine is slow: as long as 50 replays."""
        tries = max(1.0, 50 * history.replay_seconds())
        return PROBE_SECONDS + self.longest_view_seconds + tries


def violations(history: History, truth: Truth, limits: Limits) -> list[Violation]:
    """Every guarantee that did not hold, once for each operation and rule."""
    rows: dict[Name, list[Row]] = defaultdict(list)
    for row in truth.rows:
        rows[row.scope, row.key].append(row)
    runs: dict[Name, list[Run]] = defaultdict(list)
    for run in history.runs:
        runs[run.scope, run.key].append(run)
    requests = history.by_name()
    found: list[Violation] = []
    for name in sorted(requests.keys() | rows.keys() | truth.records.keys()):
        asked, there, kept = requests.get(name, []), rows[name], truth.records.get(name)
        rules = [
            *_rows_and_record(asked, there, kept),
            *_one_answer(asked, kept),
            *_for_good(history, asked),
            *_one_request(asked, there, kept),
            *_attempts(history, runs[name]),
            *_settled(history, asked, limits),
        ]
        found += [Violation(column, rule, name) for column, rule in dict.fromkeys(rules)]
    found += [Violation(STUCK, f"an error: {e.text}", (e.scope, e.key)) for e in history.errors]
    found += [
        Violation(LOST, "what a child process committed is not there", (child.scope, child.key))
        for child in history.children
        if child.execution not in truth.notes
    ]
    if truth.left_open:
        found.append(Violation(STUCK, "a transaction was left open", ("", "")))
    return found


Found = Iterator[tuple[str, str]]


def _rows_and_record(asked: list[Request], rows: list[Row], kept: Kept | None) -> Found:
    """At most one row; the row is there if and only if a completed record says so."""
    if len(rows) > 1:
        yield DOUBLED, "more than one row"
    completed = kept is not None and kept.completed
    if rows and not completed:
        yield LOST, "a row without a completed record"
    if kept is not None and completed and kept.status == 201 and not rows:
        yield LOST, "a completed record without its row"
    if kept is not None and completed and kept.status == 402 and rows:
        yield LOST, "a record of a refusal, with a row"
    executions = {row.execution for row in rows}
    for request in asked:
        if request.status == 201 and request.execution not in executions:
            yield LOST, "a 2xx whose row is not there"
        if request.is_final and not completed:
            yield LOST, "a final answer without a completed record"


def _one_answer(asked: list[Request], kept: Kept | None) -> Found:
    """All final answers are the same to the byte, and what the record holds; one is the first."""
    finals = [request for request in asked if request.is_final]
    answers = {(request.status, request.answer) for request in finals}
    if len(answers) > 1:
        yield TWO_ANSWERS, "two different final answers"
    if kept is not None and kept.completed and answers - {(kept.status, kept.answer)}:
        yield TWO_ANSWERS, "an answer that is not the record's"
    if sum(not request.replayed for request in finals) > 1:
        yield DOUBLED, "two first answers"


def _for_good(history: History, asked: list[Request]) -> Found:
    """Who asks after somebody has had the final answer gets it, or no answer; a changed body, 422."""
    owners = {request.body for request in asked if request.is_final}
    for request in late(asked):
        changed = request.body not in owners
        right = request.status == 422 if changed else request.is_final
        if right or request.status in (503, None):
            continue
        whose = " for a changed body" if changed else ""
        rule = f"{request.status}{whose} after the final answer"
        if request.status != 409:
            yield TWO_ANSWERS, rule
        elif not is_conceded(history, asked, request):
            yield STUCK, rule


def late(asked: list[Request]) -> list[Request]:
    """The requests sent after a final answer had come, whatever their body."""
    known = min((request.returned for request in asked if request.is_final), default=float("inf"))
    return [request for request in asked if request.at > known]


def is_conceded(history: History, asked: list[Request], request: Request) -> bool:
    """A 409 that comes of a young lock, although the operation has finished: Redis does not know it.

    Redis turns duplicates away without asking Postgres while a lock is younger than the probe age. If
    it was not told of the end, or has forgotten it, a retry takes the lock, and until it has found
    the answer (or, if it dies, for the probe age) the next one is told to try again.
    """
    if not _redis_missed_the_end(history, asked, request):
        return False
    young = request.at - PROBE_SECONDS
    return any(
        other.at <= request.returned and _last_lock(history, other) >= young
        for other in asked
        if other is not request and other.body == request.body and other.status != 409
    )


def _redis_missed_the_end(history: History, asked: list[Request], request: Request) -> bool:
    """Whether the marker of the end can be missing, by a fault that is in the history."""
    finals = [each for each in asked if each.is_final]
    since, until = min(each.at for each in finals) - PAUSE_SECONDS, request.returned
    return (
        history.any_fault({*EMPTIES, KILL}, since, until)
        or any(since <= miss.at <= until for miss in history.misses)
        or any(d.point == "commit" and (d.scope, d.key) == request.name for d in history.deaths)
        or any(_struck_by(death, each) for each in asked for death in history.deaths)
    )


def _struck_by(death: Death, request: Request) -> bool:
    """Whether a death that another has asked for may have been this one's, in the same worker."""
    is_anothers = (death.scope, death.key) != request.name
    return is_anothers and request.status is None and request.at <= death.at <= request.returned


def _last_lock(history: History, request: Request) -> float:
    """When the request may have taken a lock at the latest: a Redis that is paused does it later."""
    pauses = (f for f in history.faults if f.kind == PAUSE)
    late = [f.ended for f in pauses if f.at <= request.returned and f.ended >= request.at]
    return max([request.returned, *late])


def _one_request(asked: list[Request], rows: list[Row], kept: Kept | None) -> Found:
    """One body owns the key; no other gets its answer, or leaves a row."""
    owners = {request.body for request in asked if request.is_final}
    if len(owners) > 1:
        yield TWO_ANSWERS, "a changed body got a final answer"
    if len({row.body for row in rows}) > 1 or (owners and {row.body for row in rows} - owners):
        yield TWO_ANSWERS, "a changed body left a row"
    if not owners and kept is None and any(request.status == 422 for request in asked):
        yield STUCK, "422 for a key that nobody owns"


def _attempts(history: History, runs: list[Run]) -> Found:
    """Attempts are numbered, and of one request; a crash of Postgres may lose an unfinished claim."""
    for one, other in combinations(runs, 2):
        if history.any_fault({CRASH}, one.at, other.at):
            continue
        if one.body != other.body:
            yield TWO_ANSWERS, "the view ran for two different bodies"
        if one.attempt and one.attempt == other.attempt:
            yield DOUBLED, "two runs with one attempt number"


def _settled(history: History, asked: list[Request], limits: Limits) -> Found:
    """Each request's body has its definite answer soon after the faults have stopped."""
    settle_seconds = limits.settle_seconds(history)
    for body in {request.body for request in asked}:
        of_body = [request for request in asked if request.body == body]
        if body not in {request.body for request in asked if request.is_definite}:
            yield STUCK, "no final answer"
            continue
        known = min(request.returned for request in of_body if request.is_definite)
        begun = max(history.healed, min(request.at for request in of_body))
        if known - begun > settle_seconds:
            yield STUCK, "no final answer in time"


@dataclass(frozen=True)
class Quota:
    """What a run must have seen at least, or its zeros mean nothing."""

    points: dict[str, int]
    faults: dict[str, int]
    final_share: float = 0.5
    tail_seconds: float = 2.0


def missing(history: History, quota: Quota) -> list[str]:
    """Which points and faults were not hit often enough."""
    died, did = Counter(d.point for d in history.deaths), Counter(f.kind for f in history.faults)
    return [
        f"{what}: {seen[what]} of {n}"
        for seen, wanted in ((died, quota.points), (did, quota.faults))
        for what, n in wanted.items()
        if seen[what] < n
    ]


def emptiness(history: History, quota: Quota) -> list[str]:
    """Why the run proves nothing; empty if it does."""
    found = []
    requests = history.requests
    share = sum(request.is_final for request in requests) / max(1, len(requests))
    if share < quota.final_share:
        found.append(f"only {share:.0%} of {len(requests)} requests got a final answer")
    found += missing(history, quota)
    begin = history.ended - quota.tail_seconds
    tail = [request for request in requests if begin <= request.at <= history.ended]
    bad = Counter(str(r.status) for r in tail if r.status not in (201, 402, 409, 422))
    if not tail or bad:
        found.append(f"the last seconds were not healthy: {dict(bad) or 'no requests'}")
    return found
