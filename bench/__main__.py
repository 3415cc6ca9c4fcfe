"""Measure what the protection costs, on throwaway servers, and hold it against the budgets.

Prints a Markdown table, and writes it to bench.md and, with all figures, to bench.json.

calls and trips are counted: they are the same on every machine and under any load. time and network are
ratios to the unprotected view in an application without the extension, measured in turns with it; time
that was spent waiting for a processor is taken off. Each commit reaches the disk, as in production; a
figure beside it leaves that out (fsync is off). On a network each round trip takes 0.5 or 2 ms longer.
server is the processor time of PostgreSQL's own processes. throughput is under gunicorn, with eight
clients. bytes is what a record takes in the database, footprint what the package adds to a worker.
A ratio has its 95 % interval; a budget inside that is "unclear": take more rounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import servers.urls

from . import growth, report
from .budgets import BASE
from .peers import run as peers
from .peers.table import PACKAGES
from .run import Run

MEASUREMENTS = ("calls", "trips", "time", "server", "network", "throughput", "bytes", "footprint")


def main() -> None:
    """Do what the arguments ask for."""
    given = _arguments()
    servers.urls.driver = given.driver
    if given.growth is not None:
        print(growth.measure(given.growth or growth.SIZES, given.rounds, given.folder))
    elif given.peers is not None:
        print(peers.compare(given.peers, given.rounds, given.folder))
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
    sizes = " ".join(map(str, growth.SIZES))
    add("--growth", nargs="*", type=int, metavar="RECORDS", help="only measure tables of so many"
        f" records ({sizes}), and the purge")  # fmt: skip
    names = ", ".join(PACKAGES)
    add("--peers", nargs="*", choices=PACKAGES, metavar="PACKAGE", help=f"only compare with {names}")
    return parser.parse_args()


if __name__ == "__main__":
    main()
