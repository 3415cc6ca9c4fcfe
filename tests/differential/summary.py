"""What became of many programs: how many were equal, refused and by which name, or different."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator

from tests.differential.comparison import Twins, Verdict
from tests.differential.programs import (
    SESSIONS,
    Grammar,
    Program,
    kinds_never_executed,
    run_each,
    shrunk,
)

LEAST_EQUAL = 0.5
"""Fewer equal programs than this prove little."""

ENOUGH = 2000
"""So many programs execute every kind of step, also the rarest."""


class Summary:
    """Runs programs and keeps count."""

    def __init__(self, twins: Twins, grammar: Grammar = SESSIONS) -> None:
        self._twins, self._grammar = twins, grammar
        self.programs = self.equal = self.broken = 0
        self.seconds = 0.0
        self.refused: Counter[str] = Counter()
        self.different: dict[str, list[Program]] = {}
        """By what differs, programs for which it does."""
        self.executed: Counter[str] = Counter()
        self.executed_equal: Counter[str] = Counter()

    def run(self, count: int, seed: int) -> None:
        """Run ``count`` programs."""
        started = time.monotonic()
        run_each(count, seed, lambda each: self._add(self._twins.compare(each)), self._grammar)
        self.seconds += time.monotonic() - started

    def _add(self, verdict: Verdict) -> None:
        self.programs += 1
        self.executed += verdict.executed
        if verdict.plain.is_broken:
            self.broken += 1
        elif verdict.differences:
            self.different.setdefault(signature(verdict), []).append(verdict.program)
        elif verdict.refusal:
            self.refused[verdict.refusal] += 1
        else:
            self.equal += 1
            self.executed_equal += verdict.executed

    def shrunk(self, most: int) -> Iterator[Verdict]:
        """The smallest programs that still differ, one for each way to differ, the commonest first."""
        shown: set[Program] = set()
        for found in sorted(self.different.values(), key=len, reverse=True):
            if len(shown) == most:
                return
            smallest = shrunk(found[0], lambda program: bool(self._twins.compare(program).differences))
            if smallest not in shown:
                shown.add(smallest)
                yield self._twins.compare(smallest)

    @property
    def emptiness(self) -> list[str]:
        """Why the run proves too little."""
        found = []
        if self.equal < LEAST_EQUAL * self.programs:
            found.append(f"only {self.equal} of {self.programs} programs were equal")
        if self.programs >= ENOUGH:
            found += [
                f"never executed: {kind}" for kind in kinds_never_executed(self.executed, self._grammar)
            ]
        return found

    def __str__(self) -> str:
        different = sum(map(len, self.different.values()))
        rows = [
            ("programs", self.programs),
            ("equal", self.equal),
            ("refused by name", self.refused.total()),
            *((f"  {reason}"[:90], count) for reason, count in self.refused.most_common()),
            ("broken by themselves", self.broken),
            ("different", different),
            *((f"  {what}"[:90], len(each)) for what, each in self.different.items()),
            ("seconds", round(self.seconds, 1)),
        ]
        return "\n".join(f"{what:92}{count:>8}" for what, count in rows)

    def by_kind(self) -> str:
        """How often each kind of step was executed, and in equal programs."""
        rows = [f"{'step':50}{'executed':>10}{'in equal ones':>15}"]
        rows += [
            f"{kind:50}{count:>10}{self.executed_equal[kind]:>15}"
            for kind, count in sorted(self.executed.items())
        ]
        return "\n".join(rows)


def signature(verdict: Verdict) -> str:
    """What differs, without what is different from program to program."""
    return re.sub(r"\[\[.*?\]\]|\d+", "…", verdict.differences[0])
