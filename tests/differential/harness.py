"""Views that are no program (``steps``), in a plain and in a protected application, side by side.

Each case sends key 1, key 1 again, key 2 and key 2 again to both applications, and an unprotected
request at the end. Compared are statuses, bodies, exceptions (those that a view noted, and those that
left the application), what listeners heard, what is left on the connections, and rows, without their
``id``: a sequence does not go back where a try is rolled back.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from servers import urls
from tests.databases import Databases
from tests.differential.verdicts import (
    EQUAL,
    EQUAL_OR_REFUSED,
    ByDesign,
    Either,
    Equal,
    NothingKept,
    Refused,
    Verdict,
)
from tests.differential.worlds import Reply, World

View = Callable[[World], Any]

__all__ = ["EQUAL", "EQUAL_OR_REFUSED", "ByDesign", "Either", "Equal", "NothingKept", "Refused"]

PAIRS_KEPT = 12
"""Applications that wait for the next case of their kind. Each keeps a few connections."""


@dataclass(frozen=True)
class Case:
    """One way to use the session, and what is expected of it.

    All functions are given the :class:`World` first. ``view`` is the view: what it returns is its
    answer, and None stands for a 201. ``before`` is a ``before_request`` function, ``after_request``
    is given the response too, ``teardown`` the error; ``above(world, call)`` stands above
    ``@idempotent`` and calls it. ``setup`` runs once, in an application context, for an application of
    its own (cases with the same function share one).

    ``events=False`` compares nothing that listeners heard. ``status`` is that of the plain
    application's first answer, so that a case which fails for another reason than meant is noticed.
    """

    name: str
    view: View
    before: Callable[[World], Any] | None = None
    above: Callable[[World, Callable[[], Any]], Any] | None = None
    after_request: Callable[[World, Any], Any] | None = None
    teardown: Callable[[World, BaseException | None], Any] | None = None
    setup: Callable[[World], Any] | None = None
    engine_options: dict[str, Any] | None = None
    pool: int = 1
    expect: Verdict = EQUAL
    atomic: bool = True
    status: int | None = 201
    events: bool = True

    @property
    def application(self) -> tuple[Any, ...]:
        """What makes an application: cases that agree in it can share one."""
        return (self.setup, repr(self.engine_options), self.pool, self.atomic)


@dataclass(frozen=True)
class Step:
    """One request, and what was there after it."""

    label: str
    reply: Reply
    notes: tuple[str, ...]
    heard: Counter[str]
    rows: dict[str, list[str]]
    state: frozenset[str]


@dataclass
class Observation:
    """What one application did in one case; ``rows`` and ``state`` are those before the requests."""

    rows: dict[str, list[str]]
    state: frozenset[str]
    steps: list[Step] = field(default_factory=list)
    write: Reply = field(default_factory=lambda: Reply(None, ""))
    records: list[tuple[str, int | None]] = field(default_factory=list)


@dataclass
class Outcome:
    """A case in both applications."""

    case: Case
    plain: Observation
    protected: Observation

    @property
    def differences(self) -> list[str]:
        """What the protected application did otherwise, whatever the case expects."""
        found = differences(self.plain, self.protected)
        if self.case.events:
            found += unequal_events(self.plain, self.protected)
        if self.case.atomic:
            found += _lost_records(self.protected)
        return found

    @property
    def problems(self) -> list[str]:
        """Where this is not what the case expects; and where the case itself is not what it says."""
        reply = self.plain.steps[0].reply
        if self.case.status not in {None, reply.status}:
            return [f"the plain application answered {reply}: {reply.errors}"]
        return self.case.expect.problems(self)


def differences(plain: Observation, protected: Observation) -> list[str]:
    """What differs, in lines that say plain first and protected second."""
    found: list[str] = []

    def compare(what: str, here: Any, there: Any) -> None:
        if here != there:
            found.append(f"{what}: plain {here}, protected {there}")

    for one, other in zip(plain.steps, protected.steps, strict=True):
        label, reply, its_reply = one.label, one.reply, other.reply
        compare(label, str(reply), str(its_reply))
        compare(f"{label}, type", reply.content_type, its_reply.content_type)
        compare(f"{label}, replayed", reply.replayed, its_reply.replayed)
        compare(f"{label}, errors that left", reply.errors, its_reply.errors)
        compare(f"{label}, notes", *_unequal(one.notes, other.notes))
        for table in sorted(one.rows.keys() | other.rows.keys()):
            compare(f"{label}, rows of {table}", one.rows.get(table), other.rows.get(table))
        compare(f"{label}, left behind", *_only(one.state, other.state))
    compare("the next write", str(plain.write), str(protected.write))
    compare("the next write, errors", plain.write.errors, protected.write.errors)
    return found


def _unequal(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The notes of both without those that are the same in the same place."""
    if len(one) != len(other):
        return list(one), list(other)
    unequal = [pair for pair in zip(one, other, strict=True) if len(set(pair)) == 2]
    return [pair[0] for pair in unequal], [pair[1] for pair in unequal]


