"""Every order of what concurrent threads do, one schedule after the other.

An :class:`Actor` is a thread that stops before each step that others could notice, and is let go for
one step at a time. :func:`explore` runs a schedule to its end, goes back to the last place where it
could have gone on differently, and replays up to there: depth first, until nothing is left.

Two neighbouring steps that cannot notice each other (:func:`independent`) need only one order: of all
schedules that differ in nothing else, one is run ("sleep sets", Godefroid 1996, chapter 5).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Any

GLANCE_SECONDS = 0.002
"""How long a step may take before the server is asked whether it waits for a lock."""

PATIENCE_SECONDS = 30


class Kind(Enum):
    """What a step touches, and so which others can notice it."""

    REDIS = "redis"
    UNNOTICED = "nothing that anybody else sees or waits for"
    LOOK = "reads what is committed"
    CHANGE = "locks, or changes what is not committed yet"
    COMMIT = "changes what everybody sees"


_BLIND = ({Kind.LOOK}, {Kind.LOOK, Kind.CHANGE})


@dataclass(frozen=True, slots=True)
class Choice:
    """One thing that may happen next. ``how`` says that the step goes wrong, and in which way."""

    actor: str
    step: str
    kind: Kind
    how: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (f"{self.actor}:{self.step}", self.how)))


def independent(one: Choice, other: Choice) -> bool:
    """Whether the order of two choices makes no difference, to them and to anybody else."""
    kinds = {one.kind, other.kind}
    if one.actor == other.actor or (one.how and other.how):
        return False  # (faults share a budget)
    if Kind.UNNOTICED in kinds:
        return True
    return kinds != {Kind.REDIS} if Kind.REDIS in kinds else kinds in _BLIND


class Violation(Exception):
    """A schedule broke a guarantee."""


class Stop(BaseException):
    """Ends an actor's thread from inside: its process is dead."""


class Actor:
    """A thread that stops before each of its steps."""

    here = threading.local()

    def __init__(self, name: str, body: Callable[[], Any], arrivals: SimpleQueue[Actor]) -> None:
        self.name, self._body, self._arrivals = name, body, arrivals
        self.pending: Choice | None = None
        self.begun = self.over = self.parked = self.blocked = self.dead = self.crashed = False
        self.backend: int | None = None
        self.holds = False  # whether its transaction has changed or locked anything
        self.claimed = False  # whether it has ever changed a record into its own
        self.acted = False  # whether its last step made a difference to others
        self.result: Any = None
        self._orders: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._main, daemon=True).start()

    @classmethod
    def current(cls) -> Actor | None:
        """The actor whose thread this is."""
        return getattr(cls.here, "actor", None)

    def _main(self) -> None:
        Actor.here.actor = self
        try:
            self.result = self._body()
        except Stop:
            pass
        except BaseException as error:
            self.result = error
        self.pending, self.over = None, True
        self._arrivals.put(self)

    def stop_before(self, step: str, kind: Kind) -> str:
        """Called by the thread itself: wait to be let go. Says in which way the step is to go wrong."""
        if not self.dead:
            self.pending = Choice(self.name, step, kind)
            self._arrivals.put(self)
            how = self._orders.get()
        if self.dead:
            raise Stop
        return how

    def go(self, how: str = "") -> None:
        """Let the thread do its next step."""
        self.begun, self.parked = True, False
        self._orders.put(how)

    def die(self) -> None:
        """End the thread where it stands; nothing it does from now on reaches anybody."""
        self.dead, self.parked = True, False
        self._orders.put("")


