"""``python -m tests.differential``: many random programs, plain and protected, side by side.

Exit status 1 if one was neither equal nor refused by name with nothing committed, or if the run was
too empty to prove anything.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys

import servers
import tests.sessions
from tests.differential.comparison import Twins
from tests.differential.documented import documented
from tests.differential.documented_schema import DOCUMENTED, WITH_HIDDEN
from tests.differential.programs import SESSIONS
from tests.differential.summary import Summary
from tests.differential.twins import PLAIN_SCHEMA


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--documented", type=int, default=0, help="programs of the second grammar")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument(
        "--store", choices=["postgres", "hybrid"], help="one; half of each if not given"
    )
    parser.add_argument("--driver", choices=["psycopg2", "psycopg"], default="psycopg2")
    parser.add_argument("--sessions", choices=tests.sessions.KINDS, default=tests.sessions.usual)
    parser.add_argument("--shown", type=int, default=10, help="differences to shrink and show")
    parser.add_argument("--kinds", action="store_true", help="count each kind of step")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    servers.urls.driver, tests.sessions.usual = given.driver, given.sessions
    stores = [given.store] if given.store else ["postgres", "hybrid"]
    grammar = documented(given.driver) if given.documented else SESSIONS
    schemas = {"postgres": DOCUMENTED, "hybrid": WITH_HIDDEN} if given.documented else {}
    passed = []
    with servers.postgres(fsync=False) as postgres, servers.redis() as redis:
        for seed, store in enumerate(stores, given.seed):
            redis_url = redis.url if store == "hybrid" else None
            name = f"programs_{store}"
            twins = Twins(postgres, name, redis_url, schema=schemas.get(store, PLAIN_SCHEMA))
            summary = Summary(twins, grammar)
            summary.run((given.documented or given.programs) // len(stores), seed)
            print(f"store {store}, seed {seed}", summary, "", sep="\n", flush=True)
            if given.kinds:
                print(summary.by_kind(), "", sep="\n")
            for verdict in summary.shrunk(given.shown):
                print("DIFFERENT", verdict, "", flush=True)
            for reason in summary.emptiness:
                print("TOO EMPTY", reason)
            passed.append(not summary.different and not summary.emptiness)
            twins.close()
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
