"""``python -m tests.faults``: crash workers and servers for a while, and check every guarantee.

With ``--controls`` the same is done to designs and mutants that break the guarantees: each must be
caught, or the checks are worth nothing. With ``--explore`` nothing is left to chance: two and three
attempts at one operation go through every order of their steps and faults (``tests/faults/explore``),
with ``--explore --controls`` mutants do. Exit status 1 if a number that should be zero is not, if the
run was too empty to prove anything, or if a control got through.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import servers.urls
import tests.sessions
from tests.faults import controls
from tests.faults.checker import Limits, Quota, Violation, emptiness, violations
from tests.faults.explore.bounds import BOUNDS, MUTANTS, Explorer, mutated
from tests.faults.machines import Machines, Plan
from tests.faults.report import summary, table
from tests.faults.soak import LONGEST_VIEW_SECONDS, run

LIMITS = Limits(LONGEST_VIEW_SECONDS)


def quota(plan: Plan) -> Quota:
    """What a run of this length must have seen; about a third of what a quiet machine manages."""
    points, faults = int(plan.seconds / 12), int(plan.seconds / 25)
    return Quota(dict.fromkeys(plan.points, points or 1), dict.fromkeys(plan.faults, faults or 1))


def soak(plan: Plan) -> bool:
    """One run of a design that keeps its guarantees; whether it did."""
    folder = Path(tempfile.mkdtemp(prefix="journal-"))
    journal = folder / "journal.jsonl"
    with Machines() as machines:
        history, truth = run(plan, journal, machines, quota(plan))
    found = violations(history, truth, LIMITS)
    empty = emptiness(history, quota(plan))
    print(table(plan, history, found), summary(plan, history, found), sep="\n\n")
    for violation in found[:20]:
        print(f"VIOLATED {violation.name}: {violation.rule}")
    for reason in empty:
        print(f"TOO EMPTY {reason}")
    if found or empty:
        print(f"The journal of the run is {journal}")
    else:
        shutil.rmtree(folder)
    return not (found or empty)


def explain(found: list[Violation]) -> str:
    """Which rules were broken, most often first."""
    rules = Counter(violation.rule for violation in found)
    return ", ".join(f"{count} × {rule}" for rule, count in rules.most_common(3)) or "NOT CAUGHT"


def negative(seed: int, seconds: float, only: str | None) -> bool:
    """Run each control with the faults that suit it; whether all were caught."""
    caught, width = [], max(map(len, controls.CONTROLS))
    with Machines() as machines:
        for name in [only] if only else controls.CONTROLS:
            found = controls.caught(name, seed, seconds, machines)
            caught.append(bool(found))
            print(f"{name:{width}}  {explain(found)}", flush=True)
    print(f"\n{sum(caught)} of {len(caught)} controls caught, seed {seed}")
    return all(caught)


def explore() -> bool:
    """Every schedule of each bound; whether all of them kept every guarantee."""
    width, total = max(map(len, BOUNDS)), Counter[str]()
    row = f"{{:{width}}}  {{:>9}}  {{:>9}}  {{:>7}}  {{:>8}}  {{:>10}}  {{:>7}}"
    print(row.format("bound", "schedules", "exhausted", "deepest", "outcomes", "violations", "seconds"))
    with servers.postgres(fsync=False) as postgres, servers.redis() as redis_server:
        explorer = Explorer(postgres, redis_server)
        for name, bound in BOUNDS.items():
            found = explorer.run(bound)
            exhausted = "no" if not found.exhausted else f"to {bound.depth}" if bound.depth else "yes"
            numbers = found.schedules, exhausted, found.deepest, len(found.outcomes)
            print(row.format(name, *numbers, len(found.violations), f"{found.seconds:.1f}"), flush=True)
            for violation in found.violations:
                print(f"VIOLATED {violation}")
            total.update(schedules=found.schedules, violations=len(found.violations))
    print(f"\n{total['schedules']} schedules, {total['violations']} violations")
    return not total["violations"]


def explore_mutants() -> bool:
    """Explore each mutant until it is caught; whether all were."""
    caught, width = [], max(map(len, MUTANTS))
    with servers.postgres(fsync=False) as postgres, servers.redis() as redis_server:
        explorer = Explorer(postgres, redis_server)
        for name, (apply, bound) in MUTANTS.items():
            with mutated(apply):
                found = explorer.run(bound)
            caught.append(bool(found.violations))
            how = found.violations[0] if found.violations else "NOT CAUGHT"
            print(f"{name:{width}}  schedule {found.schedules}: {how}", flush=True)
    print(f"\n{sum(caught)} of {len(caught)} mutants caught")
    return all(caught)


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seconds", type=float, help="of one run; 60, or 10 for each control")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--design", choices=["ours", *controls.CONTROLS], default="ours")
    parser.add_argument("--controls", action="store_true", help="run what must be caught")
    parser.add_argument("--explore", action="store_true", help="run every order of a few requests")
    parser.add_argument("--driver", choices=["psycopg2", "psycopg"], default="psycopg2")
    parser.add_argument(
        "--sessions",
        choices=tests.sessions.KINDS,
        default=tests.sessions.usual,
        help="not of --explore, which has none",
    )
    given = parser.parse_args()
    servers.urls.driver, tests.sessions.usual = given.driver, given.sessions
    if given.explore:
        return 0 if (explore_mutants() if given.controls else explore()) else 1
    if given.controls or given.design != "ours":
        only = None if given.design == "ours" else given.design
        return 0 if negative(given.seed, given.seconds or 10, only) else 1
    wait = 0.3 if given.seed % 2 else 0.0  # so that both ways of a duplicate are met, run by run
    plan = Plan(given.seconds or 60, given.seed, given.workers, given.clients, wait=wait)
    return 0 if soak(plan) else 1


if __name__ == "__main__":
    sys.exit(main())
