"""``make scale``: put the shop through the faults of many machines, and judge every key.

Each row runs alone, for as many rounds as asked. Exit status 1 if a number that should be zero is not.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import servers
from flask_idempotency.client import IdempotentSession
from scale.judge import Verdict, Window, judge
from scale.load import Answer, Load
from scale.programs import missing
from scale.rows import ROWS, Row
from scale.topology import shop

CALM_SECONDS = 5.0  # before the first fault, and between two
FOLDER = Path("build/scale")
HEADINGS = (
    "topology",
    "fault",
    "rounds",
    "operations",
    "doubled",
    "lost",
    "two responses",
    "stuck",
    "rows without their record",
    "given up",
    "longest call, s",
    "nobody served, s",
    "before / during / after, ms",
)


def run(row: Row, fault: str, rounds: int) -> Verdict:
    """Put a row through a fault, so often."""
    with row.open() as servers_of_it, shop(servers_of_it) as topology:
        windows = []
        with Load(topology.urls) as load:
            for _ in range(rounds):
                time.sleep(CALM_SECONDS)
                began = time.monotonic()
                topology.faults[fault]()
                windows.append(Window(began, time.monotonic()))
            time.sleep(CALM_SECONDS)
        answers, books = list(load.answers), topology.books()
        counts = topology.counts()
        audited = audit(load)
        verdict = judge(answers, books, audited, topology.books(), windows)
        return replace(verdict, counts=counts)


def audit(load: Load) -> list[Answer]:
    """Send every payment once more."""
    keys = list({answer.key for answer in load.answers})
    with IdempotentSession() as session, ThreadPoolExecutor(load.clients) as pool:
        return list(pool.map(lambda key: load.pay(session, key), keys))


def line(row: Row, fault: str, rounds: int, verdict: Verdict) -> str:
    cells: Sequence[object] = (
        row.told,
        fault,
        rounds,
        verdict.operations,
        len(verdict.doubled),
        len(verdict.lost),
        len(verdict.two_responses),
        len(verdict.stuck),
        verdict.torn,
        verdict.gave_up,
        f"{verdict.longest:.1f}",
        f"{verdict.blocked:.1f}",
        " / ".join(f"{each * 1000:.0f}" for each in (verdict.before, verdict.during, verdict.after)),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scale", description=__doc__)
    names = {row.name: row for row in ROWS}
    parser.add_argument("--rows", nargs="*", choices=names, default=list(names), metavar="ROW")
    parser.add_argument("--faults", nargs="*", default=[], metavar="FAULT", help="words of their names")
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    rows = [names[name] for name in given.rows]
    if packages := missing(name for row in rows for name in row.programs):
        print("Install what is missing: apt-get install", *packages, file=sys.stderr)
        return 1
    logging.disable(logging.ERROR)  # of the clients, whose retries are counted
    print("| " + " | ".join(HEADINGS) + " |", "|---" * len(HEADINGS) + "|", sep="\n", flush=True)
    clean = True
    for row in rows:
        for fault in row.faults:
            if given.faults and not any(word in fault for word in given.faults):
                continue
            verdict = run(row, fault, given.rounds)
            clean = clean and verdict.is_clean
            print(line(row, fault, given.rounds, verdict), flush=True)
            if verdict.counts:
                print(*(f"{what}: {count}" for what, count in verdict.counts.items()), file=sys.stderr)
            FOLDER.mkdir(parents=True, exist_ok=True)
            name = f"{row.name} {fault}.json".replace(" ", "-").replace(",", "")
            (FOLDER / name).write_text(json.dumps(asdict(verdict)))
    return 0 if clean else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # all servers end with their blocks
    try:
        sys.exit(main())
    except servers.Unavailable as error:
        print(error, file=sys.stderr)
        sys.exit(1)
