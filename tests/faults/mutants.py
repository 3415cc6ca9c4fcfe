"""This package with one thing wrong, each in its own way; and what must catch it.

A mutant is applied to the loaded modules: before the application is made, in the process that gunicorn
forks its workers from, or for a bound of the explorer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from flask import g
from sqlalchemy import Connection

from flask_idempotency.core import engine, machine
from flask_idempotency.core.errors import StoreUnavailable
from flask_idempotency.core.machine import Next, Situation
from flask_idempotency.core.ports import Glance
from flask_idempotency.core.records import Claim, Record, State, StoredResponse
from flask_idempotency.drivers.raw_connection import raw_of
from flask_idempotency.session.sessions import JoiningSession
from flask_idempotency.session.transaction import FIRST
from flask_idempotency.stores import lock as redis
from flask_idempotency.stores.admin import original
from flask_idempotency.stores.holds import Hold, SqlRecords
from flask_idempotency.stores.postgres import statements
from flask_idempotency.stores.postgres.store import Messages, PostgresRecords
from flask_idempotency.web import settings
from tests.faults.explore.steps import ANSWER_LOST
from tests.faults.explore.world import ALONE, CONNECTION_LOST, CRASH, FAILS, OTHER, THREE, Bound, Plan
from tests.faults.explore.world import FLUSH as FLUSHALL
from tests.faults.nemesis import FLUSH, LOST, REDIS_DOWN, TERMINATED

Apply = Callable[[Any], object]


@dataclass(frozen=True)
class Mutant:
    """A mutant, and where it is caught.

    ``soak`` is what a plan has beside no faults and no kills, ``bound`` is for the explorer. None: not
    by that one.
    """

    apply: Apply
    soak: dict[str, Any] | None
    bound: Bound | None


MUTANTS: dict[str, Mutant] = {}


def caught_by(
    soak: dict[str, Any] | None = None, bound: Bound | None = None
) -> Callable[[Apply], Apply]:
    """Makes a function a mutant. It is given the application, or None by the explorer."""

    def add(apply: Apply) -> Apply:
        MUTANTS[getattr(apply, "__name__", "")] = Mutant(apply, soak, bound)
        return apply

    return add


NOTHING: dict[str, Any] = {}
DUPLICATES = {"faults": (FLUSH,), "slow_share": 0.08, "wait": 0.3}
DEATHS = {"points": ("claim", "view", "write"), "kill_share": 0.2}
ANSWERED = {"points": ("answer",), "kill_share": 0.2}
LEFT = Bound(ALONE, before=FAILS)


def _in(place: Any, name: str, old: str, new: str) -> None:
    before = getattr(place, name)
    if old not in before:
        raise RuntimeError(f"{name} does not contain {old!r} any more")
    setattr(place, name, before.replace(old, new))


@caught_by(DUPLICATES, Bound(redis=False))
def no_row_lock(_app: Any) -> None:
    """Nobody locks the record's row, nor looks in the end whether it was still there to be changed."""
    counted = "pg_catalog.count(*)"
    _in(Messages, "finish", f"1 / {counted}::int", counted)
    _in(statements, "LOCK", "FOR UPDATE SKIP LOCKED", "")
    _in(statements.SQL, "take_over", " FOR UPDATE SKIP LOCKED", "")


def _in_any_case(records: PostgresRecords, claim: Claim) -> Hold:
    """A transaction that holds nothing."""
    engine = records.messages.application
    pooled = engine.raw_connection()
    raw = raw_of(pooled, engine.dialect)
    raw.take()
    [(xid,)], _ = raw.send(f"BEGIN; SAVEPOINT {FIRST}; SELECT txid_current()")
    held = (claim.owner, "1", int(xid), "false", "read committed")
    row = {**claim.values(), **dict(zip(statements.LOCKED, held, strict=True))}
    return records._held(claim, Connection(engine, pooled), raw, row)


@caught_by(DUPLICATES, Bound(redis=False))
def empty_is_free(_app: Any) -> None:
    """No row from SKIP LOCKED: surely nobody has it."""

    def hold(self: PostgresRecords, claim: Claim, *how: Any) -> Any:
        found = before(self, claim, *how)
        is_free = found is None or (isinstance(found, Record) and found.state is State.IN_PROGRESS)
        return _in_any_case(self, claim) if is_free else found

    before = PostgresRecords._hold
    PostgresRecords._hold = hold  # type: ignore[method-assign]