class Stage:
    """The actors of one schedule."""

    def __init__(self, is_waiting: Callable[[int], bool] = lambda backend: False) -> None:
        self.actors: list[Actor] = []
        self._arrivals: SimpleQueue[Actor] = SimpleQueue()
        self._is_waiting = is_waiting

    def add(self, name: str, body: Callable[[], Any]) -> Actor:
        """Start a thread; returns when it stands before its first step."""
        actor = Actor(name, body, self._arrivals)
        self.actors.append(actor)
        self.settle(actor)
        return actor

    def __getitem__(self, name: str) -> Actor:
        return next(actor for actor in self.actors if actor.name == name)

    def settle(self, actor: Actor, *, may_wait: bool = True) -> None:
        """Wait until an actor stands before its next step, is over, or (if it may) waits for a lock."""
        end = time.monotonic() + PATIENCE_SECONDS
        if actor.blocked and self._waits(actor):
            return
        while not actor.parked:
            try:
                arrived = self._arrivals.get(timeout=GLANCE_SECONDS)
                arrived.parked, arrived.blocked = True, False
            except Empty:
                if may_wait and self._waits(actor):
                    actor.blocked = True
                    return
                if time.monotonic() > end:
                    raise Violation(f"{actor.name} hangs before {actor.pending}") from None

    def _waits(self, actor: Actor) -> bool:
        return actor.backend is not None and self._is_waiting(actor.backend)

    def dismiss(self) -> None:
        """End every thread; those who wait for a lock last."""
        for actor in self.actors:
            actor.dead = True
        for actor in sorted(self.actors, key=lambda actor: actor.blocked):
            if not actor.over:
                actor.die()
                self.settle(actor)


@dataclass
class Report:
    """What :func:`explore` found."""

    schedules: int = 0
    seconds: float = 0.0
    exhausted: bool = False
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


@dataclass
class _Fork:
    """A place where a schedule could go on in several ways; ``todo[0]`` is tried, ``asleep`` was."""

    todo: list[Choice]
    asleep: set[Choice]


def explore(
    start: Callable[[], Any],
    *,
    depth: int | None = None,
    limit: int | None = None,
) -> Report:
    """Run every schedule until one breaks a guarantee: what ``start`` gives has four methods.

    ``choices`` is what may happen next, empty at the end. ``do`` lets one happen, and gives what could
    have happened in its place, as far as it shows only now. ``check`` says at the end how it came out,
    or raises :class:`Violation`. ``dismiss`` leaves nothing behind.

    Beyond the first ``depth`` choices of a schedule only one way is tried, and after ``limit``
    schedules nothing more.
    """
    report, path, began = Report(), list[_Fork](), time.monotonic()
    while limit is None or report.schedules < limit:
        schedule, taken = start(), list[Choice]()
        try:
            if _run(schedule, path, taken, depth):
                report.schedules += 1
                report.outcomes[schedule.check()] += 1
        except Violation as violation:
            report.violations.append(f"{violation}; after " + ", ".join(map(str, taken)))
        finally:
            schedule.dismiss()
        while path and len(path[-1].todo) <= 1:
            path.pop()
        if not path or report.violations:
            break
        path[-1].asleep.add(path[-1].todo.pop(0))
    report.exhausted = not path
    report.seconds = time.monotonic() - began
    return report


def _run(schedule: Any, path: list[_Fork], taken: list[Choice], depth: int | None) -> bool:
    """Go along ``path``, then on to the end. False: another schedule stands for this one."""
    while choices := schedule.choices():
        free = depth is None or len(taken) < depth
        if len(taken) == len(path):
            last = path[-1].asleep if path and free else set[Choice]()
            # Not what a schedule has had earlier that differs in nothing else.
            asleep = {each for each in last if independent(each, taken[-1])}
            todo = [choice for choice in choices if choice not in asleep]
            path.append(_Fork(todo if free else todo[:1], asleep))
        fork = path[len(taken)]
        if not fork.todo:
            return False
        choice = fork.todo[0]
        if all((choice.actor, choice.step) != (each.actor, each.step) for each in choices):
            raise Violation(f"not repeatable: {choice} is not among {[*map(str, choices)]}")
        taken.append(choice)
        others = schedule.do(choice)
        if free:
            fork.todo += [each for each in others if each not in fork.asleep | {*fork.todo}]
    return True
