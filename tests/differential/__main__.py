"""``python -m tests.differential``: many random programs, plain and protected, side by side.

Exit status 1 if one was neither equal nor refused by name with nothing committed, or if the run was
too empty to prove anything.
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator

import servers
import tests.sessions
from tests.databases import Databases
from tests.differential.comparison import Twins, Verdict
from tests.differential.grammar import shrunk


class Summary:
    """Runs programs and keeps count: how many were equal, refused and by which name, or different."""

    def __init__(self, twins: Twins) -> None:
        self._twins = twins
        self.different: dict[str, Verdict] = {}
        """By what differs, the first program for which it does."""
        self.counted: Counter[str] = Counter()
        self.executed: Counter[str] = Counter()
        self.seconds = 0.0

    def run(self, count: int, seed: int) -> None:
        """Run ``count`` programs; the same seed makes the same ones."""
        chance = random.Random(seed)  # noqa: S311
        started = time.monotonic()
        for _ in range(count):
            self._add(self._twins.compare(self._twins.grammar.program(chance)))
        self.seconds += time.monotonic() - started

    def _add(self, verdict: Verdict) -> None:
        self.executed += verdict.plain.first.run.executed
        if verdict.plain.is_broken:
            became = "broken by themselves"
        elif verdict.differences:
            what = re.sub(r"\[\[.*?\]\]|\d+", "…", verdict.differences[0])
            self.different.setdefault(what, verdict)
            became = f"different: {what}"
        elif verdict.refusal:
            became = f"refused: {verdict.refusal}"
        else:
            became = "equal"
        self.counted[became] += 1

    def shrunk(self, most: int) -> Iterator[Verdict]:
        """The smallest programs that still differ, one for each way to differ."""
        compare = self._twins.compare
        for verdict in [*self.different.values()][:most]:
            yield compare(shrunk(verdict.program, lambda each: bool(compare(each).differences)))

    @property
    def emptiness(self) -> list[str]:
        """Why the run proves too little."""
        found, equal = [], self.counted["equal"]
        if equal < 0.4 * self.counted.total():
            found.append(f"only {equal} of {self.counted.total()} programs were equal")
        if self.counted.total() >= 2000:  # so many execute also the rarest kinds of steps
            kinds = sorted(self._twins.grammar.kinds - self.executed.keys())
            found += [f"never executed: {kind}" for kind in kinds]
        return found

    def __str__(self) -> str:
        rows = [
            ("programs", self.counted.total()),
            *self.counted.most_common(),
            ("seconds", round(self.seconds, 1)),
        ]
        return "\n".join(f"{what[:90]:92}{count:>8}" for what, count in rows)


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--driver", choices=["psycopg2", "psycopg"], default="psycopg2")
    parser.add_argument("--sessions", choices=tests.sessions.KINDS, default=tests.sessions.usual)
    parser.add_argument("--shown", type=int, default=10, help="differences to shrink and show")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    tests.sessions.usual = given.sessions
    passed = True
    with servers.postgres(fsync=False) as postgres, servers.redis() as redis:
        databases = Databases(postgres)
        stores = {"postgres": {}, "hybrid": {"redis_url": redis.url, "hidden": True}}
        for seed, (store, options) in enumerate(stores.items(), given.seed):
            twins = Twins(databases, given.driver, **options)
            summary = Summary(twins)
            summary.run(given.programs // 2, seed)
            print(f"store {store}, seed {seed}", summary, "", sep="\n", flush=True)
            for verdict in summary.shrunk(given.shown):
                print("DIFFERENT", verdict, "", flush=True)
            for reason in summary.emptiness:
                print("TOO EMPTY", reason)
            passed &= not summary.different and not summary.emptiness
            twins.close()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