@caught_by(DUPLICATES, Bound(faults=(FLUSHALL,)))
def redis_trusted(_app: Any) -> None:
    """The lock in Redis was free: surely nobody has run it."""

    def acquire(self: redis.RedisLock, claim: Claim) -> Glance:
        glance = ask(self, claim)
        if glance is Glance.MINE:
            mine.add(claim.owner)
        return glance

    def claim_it(self: PostgresRecords, claim: Claim) -> Any:
        hold = before(self, claim)
        trusted = claim.owner in mine
        mine.discard(claim.owner)
        return _in_any_case(self, claim) if trusted and not isinstance(hold, Hold) else hold

    mine: set[str] = set()
    ask, before = redis.RedisLock.acquire, SqlRecords.claim
    redis.RedisLock.acquire = acquire  # type: ignore[method-assign]
    SqlRecords.claim = claim_it  # type: ignore[method-assign]


@caught_by(ANSWERED)
def commit_after_answer(app: Any) -> None:
    """The client has its answer before the COMMIT."""

    def complete(self: engine.Execution, answer: StoredResponse, **how: Any) -> float:
        g.later = lambda: before(self, answer, **how)
        self.abandon = lambda: None  # type: ignore[method-assign]
        return 0.0

    def promise(response: Any) -> Any:
        if later := g.pop("later", None):
            response.call_on_close(later)
        return response

    before = engine.Execution.complete
    engine.Execution.complete = complete  # type: ignore[method-assign]
    app.after_request(promise)


