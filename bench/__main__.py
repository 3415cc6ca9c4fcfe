"""Measure what the protection costs, on throwaway servers, and hold it against the budgets.

Prints a Markdown table, and writes it to bench.md and, with all figures, to bench.json.

calls and trips are counted: they are the same on every machine and under any load. time and network are
ratios to the unprotected view in an application without the extension, measured in turns with it, so
that a busy machine slows both; on a network each round trip takes 0.5 or 2 ms longer.
bytes is what a record takes in the database.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import servers

from . import report, stores
from .budgets import BASE
from .run import STORES, Run

MEASUREMENTS = ("calls", "trips", "time", "network", "bytes")


def main() -> None:
    """Do what the arguments ask for."""
    given = _arguments()
    if given.stores:
        print(stores.compare(given.rounds))
        return
    with servers.Postgres(settings={"autovacuum": "off"}) as postgres, servers.Redis() as redis:
        run = Run({name: postgres.database(name) for name in STORES}, redis.url)
        if given.places:
            print(run.places(given.places))
            return
        for name in given.only or MEASUREMENTS:
            getattr(run, name)(given.rounds)
    print(report.markdown(run.figures, run.notes))
    report.write(given.folder, run.figures, run.notes)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=MEASUREMENTS, metavar="WHAT", help=", ".join(MEASUREMENTS))
    add("--rounds", type=int, default=1000, help="rounds of each time (1000); a tenth on a network")
    add("--folder", type=Path, default=Path("build"), help="where the files are written (build)")
    add("--places", choices=BASE, metavar="PATH", help=f"only list where a path's calls go: {_paths()}")
    add("--stores", action="store_true", help="only compare the stores with each other")
    return parser.parse_args()


def _paths() -> str:
    return "; ".join(BASE)


if __name__ == "__main__":
    main()
