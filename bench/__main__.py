"""Measure what the protection costs, on throwaway servers, and hold it against the budgets.

Prints a Markdown table, and writes it to bench.md and, with all figures, to bench.json.

calls and trips are counted: they are the same on every machine and under any load. time and network are
ratios to the unprotected view in an application without the extension, measured in turns with it; time
that was spent waiting for a processor is taken off. Each commit reaches the disk, as in production; a
figure beside it leaves that out (fsync is off). On a network each round trip takes 0.5 or 2 ms longer.
bytes is what a record takes in the database, footprint what the package adds to a worker.
A ratio has its 95 % interval; a budget inside that is "unclear": take more rounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import servers.urls

from . import capacity, growth, operate, report, stores, workers
from .budgets import BASE
from .clients import run as clients
from .peers import run as peers
from .peers.table import PACKAGES
from .run import Run

MEASUREMENTS = ("calls", "trips", "time", "network", "bytes", "footprint")


def main() -> None:
    """Do what the arguments ask for."""
    given = _arguments()
    servers.urls.driver = given.driver
    if given.stores:
        print(stores.compare(given.rounds))
    elif given.capacity:
        taken, size = capacity.measure()
        data = {name: vars(each) for name, each in taken.items()}
        report.write_both(given.folder, "capacity", capacity.table(taken), data)
        report.write_both(given.folder, "plan", capacity.plan(taken["first, hybrid"], size), size)
        print(capacity.table(taken), capacity.plan(taken["first, hybrid"], size), sep="\n\n")
    elif given.workers is not None:
        plan = workers.Plan(given.workers or workers.PARTS, given.turns, given.seconds)
        print(workers.measure(plan, given.folder))
    elif given.growth is not None:
        print(growth.measure(given.growth or growth.SIZES, given.rounds, given.folder))
    elif given.operate is not None:
        print(operate.measure(given.operate or operate.SIZES, given.folder))
    elif given.peers is not None:
        print(peers.compare(given.peers, given.rounds, given.folder))
    elif given.clients is not None:
        print(clients.compare(given.clients, given.folder))
    elif given.plots:
        from .plots import draw  # its package is only needed here

        print(*draw(given.folder), sep="\n")
    else:
        _budgets(given)


def _budgets(given: argparse.Namespace) -> None:
    settings = {"autovacuum": "off"}  # it would strike at random
    with (
        servers.Postgres(settings=settings) as postgres,
        servers.Postgres(fsync=False, settings=settings) as hasty,
        servers.Redis() as redis,
    ):
        run = Run(postgres, hasty, redis)
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
    add, paths = parser.add_argument, "; ".join(BASE)
    add("--only", nargs="+", choices=MEASUREMENTS, metavar="WHAT", help=", ".join(MEASUREMENTS))
    add("--rounds", type=int, default=1000, help="rounds of each time (1000); a tenth on a network")
    add("--folder", type=Path, default=Path("build"), help="where the files are written (build)")
    add("--driver", choices=["psycopg2", "psycopg"], default="psycopg2", help="of the applications")
    add("--places", choices=BASE, metavar="PATH", help=f"only list where a path's calls go: {paths}")
    add("--stores", action="store_true", help="only compare the stores with each other")
    add("--capacity", action="store_true", help="only measure what a request takes of each server")
    parts = ", ".join(workers.PARTS)
    add(
        "--workers",
        nargs="*",
        choices=workers.PARTS,
        metavar="PART",
        help=f"only measure under gunicorn: {parts}; all of them take about"
        f" {workers.Plan().minutes:.0f} minutes",
    )
    add("--turns", type=int, default=workers.Plan.turns, help="turns under gunicorn (5)")
    add("--seconds", type=float, default=workers.Plan.seconds, help="seconds of a step there (1)")
    sizes = " ".join(map(str, growth.SIZES))
    add("--growth", nargs="*", type=int, metavar="RECORDS", help="only measure tables of so many"
        f" records ({sizes}), the purge, and how large a table stays")  # fmt: skip
    sizes = " ".join(map(str, operate.SIZES))
    add("--operate", nargs="*", type=int, metavar="RECORDS", help="only run every command on tables of"
        f" so many records ({sizes}), with interrupted operations and a dead Redis")  # fmt: skip
    names = ", ".join(PACKAGES)
    add("--peers", nargs="*", choices=PACKAGES, metavar="PACKAGE", help=f"only compare with {names}")
    names = ", ".join(clients.CLIENTS)
    add("--clients", nargs="*", choices=clients.CLIENTS, metavar="CLIENT", help="only compare how"
        f" clients retry, ours and others, in six minutes: {names}")  # fmt: skip
    add("--plots", action="store_true", help="only draw what lies in the folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
