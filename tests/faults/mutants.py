"""This package with one thing wrong, each in its own way: mutants that the checker must catch.

A mutant is applied to the loaded modules, before the application is made, in the process that
gunicorn forks its workers from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flask import Flask, g
from sqlalchemy import Connection

from flask_idempotency.core import engine, machine
from flask_idempotency.core.errors import StoreUnavailable
from flask_idempotency.core.machine import Next, Situation
from flask_idempotency.core.ports import Glance
from flask_idempotency.core.records import Claim, StoredResponse
from flask_idempotency.drivers.raw_connection import raw_of
from flask_idempotency.session.sessions import JoiningSession
from flask_idempotency.session.transaction import FIRST
from flask_idempotency.stores import lock as redis
from flask_idempotency.stores.admin import original
from flask_idempotency.stores.holds import Hold, SqlRecords
from flask_idempotency.stores.postgres import statements
from flask_idempotency.stores.postgres.store import Messages, PostgresRecords
from flask_idempotency.web import settings


@dataclass(frozen=True)
class Mutant:
    """``why`` it is wrong, and how the package becomes it."""

    why: str
    apply: Callable[[Flask], object]


def _in(place: Any, name: str, old: str, new: str) -> None:
    before = getattr(place, name)
    if old not in before:
        raise RuntimeError(f"{name} does not contain {old!r} any more")
    setattr(place, name, before.replace(old, new))


def no_row_lock(_app: Flask) -> None:
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


def empty_is_free(_app: Flask) -> None:
    """No row from SKIP LOCKED: surely nobody has it."""
    before = PostgresRecords._hold
    PostgresRecords._hold = (  # type: ignore[method-assign]
        lambda self, claim, *how: before(self, claim, *how) or _in_any_case(self, claim)
    )


def redis_trusted(_app: Flask) -> None:
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
        return _in_any_case(self, claim) if hold is None and trusted else hold

    mine: set[str] = set()
    ask, before = redis.RedisLock.acquire, SqlRecords.claim
    redis.RedisLock.acquire = acquire  # type: ignore[method-assign]
    SqlRecords.claim = claim_it  # type: ignore[method-assign]


def commit_after_answer(app: Flask) -> None:
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


def two_transactions(_app: Flask) -> None:
    """The view's session is not joined: it commits for itself."""

    def get_bind(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super(JoiningSession, self).get_bind(*args, **kwargs)

    JoiningSession.get_bind = get_bind  # type: ignore[method-assign]


def delete_on_error(_app: Flask) -> None:
    """The COMMIT failed: surely the record may go."""

    def complete(self: Hold, answer: StoredResponse) -> None:
        try:
            before(self, answer)
        except StoreUnavailable:
            key = {"key": self._claim.key}
            self._messages.change("DELETE FROM {table} WHERE key = %(key)s", key)
            raise

    before = Hold.complete
    Hold.complete = complete  # type: ignore[method-assign]


def fail_open(app: Flask) -> None:
    """Redis is down: the view runs unprotected."""

    def acquire(self: redis.RedisLock, claim: Claim) -> Glance:
        glance = before(self, claim)
        if self._skip_until:
            raise StoreUnavailable
        return glance

    before = redis.RedisLock.acquire
    redis.RedisLock.acquire = acquire  # type: ignore[method-assign]
    app.config["IDEMPOTENCY_ON_STORE_ERROR"] = "allow"


def no_scope(_app: Flask) -> None:
    """The application does it: it passes ``scope=None``."""


def claim_not_committed(_app: Flask) -> None:
    """The claim is part of the business transaction."""
    _in(statements, "CLAIM", "COMMIT;\n", "")  # another BEGIN changes nothing


def lock_believed_forever(_app: Flask) -> None:
    """A lock in Redis, however old: surely its owner lives."""
    redis.LOCK_SECONDS = 3600.0
    redis.ACQUIRE = redis.ACQUIRE.replace("redis.call('PTTL', KEYS[1])", "tonumber(ARGV[2])")


def fingerprint_on_one_path(_app: Flask) -> None:
    """A claim is checked, a replay is not."""
    machine.NEXT[Situation.COMPLETED] = (Next.REPLAY, Next.REPLAY)


def fingerprint_not_in_progress(_app: Flask) -> None:
    """A replay is checked, a take-over is not."""
    machine.NEXT[Situation.IN_PROGRESS] = (Next.TAKE_OVER, Next.TAKE_OVER)


def never_taken_over(_app: Flask) -> None:
    SqlRecords.take_over = lambda *args: None  # type: ignore[method-assign]


def answer_not_stored(_app: Flask) -> None:
    """The record stays "in progress"."""
    _in(Messages, "finish", "state = %(state)s, ", "")


def errors_kept(_app: Flask) -> None:
    """An answer of 500 is an answer, too."""
    before = settings.is_stored_by_default
    settings.is_stored_by_default = lambda status, atomic: status == 500 or before(status, atomic)


def lost_commit_is_success(_app: Flask) -> None:
    """The connection broke in COMMIT: surely it went well."""

    def complete(self: Hold, answer: StoredResponse) -> None:
        try:
            before(self, answer)
        except StoreUnavailable as error:
            if not isinstance(original(error.__cause__), self._messages.Error):
                raise

    before = Hold.complete
    Hold.complete = complete  # type: ignore[method-assign]


def claim_without_attempt(_app: Flask) -> None:
    """A take-over keeps the number of the attempt that died."""
    _in(statements.SQL, "take_over", "ELSE attempt + 1", "ELSE attempt")


def another_answer(_app: Flask) -> None:
    """A replay that is not byte for byte."""

    def shortened(self: engine.DecisionEngine, record: Any) -> Any:
        response = before(self, record)
        return replace(response, body=(response.body or b"").replace(b"\n", b""))

    before = engine.DecisionEngine.opened
    engine.DecisionEngine.opened = shortened  # type: ignore[method-assign]


MUTANTS: dict[str, Mutant] = {
    each.__name__: Mutant(each.__doc__ or "", each)
    for each in (
        no_row_lock,
        empty_is_free,
        commit_after_answer,
        two_transactions,
        delete_on_error,
        fail_open,
        no_scope,
        claim_not_committed,
        redis_trusted,
        lock_believed_forever,
        fingerprint_on_one_path,
        fingerprint_not_in_progress,
        never_taken_over,
        answer_not_stored,
        errors_kept,
        lost_commit_is_success,
        claim_without_attempt,
        another_answer,
    )
}