@caught_by(ANSWERED)
def two_transactions(_app: Any) -> None:
    """The view's session is not joined: it commits for itself."""

    def get_bind(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super(JoiningSession, self).get_bind(*args, **kwargs)

    JoiningSession.get_bind = get_bind  # type: ignore[method-assign]


def _if_the_commit_failed(then: Callable[[Hold, StoreUnavailable], object]) -> None:
    """``then`` says whether the error is raised all the same."""

    def complete(self: Hold, answer: StoredResponse) -> None:
        try:
            before(self, answer)
        except StoreUnavailable as error:
            if then(self, error):
                raise

    before = Hold.complete
    Hold.complete = complete  # type: ignore[method-assign]


@caught_by({"faults": (LOST,), "pause_seconds": 0.1}, Bound(ALONE, faults=(ANSWER_LOST,)))
def delete_on_error(_app: Any) -> None:
    """The COMMIT failed: surely the record may go."""

    def delete(self: Hold, _error: StoreUnavailable) -> bool:
        key = {"key": self._claim.key}
        self._messages.change("DELETE FROM {table} WHERE key = %(key)s", key)
        return True

    _if_the_commit_failed(delete)


@caught_by(
    {"faults": (TERMINATED, LOST), "pause_seconds": 0.1}, Bound(ALONE, faults=(CONNECTION_LOST,))
)
def lost_commit_is_success(_app: Any) -> None:
    """The connection broke in COMMIT: surely it went well."""
    _if_the_commit_failed(
        lambda self, error: not isinstance(original(error.__cause__), self._messages.Error)
    )


@caught_by({"faults": (REDIS_DOWN,)})
def fail_open(app: Any) -> None:
    """Redis is down: the view runs unprotected."""

    def acquire(self: redis.RedisLock, claim: Claim) -> Glance:
        glance = before(self, claim)
        if self._skip_until:
            raise StoreUnavailable
        return glance

    before = redis.RedisLock.acquire
    redis.RedisLock.acquire = acquire  # type: ignore[method-assign]
    app.config["IDEMPOTENCY_ON_STORE_ERROR"] = "allow"


@caught_by(NOTHING)
def no_scope(_app: Any) -> None:
    """The application does it: it passes ``scope=None``."""


@caught_by(DEATHS, Bound((FAILS, Plan()), redis=False))
def claim_not_committed(_app: Any) -> None:
    """The claim is part of the business transaction."""
    _in(statements, "CLAIM", "COMMIT;\n", "")  # another BEGIN changes nothing


@caught_by(DEATHS, Bound(ALONE, faults=(CRASH,)))
def lock_believed_forever(_app: Any) -> None:
    """A lock in Redis, however old: surely its owner lives."""
    redis.LOCK_SECONDS = 3600.0
    redis.ACQUIRE = redis.ACQUIRE.replace("redis.call('PTTL', KEYS[1])", "tonumber(ARGV[2])")


@caught_by({"changed_share": 0.5}, Bound((Plan(), OTHER)))
def fingerprint_on_one_path(_app: Any) -> None:
    """A claim is checked, a replay is not."""
    machine.NEXT[Situation.COMPLETED] = (Next.REPLAY, Next.REPLAY)


@caught_by({**DEATHS, "kill_share": 0.3, "changed_share": 0.8}, Bound((OTHER,), before=FAILS))
def fingerprint_not_in_progress(_app: Any) -> None:
    """A replay is checked, a take-over is not."""
    machine.NEXT[Situation.IN_PROGRESS] = (Next.TAKE_OVER, Next.TAKE_OVER)


@caught_by(DEATHS, LEFT)
def never_taken_over(_app: Any) -> None:
    SqlRecords.take_over = lambda *args: None  # type: ignore[method-assign]


@caught_by(NOTHING, Bound(ALONE))
def answer_not_stored(_app: Any) -> None:
    """The record stays "in progress"."""
    _in(Messages, "finish", "state = %(state)s, ", "")


@caught_by({"trouble_share": 0.3})
def errors_kept(_app: Any) -> None:
    """An answer of 500 is an answer, too."""
    before = settings.is_stored_by_default
    settings.is_stored_by_default = lambda status, atomic: status == 500 or before(status, atomic)


@caught_by(DEATHS, LEFT)
def claim_without_attempt(_app: Any) -> None:
    """A take-over keeps the number of the attempt that died."""
    _in(statements.SQL, "take_over", "ELSE attempt + 1", "ELSE attempt")


@caught_by(NOTHING, Bound(ALONE))
def another_answer(_app: Any) -> None:
    """A replay that is not byte for byte."""

    def shortened(self: engine.DecisionEngine, record: Any) -> Any:
        response = before(self, record)
        return replace(response, body=(response.body or b"").replace(b"\n", b"").replace(b" ", b""))

    before = engine.DecisionEngine.opened
    engine.DecisionEngine.opened = shortened  # type: ignore[method-assign]


@caught_by(bound=Bound((Plan(fails=True, other=True), Plan()), redis=False, before=FAILS, expired=True))
def no_owner_compared(_app: Any) -> None:
    """A take-over takes whatever record is there now."""
    _in(statements.SQL, "take_over", "AND owner = %(seen)s", "")


@caught_by(bound=Bound((Plan(escapes=True), Plan()), redis=False))
def no_transaction_compared(_app: Any) -> None:
    """FINISH does not ask whether this is still the transaction that locked the row."""
    _in(Messages, "finish", "pg_catalog.txid_current() = %(xid)s", "true")


@caught_by(bound=Bound(faults=(FLUSHALL, CRASH)))
def no_marker_over_anothers_lock(_app: Any) -> None:
    """The marker replaces one's own lock only."""
    only_own = """if redis.call('GET', KEYS[1]) == ARGV[1] then
redis.call('SET', KEYS[1], '1:done', 'PX', ARGV[2]) end"""

    def finish(self: redis.RedisLock, claim: Claim) -> Callable[[], object]:
        lasts = int(1000 * redis.MARKER_SECONDS)
        place = self._prefix + claim.key.hex()
        return self._ask("EVAL", only_own, 1, place, redis._value(claim), lasts)

    redis.RedisLock.finish = finish  # type: ignore[method-assign]


@caught_by(bound=Bound(THREE))
def no_marker(_app: Any) -> None:
    """The lock goes, and nothing tells that the operation has its answer."""

    def finish(self: redis.RedisLock, claim: Claim) -> Callable[[], object]:
        return self._ask("DEL", self._prefix + claim.key.hex())

    redis.RedisLock.finish = finish  # type: ignore[method-assign]


_TOUCHED = (
    *(statements, statements.SQL, redis, Messages, PostgresRecords, SqlRecords, Hold),
    *(redis.RedisLock, engine.DecisionEngine),
)


@contextmanager
def mutated(apply: Apply) -> Iterator[None]:
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
