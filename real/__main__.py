"""Run the test suites of other packages in five modes, on throwaway servers, and compare test by test.

It downloads each package's source distribution into build/real, and installs it into an environment
of its own. What a suite printed in a mode is there, too.

Exit status 1 if a replay was not equal, if a run gave no result, or if there was nothing to compare.
Tests whose results differ are listed: look at each.
"""

from __future__ import annotations

import argparse
import sys
from datetime import datetime, timezone

import servers
from real.comparison import MODES, PLAIN, table
from real.environment import NotInstalled, environment
from real.packages import PACKAGES, Package
from real.suite import run


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
    return int(not compared or any(each.replays != each.equal for each in results.values()))


if __name__ == "__main__":
    sys.exit(main())
