"""``python -m tests.faults``: crash workers and servers for a while, and check every guarantee.

With ``--explore`` nothing is left to chance: two and three attempts at one operation go through every
order of their steps and faults. With ``--controls`` either is done to mutants of the package, and each
must be caught. Exit status 1 if a number that should be zero is not, if the run was too empty to prove
anything, or if a mutant got through.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import servers.urls
import tests.sessions
from tests.faults.checker import Violation, emptiness, violations
from tests.faults.explore.world import BOUNDS, explore_bound
from tests.faults.history import History, by_name
from tests.faults.mutants import MUTANTS
from tests.faults.soak import LONGEST_VIEW_SECONDS, Machines, Plan, run


def report(plan: Plan, history: History, found: list[Violation], empty: list[str]) -> str:
    """What was tried, and which rules were broken."""
    tried = Counter([each.point for each in history.deaths] + [each.kind for each in history.faults])
    statuses = Counter(str(request.status) for request in history.requests)
    lines = [f"{what:30}{tried[what]:>6}" for what in (*plan.points, *plan.faults)]
    lines += [
        f"{servers.urls.driver}, {tests.sessions.usual}, seed {plan.seed}, {plan.seconds:g} s",
        f"{len(history.requests)} requests for {len(by_name(history.requests))} keys",
        f"answers: {', '.join(f'{status}: {n}' for status, n in sorted(statuses.items()))}",
        *(f"VIOLATED {violation.name}: {violation.rule}" for violation in found[:20]),
        *(f"TOO EMPTY {reason}" for reason in empty),
        f"{len(found)} violations",
    ]
    return "\n".join(lines)


def soak(seconds: float, seed: int) -> bool:
    """One run of the package; whether it kept its guarantees."""
    plan = Plan(seconds, seed, wait=0.3 if seed % 2 else 0.0)  # both ways of a duplicate, run by run
    # About a third of what a quiet machine manages.
    quota = plan.quota(int(seconds / 12) or 1, int(seconds / 25) or 1)
    journal = Path(tempfile.mkdtemp(prefix="journal-"), "journal.jsonl")
    with Machines() as machines:
        history, truth = run(plan, journal, machines, quota)
    found, empty = violations(history, truth, LONGEST_VIEW_SECONDS), emptiness(history, quota)
    print(report(plan, history, found, empty), f"The journal of the run is {journal}", sep="\n")
    return not (found or empty)


def caught(name: str, seed: int, seconds: float, machines: Machines) -> list[Violation]:
    """The guarantees that a mutant broke, as far as the checker has seen. A mere error is none."""
    quiet = Plan(seconds, seed, name, faults=(), points=(), kill_share=0.0, pause_seconds=0.3)
    with tempfile.TemporaryDirectory(prefix="journal-") as folder:
        plan = replace(quiet, **(MUTANTS[name].soak or {}))
        history, truth = run(plan, Path(folder, "journal.jsonl"), machines)
    found = violations(history, truth, LONGEST_VIEW_SECONDS)
    return [violation for violation in found if not violation.rule.startswith("an error")]


def soak_mutants(seconds: float, seed: int) -> bool:
    """Run each mutant with the faults that suit it; whether all were caught."""
    missed = []
    with Machines() as machines:
        for name in [name for name, mutant in MUTANTS.items() if mutant.soak is not None]:
            rules = Counter(violation.rule for violation in caught(name, seed, seconds, machines))
            how = ", ".join(f"{count} × {rule}" for rule, count in rules.most_common(3))
            print(f"{name:30}{how or 'NOT CAUGHT'}", flush=True)
            missed += [] if rules else [name]
    return not missed


def explore(*, controls: bool) -> bool:
    """Every schedule of each bound must keep every guarantee, and each mutant break one."""
    total: Counter[str] = Counter()
    mutants = {name: mutant for name, mutant in MUTANTS.items() if mutant.bound}
    with servers.postgres(fsync=False) as postgres, servers.redis() as redis_server:
        for name in mutants if controls else BOUNDS:
            with mutants[name].apply() if controls else nullcontext():
                bound = mutants[name].bound if controls else BOUNDS[name]
                found = explore_bound(bound, postgres, redis_server)
            print(f"{name:34}{found.schedules:>6} schedules, {found.seconds:.1f} s", flush=True)
            print(*(f"VIOLATED {violation}\n" for violation in found.violations), sep="", end="")
            total.update(schedules=found.schedules, runs=1, violated=bool(found.violations))
    print(f"\n{total['schedules']} schedules, {total['violated']} of {total['runs']} violated")
    return total["violated"] == (total["runs"] if controls else 0)


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seconds", type=float, help="of one run; 60, or 10 for each mutant")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--controls", action="store_true", help="run what must be caught")
    parser.add_argument("--explore", action="store_true", help="run every order of a few requests")
    parser.add_argument("--driver", choices=["psycopg2", "psycopg"], default="psycopg2")
    parser.add_argument("--sessions", choices=tests.sessions.KINDS, default=tests.sessions.usual)
    given = parser.parse_args()
    servers.urls.driver, tests.sessions.usual = given.driver, given.sessions
    if given.explore:
        passed = explore(controls=given.controls)
    elif given.controls:
        passed = soak_mutants(given.seconds or 10, given.seed)
    else:
        passed = soak(given.seconds or 60, given.seed)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
