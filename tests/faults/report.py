"""The table of a run: what was tried, what went wrong, how long anybody was kept waiting."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import servers.urls
from tests.faults.checker import COLUMNS, PROBE_SECONDS, Violation, is_conceded, late
from tests.faults.history import History, Name, Request
from tests.faults.machines import Plan
from tests.faults.points import POINTS


@dataclass(frozen=True)
class Hit:
    """One fault: from when on an operation could go on, and which operations it touched."""

    label: str
    since: float
    touches: Callable[[Name], bool]


def hits(history: History, requests: dict[Name, list[Request]]) -> Iterator[Hit]:
    """Every death and every fault of a run."""
    for death in history.deaths:
        touches_it = partial(operator.eq, (death.scope, death.key))
        yield Hit(f"kill -9: {POINTS[death.point]}", death.at, touches_it)
    for fault in history.faults:

        def touches(name: Name, at: float = fault.at, ended: float = fault.ended) -> bool:
            return any(r.at <= ended and r.returned >= at for r in requests.get(name, ()))

        yield Hit(fault.kind, fault.ended, touches)


def block(requests: list[Request], since: float) -> float | None:
    """How long after ``since`` came the first request that got through; None if it cannot be told.

    That is so if no request failed by this fault, if another one failed before it got through, or if
    nobody kept asking: a key that has its answer is only asked for again by chance.
    """
    if not any(r.at <= since <= r.returned and r.status in (None, 503) for r in requests):
        return None
    through = min((r for r in requests if r.is_final and r.returned > since), default=None, key=_end)
    if through is None:
        return None
    if any(since < r.at < through.at and r.status not in (201, 402, 409, 422) for r in requests):
        return None
    asked = sorted(r.at for r in requests if since < r.at <= through.at)
    gaps = (after - before for before, after in zip([since, *asked], asked, strict=False))
    return None if max(gaps, default=0.0) > PROBE_SECONDS else max(0.0, through.at - since)


def _end(request: Request) -> float:
    return request.returned


def table(plan: Plan, history: History, found: list[Violation]) -> str:
    """One line for each point and each kind of fault."""
    requests = history.by_name()
    labels = [f"kill -9: {POINTS[point]}" for point in plan.points] + list(plan.faults)
    tries: Counter[str] = Counter()
    wrong: Counter[tuple[str, str]] = Counter()
    longest: dict[str, float] = {}
    blamed: set[Violation] = set()
    for hit in hits(history, requests):
        tries[hit.label] += 1
        for violation in found:
            if hit.touches(violation.name):
                wrong[hit.label, violation.column] += 1
                blamed.add(violation)
        blocks = [block(r, hit.since) for name, r in requests.items() if hit.touches(name)]
        longest[hit.label] = max([longest.get(hit.label, 0.0), *(b for b in blocks if b is not None)])
    for violation in found:
        if violation not in blamed:
            wrong["no fault near", violation.column] += 1
    if any(label == "no fault near" for label, _ in wrong):
        labels.append("no fault near")
    lines = [f"{'':44}{'tries':>6}{''.join(f'{column:>13}' for column in COLUMNS)}  longest block"]
    for label in labels:
        counts = "".join(f"{wrong[label, column]:>13}" for column in COLUMNS)
        lines.append(f"{label:44}{tries[label]:>6}{counts}{longest.get(label, 0.0):>13.2f} s")
    return "\n".join(lines)


def summary(plan: Plan, history: History, found: list[Violation]) -> str:
    """The run in one line."""
    requests, names = history.requests, history.by_name()
    paid = sum(request.status == 201 for request in requests)
    conceded = sum(
        request.status == 409 and is_conceded(history, asked, request)
        for asked in names.values()
        for request in late(asked)
    )
    settle = max((_settled_after(history, asked) for asked in names.values()), default=0.0)
    statuses = Counter("none" if r.status is None else str(r.status) for r in requests)
    return (
        f"design {plan.design}, {servers.urls.driver}, sessions {plan.sessions}, seed {plan.seed},"
        f" {plan.seconds:g} s: {len(requests)} requests,"
        f" {len(names)} keys, {paid / max(1, len(requests)):.0%} 2xx, {len(history.runs)} views run,"
        f" {len(history.deaths)} killed at a point, {len(history.faults)} faults,"
        f" {len(found)} violations\n"
        f"answers: {', '.join(f'{k}: {v}' for k, v in sorted(statuses.items()))};"
        f" 409 although finished, by a young lock in Redis: {conceded};"
        f" last key settled {settle:.2f} s after the faults"
    )


def _settled_after(history: History, asked: list[Request]) -> float:
    known = min((request.returned for request in asked if request.is_definite), default=float("inf"))
    return known - history.healed if asked[0].at <= history.healed < known else 0.0
