"""Attempts at one operation, what may happen to them, and what must hold at the end."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from typing import Any

from flask_idempotency.core.engine import DecisionEngine, Execution, Replay
from flask_idempotency.core.errors import KeyReused, NotAtomic, RequestInProgress, StoreUnavailable
from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.ports import Lock
from flask_idempotency.core.records import Claim, Sealer, State, StoredResponse
from flask_idempotency.session.transaction import FIRST
from flask_idempotency.stores.lock import RedisLock
from tests.drivers import own_cursor
from tests.faults.explore.schedules import Actor, Choice, Kind, Stage, Violation
from tests.faults.explore.steps import ANSWER_LOST, PROBE_AFTER_SECONDS, TIMES_OUT, Clock, Servers

FAULT = "!"
CRASH, CONNECTION_LOST, FLUSH, AGE, EXPIRE = (
    "crash",
    "connection lost",
    "FLUSHALL",
    "grows old",
    "expire",
)
TTL_SECONDS = 3600
_ROWS = "SELECT body FROM payment WHERE key = %s"
_INSERT = "INSERT INTO payment VALUES (%s, %s)"
_CLEAN = "DELETE FROM payment WHERE key = %s; DELETE FROM idempotency_record WHERE key = %s"
_FINAL = ("ran", "replayed")
_MISTAKES = AttributeError, NameError, TypeError
"""What a mutant or a world that has grown old raises. It would be "caught", and prove nothing."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Plan:
    """What one attempt does.

    It ``fails`` in its view, or ``escapes`` there (ends the transaction past every guard and begins
    another), sends an ``other`` body, or may ``wait`` for seconds.
    """

    fails: bool = False
    escapes: bool = False
    other: bool = False
    wait: float = 0


@dataclass(frozen=True)
class Bound:
    """What is explored: concurrent attempts, and faults, each of which happens once or not at all.

    ``before`` is an attempt that has ended when the others begin; if what it left has ``expired``, a
    purge goes along. Without ``redis`` there is none.
    ``time_outs`` says how many waits for a lock may last longer than ``lock_timeout``.
    """

    plans: tuple[Plan, ...] = (Plan(), Plan())
    faults: tuple[str, ...] = ()
    redis: bool = True
    before: Plan | None = None
    expired: bool = False
    time_outs: int = 1
    depth: int | None = None


