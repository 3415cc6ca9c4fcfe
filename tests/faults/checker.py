"""From what was seen and what is there to what was guaranteed and did not hold. Pure functions.

A key is a register that is written once, so no search is needed: each rule looks at the requests of
one operation (a scope and a key), its rows and its record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from flask_idempotency.stores.lock import PAUSE_SECONDS
from tests.faults.history import History, Kept, Name, Request, Row, Run, Truth, by_name
from tests.faults.nemesis import CRASH

PROBE_SECONDS = 1.0
"""How long a lock in Redis counts as its owner's sign of life."""


@dataclass(frozen=True)
class Violation:
    """A guarantee that did not hold; ``name`` is the operation's."""

    rule: str
    name: Name


def violations(history: History, truth: Truth, longest_view_seconds: float) -> list[Violation]:
    """Every guarantee that did not hold, once for each operation and rule."""
    requests, rows, runs = by_name(history.requests), by_name(truth.rows), by_name(history.runs)
    # Each key has its answer so soon after the faults: some tries take as long as 50 replays.
    settled = PROBE_SECONDS + longest_view_seconds + max(1.0, 50 * history.replay_seconds())
    found: list[Violation] = []
    for name in sorted(requests.keys() | rows.keys() | truth.records.keys()):
        asked, there, kept = requests[name], rows[name], truth.records.get(name)
        rules = [
            *_rows_and_record(asked, there, kept),
            *_one_answer(asked, kept),
            *_for_good(history, asked),
            *_one_request(history, asked, there, kept),
            *_attempts(history, runs[name]),
            *_settled(history, asked, settled),
        ]
        found += [Violation(rule, name) for rule in dict.fromkeys(rules)]
    found += [Violation(f"an error: {each.text}", (each.scope, each.key)) for each in history.errors]
    if truth.left_open:
        found.append(Violation("a transaction was left open", ("", "")))
    return found


def _rows_and_record(asked: list[Request], rows: list[Row], kept: Kept | None) -> Iterator[str]:
    """At most one row; the row is there if and only if a completed record says so."""
    completed = kept is not None and kept.completed
    status = kept.status if kept is not None else None
    if len(rows) > 1:
        yield "more than one row"
    if rows and not completed:
        yield "a row without a completed record"
    if status == 201 and not rows:
        yield "a completed record without its row"
    if status == 402 and rows:
        yield "a record of a refusal, with a row"
    executions = {row.execution for row in rows}
    for request in asked:
        if request.status == 201 and request.execution not in executions:
            yield "a 2xx whose row is not there"
        if request.is_final and not completed:
            yield "a final answer without a completed record"


def _one_answer(asked: list[Request], kept: Kept | None) -> Iterator[str]:
    """All final answers are the same to the byte, and what the record holds; one is the first."""
    finals = [request for request in asked if request.is_final]
    answers = {(request.status, request.answer) for request in finals}
    if len(answers) > 1:
        yield "two different final answers"
    if kept is not None and kept.completed and answers - {(kept.status, kept.answer)}:
        yield "an answer that is not the record's"
    if sum(not request.replayed for request in finals) > 1:
        yield "two first answers"


def _for_good(history: History, asked: list[Request]) -> Iterator[str]:
    """Who asks after somebody has had the final answer gets it, or no answer; a changed body, 422."""
    finals = [request for request in asked if request.is_final]
    owners = {request.body for request in finals}
    known = min((request.returned for request in finals), default=float("inf"))
    for request in asked:
        changed = request.body not in owners
        right = request.status == 422 if changed else request.is_final
        if request.at <= known or right or request.status in (503, None):
            continue
        if request.status != 409 or not _may_meet_a_lock(history, asked, request):
            yield f"{request.status}{' for a changed body' * changed} after the final answer"


def _may_meet_a_lock(history: History, asked: list[Request], request: Request) -> bool:
    """Whether Redis may refuse it although the answer is there: the first one has it still.

    Or Redis was not told of the end, or has forgotten it, and gave a retry the lock. Until that one has
    found the answer (or, if it died, for the probe age) others are told to try again.
    """
    beside = [each for each in asked if each.at <= request.returned and each.returned >= request.at]
    if any(each.is_final and not each.replayed for each in beside):
        return True
    end, young = min(each.at for each in asked if each.is_final), request.at - PROBE_SECONDS
    return history.any_trouble(end - PAUSE_SECONDS, request.returned) and (
        history.any_trouble(young - PAUSE_SECONDS, request.returned)
        or any(each.body == request.body and each.status != 409 for each in beside)
    )


def _one_request(
    history: History, asked: list[Request], rows: list[Row], kept: Kept | None
) -> Iterator[str]:
    """One body owns the key; no other gets its answer, or leaves a row."""
    owners = {request.body for request in asked if request.is_final}
    bodies = {row.body for row in rows}
    if len(owners) > 1:
        yield "a changed body got a final answer"
    if len(bodies) > 1 or (owners and bodies - owners):
        yield "a changed body left a row"
    refused = [request for request in asked if request.status == 422]
    if not owners and kept is None and refused:
        yield "422 for a key that nobody owns"
    end = max((request.returned for request in asked if request.is_final), default=0)
    for request in refused:
        if request.body in owners and not history.any_fault(request.at, end, {CRASH}):
            yield "422 for the body that owns the key"


def _attempts(history: History, runs: list[Run]) -> Iterator[str]:
    """Attempts are numbered, and of one request; a crash of Postgres may lose an unfinished claim."""
    for one, other in combinations(runs, 2):
        if history.any_fault(one.at, other.at, {CRASH}):
            continue
        if one.body != other.body:
            yield "the view ran for two different bodies"
        if one.attempt == other.attempt:
            yield "two runs with one attempt number"


def _settled(history: History, asked: list[Request], seconds: float) -> Iterator[str]:
    """Each request's body has its definite answer soon after the faults have stopped."""
    for body in {request.body for request in asked}:
        of_body = [request for request in asked if request.body == body]
        definite = [request.returned for request in of_body if request.is_definite]
        begun = max(history.healed, min(request.at for request in of_body))
        if not definite:
            yield "no final answer"
        elif min(definite) - begun > seconds:
            yield "no final answer in time"


FINAL_SHARE, TAIL_SECONDS = 0.5, 2.0


def missing(history: History, quota: dict[str, int]) -> list[str]:
    """Which points and faults were not hit as often as they must be, or the zeros mean nothing."""
    seen = Counter([death.point for death in history.deaths] + [each.kind for each in history.faults])
    return [f"{what}: {seen[what]} of {n}" for what, n in quota.items() if seen[what] < n]


def emptiness(history: History, quota: dict[str, int]) -> list[str]:
    """Why the run proves nothing; empty if it does."""
    found, requests = missing(history, quota), history.requests
    share = sum(request.is_final for request in requests) / max(1, len(requests))
    if share < FINAL_SHARE:
        found.append(f"only {share:.0%} of {len(requests)} requests got a final answer")
    tail = [r for r in requests if history.ended - TAIL_SECONDS <= r.at <= history.ended]
    bad = Counter(str(r.status) for r in tail if r.status not in (201, 402, 409, 422))
    if not tail or bad:
        found.append(f"the last seconds were not healthy: {dict(bad) or 'no requests'}")
    return found
