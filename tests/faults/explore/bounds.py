"""What ``python -m tests.faults --explore`` explores, bound by bound."""

from __future__ import annotations

import itertools
import logging
from typing import Any

from tests.faults.explore.schedules import Report, explore
from tests.faults.explore.steps import ANSWER_LOST, Servers
from tests.faults.explore.world import (
    AGE,
    CONNECTION_LOST,
    CRASH,
    FAILS,
    FLUSH,
    OTHER,
    THREE,
    Bound,
    Plan,
    World,
)

WAITS = (Plan(), Plan(wait=5))

BOUNDS: dict[str, Bound] = {
    "two": Bound(),
    "two, no Redis": Bound(redis=False),
    "two, lock grows old": Bound(faults=(AGE,), time_outs=0),
    "two, FLUSHALL": Bound(faults=(FLUSH,), time_outs=0),
    "two, crash": Bound(faults=(CRASH,)),
    "two, crash, lock grows old": Bound(faults=(CRASH, AGE), time_outs=0, depth=10),
    "two, crash, no Redis": Bound(faults=(CRASH,), redis=False, time_outs=0, depth=15),
    "two, connection lost": Bound(faults=(CONNECTION_LOST,)),
    "two, connection lost, no Redis": Bound(
        faults=(CONNECTION_LOST,), redis=False, time_outs=0, depth=10
    ),
    "two, answer lost": Bound(faults=(ANSWER_LOST,)),
    "two, answer lost, no Redis": Bound(faults=(ANSWER_LOST,), redis=False, time_outs=0, depth=12),
    "two retries and a purge, expired": Bound(before=Plan(), expired=True, time_outs=0, depth=10),
    "two retries after a failure": Bound(before=FAILS, redis=False),
    "one waits": Bound(WAITS, time_outs=0, depth=14),
    "one waits, no Redis": Bound(WAITS, redis=False, time_outs=0, depth=12),
    "a changed body": Bound((Plan(), OTHER)),
    "a changed body, no Redis": Bound((Plan(), OTHER), redis=False),
    "a changed body after a failure": Bound((Plan(), OTHER), redis=False, before=FAILS),
    "a failing view": Bound((FAILS, Plan())),
    "a failing view, no Redis": Bound((FAILS, Plan()), redis=False, time_outs=0),
    "a view that escapes": Bound((Plan(escapes=True), Plan()), redis=False, time_outs=0, depth=12),
    "three": Bound(THREE),
    "three, lock grows old": Bound(THREE, faults=(AGE,), time_outs=0, depth=11),
    "three, FLUSHALL": Bound(THREE, faults=(FLUSH,), time_outs=0, depth=9),
    "three, no Redis": Bound(THREE, redis=False, time_outs=0, depth=10),
}


class Explorer:
    """Explores bounds on a PostgreSQL and a Redis that are there; on a fresh database each time."""

    def __init__(self, postgres: Any, redis_server: Any) -> None:
        self._postgres, self._redis, self._numbers = postgres, redis_server, itertools.count()

    def run(self, bound: Bound, **options: Any) -> Report:
        """Every schedule of a bound; ``options`` as of :func:`explore`."""
        servers = Servers(self._postgres.database(f"explored_{next(self._numbers)}"), self._redis.url)
        logging.disable(logging.CRITICAL)  # the package warns of every fault
        try:
            with servers.stepped():
                return explore(lambda: World(servers, bound), depth=bound.depth, **options)
        finally:
            logging.disable(logging.NOTSET)
            servers.close()