class World:
    """One schedule: a fresh key, its attempts, and what has happened so far."""

    def __init__(self, servers: Servers, bound: Bound) -> None:
        self._servers, self._bound = servers, bound
        self.key = hashlib.sha256(b"%d" % next(_numbers)).digest()
        self._lock_name = f"explored:{self.key.hex()}"
        self._trace: list[tuple[str, str]] = []
        self._claims: list[tuple[str, int, bool]] = []  # who was let run, as which attempt
        self._left, self._time_outs = set(bound.faults), bound.time_outs
        if bound.before:
            self._attempt("before", bound.before)
        if bound.expired:
            servers.let_pass(2 * TTL_SECONDS)
            servers.ask("DELETE FROM payment")  # of a lifetime that does not count here
            self._claims.clear()
        self._stage = Stage(servers.is_waiting)
        self._plans = dict(zip("ABC", bound.plans, strict=False))
        for name, plan in self._plans.items():
            self._stage.add(name, lambda name=name, plan=plan: self._attempt(name, plan))
        if bound.expired:
            self._add_purge()

    def _add_purge(self) -> None:
        self._stage.add("purge", lambda: next(self._servers.records.admin().purge(10), 0))

    # What the attempts do

    def _attempt(self, name: str, plan: Plan) -> tuple[str, str]:
        """What a request does in a process of its own, as in ``attempt.py``; says how it came out."""
        lock = RedisLock(self._servers.redis, "explored:")
        fast = lock if self._bound.redis else Lock()
        engine = DecisionEngine(self._servers.records, fast, Sealer(), Clock())
        fingerprint = Fingerprint(1, (b"b" if plan.other else b"a") * 16)
        claim = Claim(self.key, "pay", fingerprint, f"{name}{self.key.hex()}"[:22], TTL_SECONDS)
        try:
            try:
                decision = engine.decide(claim, plan.wait)
            except RequestInProgress:
                return "in progress", ""
            except KeyReused:
                return "mismatch", ""
            match decision:
                case Replay(answer):
                    body = (answer.body or b"").decode()
                    return ("replayed" if answer == _answer(body) else "another answer"), body
                case Execution() as execution:
                    self._claims.append((name, execution.hold.attempt, plan.other))
                    try:
                        return self._view(name, plan, execution)
                    except Exception as error:
                        raise execution.hold.explain(error) or error from error
                    finally:
                        execution.abandon()
        except (StoreUnavailable, RequestInProgress, NotAtomic) as error:
            return type(error).__name__, ""

    def _view(self, name: str, plan: Plan, execution: Any) -> tuple[str, str]:
        actor, connection, body = Actor.current(), execution.hold.connection, f"{name}\n"
        if actor and plan.escapes:
            actor.stop_before("escape", Kind.CHANGE)
            raw = execution.hold.transaction.raw
            own_cursor(raw.driver).execute(f"ROLLBACK; BEGIN; SAVEPOINT {FIRST}")
        if actor:
            actor.stop_before("write", Kind.UNNOTICED)
        connection.exec_driver_sql(_INSERT, (self.key, body))
        if plan.fails:
            return "failed", ""
        execution.complete(_answer(body))
        return "ran", body

    # What may happen next

    def choices(self) -> list[Choice]:
        attempts = [self._stage[name] for name in self._plans]
        ready = [actor for actor in self._stage.actors if actor.pending and not actor.blocked]
        steps = [actor.pending for actor in ready if actor.pending and not self._has_a_twin(actor)]
        if all(actor.over for actor in attempts):
            return steps
        if not steps:
            raise Violation("everybody waits for everybody")
        faults = [fault for actor in attempts if actor.begun for fault in self._faults_of(actor)]
        return steps + faults + self._faults_around()

    def _has_a_twin(self, actor: Actor) -> bool:
        """Whether neither this attempt nor the one before, which is just like it, has begun."""
        # The other goes first: which of them is called A makes no difference.
        twin = self._stage.actors[self._stage.actors.index(actor) - 1]
        alike = self._plans.get(actor.name) == self._plans.get(twin.name)
        return twin.name < actor.name and alike and not (actor.begun or twin.begun)

    def _faults_of(self, actor: Actor) -> list[Choice]:
        kind = Kind.CHANGE if actor.holds else Kind.UNNOTICED
        step = actor.pending.step if actor.pending and not actor.blocked else ""
        possible = (
            # else it is as if it had died before its last step
            (CRASH, actor.acted and not actor.over, Choice(actor.name, CRASH, kind, FAULT)),
            (
                CONNECTION_LOST,
                actor.backend and step,
                Choice(actor.name, CONNECTION_LOST, kind, FAULT),
            ),
            (
                ANSWER_LOST,
                step in ("acquire", "release", "mark") or (step == "commit" and actor.holds),
                actor.pending and Choice(actor.name, step, actor.pending.kind, ANSWER_LOST),
            ),
        )
        return [choice for fault, now, choice in possible if choice and now and fault in self._left]

    def _faults_around(self) -> list[Choice]:
        held = {FLUSH, AGE} & self._left and self._servers.redis.get(self._lock_name)
        faults = []
        if FLUSH in self._left and held:
            faults.append(Choice("redis", FLUSH, Kind.REDIS, FAULT))
        if AGE in self._left and held and held != b"1:done":
            faults.append(Choice("redis", AGE, Kind.REDIS, FAULT))
        if EXPIRE in self._left and (self._bound.before or any(s == "commit" for _, s in self._trace)):
            faults.append(Choice("clock", EXPIRE, Kind.CLOCK, FAULT))
        return faults

    def do(self, choice: Choice) -> list[Choice]:
        self._trace.append((choice.actor, choice.step))
        self._left.discard(choice.step if choice.how == FAULT else choice.how)
        self._time_outs -= choice.how == TIMES_OUT
        others = []
        match choice.step:
            case str(step) if step == FLUSH:
                self._servers.redis.flushall()
            case str(step) if step == AGE:
                self._grow_old()
            case str(step) if step == EXPIRE:
                self._servers.let_pass(2 * TTL_SECONDS)
                self._add_purge()
            case str(step) if step == CRASH:
                self._crash(self._stage[choice.actor])
            case str(step) if step == CONNECTION_LOST:
                self._servers.terminate(self._stage[choice.actor].backend or 0)
            case _:
                actor = self._stage[choice.actor]
                actor.go(choice.how)
                self._stage.settle(actor, may_wait=choice.how != TIMES_OUT)
                if actor.blocked and not choice.how and self._time_outs:
                    others.append(Choice(choice.actor, choice.step, choice.kind, TIMES_OUT))
        for actor in self._stage.actors:
            if actor.blocked:
                self._stage.settle(actor)  # it goes on, if it has got its lock
        return others

    def _grow_old(self) -> None:
        self._servers.redis.pexpire(self._lock_name, PROBE_AFTER_SECONDS * 500)

    def _crash(self, actor: Actor) -> None:
        backend, actor.crashed, actor.dead = actor.backend, True, True
        if backend is not None:
            self._servers.terminate(backend)
        actor.die()
        self._stage.settle(actor)

    def dismiss(self) -> None:
        self._stage.dismiss()
        self._servers.ask(_CLEAN, self.key, self.key)
        self._servers.redis.flushall()

    # What must hold at the end

    def check(self) -> str:
        """Nothing moves any more: retry once, and hold all answers and rows against each other."""
        results = {name: _result(self._stage[name]) for name in self._plans}
        rows = self._rows()
        for name, (kind, body) in results.items():
            if kind in _FINAL and body not in rows:
                raise Violation(f"{name} was answered {body!r}, which is not committed")
            if kind == StoreUnavailable.__name__ and self._done <= {AGE, EXPIRE, FLUSH}:
                raise Violation(f"{name} was told that the store is unavailable, which it was not")
            if kind == "another answer":
                raise Violation(f"{name} was given another answer than the stored one")
        self._check_eras(rows)
        self._check_late(results)
        self._servers.check_connections()
        retry, rounds = self._retry(rows, results)
        self._servers.check_connections()
        ends = [f"{name} {kind}" for name, (kind, _) in results.items()]
        return ", ".join([*ends, f"retry {retry}" + " once the lock is old" * (rounds - 1)])

    def _check_eras(self, rows: list[str]) -> None:
        """In one lifetime of the record: one row, one body, no attempt's number twice."""
        for later in (False, True):
            written = [row for row in rows if self._is_after_expiry(row.strip(), view=True) is later]
            if len(written) > 1:
                raise Violation(f"two rows: {written}")
            let = [
                (number, other)
                for name, number, other in self._claims
                if self._is_after_expiry(name) is later
            ]
            if len({other for _, other in let}) > 1:
                raise Violation("two requests with different bodies were both let run")
            if len({number for number, _ in let}) < len(let):
                raise Violation(f"two attempts with one number: {self._claims}")

    def _is_after_expiry(self, name: str, *, view: bool = False) -> bool:
        """Whether an attempt claimed after the expiry, or its ``view`` outlasted the retention.

        That begins again then; the claim's own message is not counted.
        """
        expiry, claim = (
            self._at("clock", EXPIRE),
            max(self._at(name, "insert"), self._at(name, "update")),
        )
        overran = self._at(name, "lock") < expiry < self._at(name, "write")
        return claim > expiry > -1 or (view and overran)

    def _check_late(self, results: dict[str, tuple[str, str]]) -> None:
        """Who comes after an answer hears "in progress" only beside the one that ran."""
        if self._done - {AGE}:
            return
        spans = {}
        for name in results:
            places = [at for at, (actor, _) in enumerate(self._trace) if actor == name]
            spans[name] = places[0], places[-1]
        for name, (kind, _) in results.items():
            begin = spans[name][0]
            late = any(spans[n][1] < begin for n, (kind, _) in results.items() if kind in _FINAL)
            beside = any(spans[n][1] > begin for n, (kind, _) in results.items() if kind == "ran")
            if kind == "in progress" and late and not beside:
                raise Violation(f"{name} came after the end, and is told that it is in progress")

    def _retry(self, rows: list[str], results: dict[str, tuple[str, str]]) -> tuple[str, int]:
        """One retry to the end: the key is not stuck, and tells of what is committed."""
        record = self._servers.records.look(self.key)
        plan = Plan(other=record is not None and record.fingerprint.digest[:1] == b"b")
        rounds = 1
        kind, body = self._attempt_again(plan)
        lost = {CRASH, ANSWER_LOST} & self._done
        marked = max(at for at in [-1, *(self._at(name, "mark") for name in results)])
        if kind == "in progress" and lost and marked <= self._at("redis", FLUSH):
            self._grow_old()
            rounds = 2
            kind, body = self._attempt_again(plan)
        if kind not in _FINAL:
            raise Violation(f"stuck: the retry is {kind}")
        if rows and kind == "ran" and EXPIRE not in self._done:
            raise Violation(f"committed, and run again by the retry: {rows}")
        after = self._rows()
        if sorted(after) != sorted(rows if kind == "replayed" else [*rows, body]) or body not in after:
            raise Violation(f"the retry {kind} {body!r}: rows {after}, before {rows}")
        found = self._servers.records.look(self.key)
        if found is None or found.state is not State.COMPLETED or found.response != _answer(body):
            raise Violation(f"the record does not hold the answer {body!r}: {found}")
        told_of = {} if record is None or EXPIRE in self._done else results
        for name, (told, _) in told_of.items():
            wrong = _FINAL if self._plans[name].other is not plan.other else ("mismatch",)
            if told in wrong:
                raise Violation(f"{name} was told {told} of a record with another body")
        return kind, rounds

    def _attempt_again(self, plan: Plan) -> tuple[str, str]:
        try:
            return self._attempt("retry", plan)
        except _MISTAKES:
            raise
        except Exception as error:
            raise Violation(f"the retry raised {error!r}") from error

    def _rows(self) -> list[str]:
        return [row for (row,) in self._servers.ask(_ROWS, self.key)]

    @property
    def _done(self) -> set[str]:
        return set(self._bound.faults) - self._left

    def _at(self, actor: str, step: str) -> int:
        return max((at for at, event in enumerate(self._trace) if event == (actor, step)), default=-1)


def _result(actor: Actor) -> tuple[str, str]:
    if actor.crashed:
        return "crashed", ""
    if isinstance(actor.result, _MISTAKES):
        raise actor.result
    if isinstance(actor.result, BaseException):
        raise Violation(f"{actor.name} raised {actor.result!r}") from actor.result
    return actor.result


def _answer(body: str) -> StoredResponse:
    return StoredResponse(201, (("X-By", body.strip()),), body.encode())