def _only(one: frozenset[str], other: frozenset[str]) -> tuple[list[str], list[str]]:
    """The lines that only one of them has.

    A transaction that only the plain one left open is no loss: SQLAlchemy leaves one where a listener
    raises in a commit.
    """
    plain = {line for line in one - other if not line.startswith("a transaction")}
    return sorted(plain), sorted(other - one)


def unequal_events(plain: Observation, protected: Observation) -> list[str]:
    """What listeners of the application's sessions heard otherwise.

    What the engine's hear is different by design: an operation commits once. Nor is compared what is
    heard in a replay, which ends what was read before it.
    """
    found = []
    for one, other in zip(plain.steps, protected.steps, strict=True):
        if one.reply.replayed:
            continue
        for name in ("after_commit", "after_rollback"):
            here, there = one.heard[name], other.heard[name]
            if here != there:
                found.append(f"{one.label}, {name} heard: plain {here}, protected {there}")
    return found


def _lost_records(protected: Observation) -> Iterator[str]:
    """A record for each answer that was replayed, and no more."""
    replayed = [step.reply.status for step in protected.steps if step.reply.replayed]
    finished = [status for state, status in protected.records if state == "completed"]
    if sorted(map(str, replayed)) != sorted(map(str, finished)):
        yield f"records: {protected.records}, and replayed were {replayed}"


class Family:
    """The cases of one subject. A view becomes one with a decorator; its name is the case's.

    ``options`` hold for all of them, unless a case says otherwise.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.cases: list[Case] = []

    def __call__(self, **options: Any) -> Callable[[View], View]:
        def add(view: View) -> View:
            self.add(view.__name__.replace("_", " "), view, **options)
            return view

        return add

    def add(self, name: str, view: View, **options: Any) -> None:
        """Make a case of a view that serves in several."""
        self.cases.append(Case(name, view, **{**self.options, **options}))

    def each(self) -> Any:
        """The parameter ``case`` of a test."""
        names = [case.name for case in self.cases]
        assert len(set(names)) == len(names), "two cases have one name"
        return pytest.mark.parametrize("case", self.cases, ids=names)


class Laboratory:
    """Runs cases. Keeps pairs of applications for the next case that can use them."""

    def __init__(self, databases: Databases) -> None:
        self._databases = databases
        self.driver = urls.driver
        """SQLAlchemy's name of the driver of all applications that are asked for from now on."""
        self._pairs: dict[Any, tuple[World, World]] = {}

    def run_pair(self, case: Case) -> Outcome:
        """The case in both applications, which then wait for the next case of their kind."""
        kind = (self.driver, *case.application)
        pair = self._pairs.pop(kind, None) or self._make(case)
        outcome = None
        try:
            outcome = Outcome(case, observe(pair[0], case), observe(pair[1], case))
        finally:
            if outcome is None or any(world.engine.pool.checkedout() for world in pair):
                self._discard(pair)  # who knows what is open
            else:
                for world, seen in zip(pair, (outcome.plain, outcome.protected), strict=True):
                    if seen.steps[-1].state != seen.state:
                        world.forget_connections()
                self._pairs[kind] = pair
                if len(self._pairs) > PAIRS_KEPT:
                    self._discard(self._pairs.pop(next(iter(self._pairs))))
        return outcome

    def close(self) -> None:
        while self._pairs:
            self._discard(self._pairs.popitem()[1])

    def _make(self, case: Case) -> tuple[World, World]:
        plain, protected = (
            World(self._databases.take(), self.driver, case, protected=protected)
            for protected in (False, True)
        )
        for world in (plain, protected):
            world.case = Case("warm up", lambda _: None)
            world.send("warm-up")
        return plain, protected

    def _discard(self, pair: tuple[World, World]) -> None:
        for world in pair:
            world.close()
            self._databases.give_back(world.url)


def observe(world: World, case: Case) -> Observation:
    """Run one case in one application."""
    world.begin(case)
    if world.first_state is None:
        world.first_state = world.state()
    seen = Observation(world.rows(), world.first_state)
    number = next(_cases)
    for key, label in ((1, "key 1"), (1, "key 1 again"), (2, "key 2"), (2, "key 2 again")):
        world.notes, world.heard = [], Counter()
        reply = world.send(f"case-{number}-{key}")
        heard, notes = world.heard, tuple(world.notes)
        state = seen.steps[-1].state if label in {"key 1 again", "key 2"} else world.state()
        seen.steps.append(Step(label, reply, notes, heard, world.rows(), state))
    seen.write = world.send("write", "/write")
    seen.records = world.records()
    return seen


_cases = itertools.count(1)
