"""``python -m tests.differential``: many random programs, plain and protected, side by side.

Exit status 1 if one was neither equal nor refused by name with nothing committed, or if the run was
too empty to prove anything.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

import servers
import tests.sessions
from tests.databases import Databases
from tests.differential.chance import programs
from tests.differential.comparison import Twins
from tests.differential.steps import Program


def run(twins: Twins, count: int, seed: int) -> Counter[str]:
    """Run ``count`` programs, the same ones for a seed; how many were equal, and refused by which name.

    Raises ``AssertionError`` for the smallest one that differs, or if they prove too little.
    """
    counted: Counter[str] = Counter()
    executed: Counter[str] = Counter()

    @seeded(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[*HealthCheck],
    )
    @given(programs(twins.rows))
    def compare(program: Program) -> None:
        verdict = twins.compare(program)
        assert not verdict.differences, str(verdict)
        executed.update(verdict.plain.first.run.executed)
        refused = f"refused: {verdict.refusal}" if verdict.refusal else "equal"
        counted["broken by themselves" if verdict.plain.is_broken else refused] += 1

    compare()
    assert counted["equal"] >= 0.4 * counted.total(), counted
    if count >= 2000:  # so many execute also the rarest kinds of steps
        never = {row.kind for row in twins.rows if row.family} - executed.keys()
        assert not never, f"never executed: {never}"
    return counted


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--driver", choices=["psycopg2", "psycopg"], default="psycopg2")
    parser.add_argument("--sessions", choices=tests.sessions.KINDS, default=tests.sessions.usual)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    tests.sessions.usual = given.sessions
    failed = False
    with servers.postgres(fsync=False) as postgres, servers.redis() as redis:
        stores: dict[str, Any] = {"postgres": {}, "hybrid": {"redis_url": redis.url, "hidden": True}}
        for seed, (store, options) in enumerate(stores.items(), given.seed):
            twins = Twins(Databases(postgres), given.driver, **options)
            started = time.monotonic()
            try:
                counted = run(twins, given.programs // 2, seed)
            except AssertionError as error:
                failed = True
                print(f"store {store}, seed {seed}", error, sep="\n", flush=True)
            else:
                print(f"store {store}, seed {seed}, {time.monotonic() - started:.0f} seconds")
                for what, number in counted.most_common():
                    print(f"{what[:90]:92}{number:>8}", flush=True)
            twins.close()
    return failed


if __name__ == "__main__":
    sys.exit(main())
