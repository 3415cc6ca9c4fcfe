"""What is explored, bound by bound; and mutants that must be caught, each by a small bound."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from flask_idempotency.core import engine, machine
from flask_idempotency.core.records import Claim
from flask_idempotency.stores import lock as redis
from flask_idempotency.stores.holds import Hold, SqlRecords
from flask_idempotency.stores.postgres import statements
from flask_idempotency.stores.postgres.store import Messages, PostgresRecords
from tests.faults import mutants
from tests.faults.explore.schedules import Report, explore
from tests.faults.explore.steps import ANSWER_LOST, Servers
from tests.faults.explore.world import AGE, CONNECTION_LOST, CRASH, EXPIRE, FLUSH, Bound, Plan, World

_FAILED, _OTHER, _ESCAPES = Plan(fails=True), Plan(other=True), Plan(escapes=True)
_ALONE, _THREE = (Plan(),), (Plan(),) * 3
_LEFT = Bound(_ALONE, before=_FAILED)

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
    "two, expiry and purge": Bound(faults=(EXPIRE,), depth=12),
    "two retries and a purge, expired": Bound(before=Plan(), expired=True, time_outs=0, depth=10),
    "two retries after a failure": Bound(before=_FAILED, redis=False),
    "one waits": Bound((Plan(), Plan(wait=5)), time_outs=0, depth=14),
    "one waits, no Redis": Bound((Plan(), Plan(wait=5)), redis=False, time_outs=0, depth=12),
    "a changed body": Bound((Plan(), _OTHER)),
    "a changed body, no Redis": Bound((Plan(), _OTHER), redis=False),
    "a changed body after a failure": Bound((Plan(), _OTHER), redis=False, before=_FAILED),
    "a failing view": Bound((_FAILED, Plan())),
    "a failing view, no Redis": Bound((_FAILED, Plan()), redis=False, time_outs=0),
    "a view that escapes": Bound((_ESCAPES, Plan()), redis=False, time_outs=0, depth=12),
    "three": Bound(_THREE),
    "three, lock grows old": Bound(_THREE, faults=(AGE,), time_outs=0, depth=11),
    "three, FLUSHALL": Bound(_THREE, faults=(FLUSH,), time_outs=0, depth=9),
    "three, no Redis": Bound(_THREE, redis=False, time_outs=0, depth=10),
}
"""The default list of ``python -m tests.faults --explore``."""


def no_owner_compared(_app: object) -> None:
    """A take-over takes whatever record is there now."""
    mutants._in(statements.SQL, "take_over", "AND owner = %(seen)s", "")


def no_transaction_compared(_app: object) -> None:
    """FINISH does not ask whether this is still the transaction that locked the row."""
    mutants._in(Messages, "finish", "pg_catalog.txid_current() = %(xid)s", "true")


def no_marker_over_anothers_lock(_app: object) -> None:
    """The marker replaces one's own lock only."""
    only_own = """if redis.call('GET', KEYS[1]) == ARGV[1] then
redis.call('SET', KEYS[1], '1:done', 'PX', ARGV[2]) end"""

    def finish(self: redis.RedisLock, claim: Claim) -> Callable[[], object]:
        lasts = int(1000 * redis.MARKER_SECONDS)
        return self._ask(
            "EVAL", only_own, 1, self._prefix + claim.key.hex(), redis._value(claim), lasts
        )

    redis.RedisLock.finish = finish  # type: ignore[method-assign]


def no_marker(_app: object) -> None:
    """The lock goes, and nothing tells that the operation has its answer."""

    def finish(self: redis.RedisLock, claim: Claim) -> Callable[[], object]:
        return self._ask("DEL", self._prefix + claim.key.hex())

    redis.RedisLock.finish = finish  # type: ignore[method-assign]


MUTANTS: dict[str, tuple[Callable[[Any], object], Bound]] = {
    name: (mutants.MUTANTS[name].apply, bound)
    for name, bound in {
        "no_row_lock": Bound(redis=False),
        "empty_is_free": Bound(redis=False),
        "redis_trusted": Bound(faults=(FLUSH,)),
        "delete_on_error": Bound(_ALONE, faults=(ANSWER_LOST,)),
        "lost_commit_is_success": Bound(_ALONE, faults=(CONNECTION_LOST,)),
        "claim_not_committed": Bound((_FAILED, Plan()), redis=False),
        "lock_believed_forever": Bound(_ALONE, faults=(CRASH,)),
        "fingerprint_on_one_path": Bound((Plan(), _OTHER)),
        "fingerprint_not_in_progress": Bound((_OTHER,), before=_FAILED),
        "never_taken_over": _LEFT,
        "answer_not_stored": Bound(_ALONE),
        "claim_without_attempt": _LEFT,
        "another_answer": Bound(_ALONE),
    }.items()
} | {
    "no_owner_compared": (
        no_owner_compared,
        Bound((Plan(fails=True, other=True), Plan()), redis=False, before=_FAILED, expired=True),
    ),
    "no_transaction_compared": (
        no_transaction_compared,
        Bound((_ESCAPES, Plan()), redis=False),
    ),
    "no_marker": (no_marker, Bound(_THREE)),
    "no_marker_over_anothers_lock": (no_marker_over_anothers_lock, Bound(faults=(FLUSH, CRASH))),
}

_TOUCHED = (
    statements,
    statements.SQL,
    redis,
    Messages,
    PostgresRecords,
    SqlRecords,
    Hold,
    redis.RedisLock,
    engine.DecisionEngine,
)


@contextmanager
def mutated(apply: Callable[[Any], object]) -> Iterator[None]:
    """The package with a mutant applied, until the end of the block."""
    before = [(place, dict(vars(place))) for place in _TOUCHED]
    with patch.dict(machine.NEXT):
        try:
            apply(None)
            yield
        finally:
            for place, attributes in before:
                for name, value in attributes.items():
                    if vars(place)[name] is not value:
                        setattr(place, name, value)


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
