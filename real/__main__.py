"""Run the test suites of other packages in five modes, on throwaway servers, and compare test by test.

It downloads each package's source distribution into build/real, and installs it into an environment
of its own. What a suite printed in a mode is there, too. Figures: bench/figures/works-with.md.

Exit status 1 if a replay was not equal, if a run gave no result, or if there was nothing to compare.
Tests whose results differ are listed: look at each.
"""

from __future__ import annotations

import argparse
import sys
from datetime import datetime, timezone

import servers
from real.comparison import MODES, PLAIN, Result, figures, table
from real.environment import ROOT, NotInstalled, environment
from real.packages import PACKAGES, Package
from real.suite import run

PAGE = ROOT / "bench" / "figures" / "works-with.md"


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m real", description=__doc__)
    names = {each.name: each for each in PACKAGES}
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"of {', '.join(names)}; all if not given"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    given = parser.parse_args()
    if unknown := set(given.names) - set(names):
        parser.error(f"no such package: {', '.join(sorted(unknown))}")
    modes = [mode for mode in MODES if mode == PLAIN or mode in given.modes]
    return max(_report(names[name], modes) for name in given.names or names)


def _report(package: Package, modes: list[str]) -> int:
    today = datetime.now(timezone.utc).date()
    print(f"## {package.name} {package.version}, {today:%d %B %Y}", "", sep="\n", flush=True)
    try:
        place = environment(package)
    except NotInstalled as error:
        print(f"not installed: {error}", "", sep="\n")
        return 1
    chosen = f"Tests: {', '.join(package.tests)}; {package.only}"
    print(place.versions(), "", chosen, "", sep="\n", flush=True)
    # Some suites make a database for each test.
    with servers.postgres(fsync=False) as postgres, servers.redis() as redis:
        database = {mode: postgres.database(f"real_{mode}") for mode in modes}
        results = {mode: run(package, place, mode, database[mode], redis.url) for mode in modes}
    print(table(results), "", sep="\n", flush=True)
    compared = all(each.tests for each in results.values())
    if compared:
        PAGE.write_text(noted(PAGE.read_text("utf-8"), package, results), "utf-8")
    return int(not compared or any(each.replays != each.equal for each in results.values()))


def noted(page: str, package: Package, results: dict[str, Result]) -> str:
    """The page with this run's rows in place of those that its package had in the same modes."""
    sys.path.append(str(ROOT / ".ci"))
    from works_with import joined, today  # type: ignore[import-not-found]
    from works_with import table as rows_of

    head, rows, tail = rows_of(page, "Package")
    rows = [
        row for row in rows if (row[0].split()[0], row[2]) not in {(package.name, m) for m in results}
    ]
    for mode, result in results.items():
        of_mode = figures(mode, result, results[PLAIN])
        rows.append([f"{package.name} {package.version}", today(), *of_mode])
    rows.sort(key=lambda row: (row[0], MODES.index(row[2])))
    return str(joined(head, rows, tail))


if __name__ == "__main__":
    sys.exit(main())
