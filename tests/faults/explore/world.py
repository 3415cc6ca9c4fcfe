"""Attempts at one operation, and what may happen to them; what must hold, the soak's checker says."""

from __future__ import annotations

import hashlib
import itertools
import logging
from dataclasses import dataclass, replace
from typing import Any

from flask_idempotency.core.engine import DecisionEngine, Execution, Replay
from flask_idempotency.core.errors import KeyReused, NotAtomic, RequestInProgress, StoreUnavailable
from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.ports import Lock
from flask_idempotency.core.records import Claim, Sealer, State, StoredResponse
from flask_idempotency.session.transaction import FIRST
from flask_idempotency.stores.lock import RedisLock
from tests.drivers import own_cursor
from tests.faults.checker import violations
from tests.faults.explore.schedules import Actor, Choice, Kind, Report, Stage, Violation, explore
from tests.faults.explore.steps import ANSWER_LOST, PROBE_AFTER_SECONDS, TIMES_OUT, Clock, Servers
from tests.faults.history import Fault, History, Kept, Name, Request, Row, Run, Truth

FAULT = "!"
CRASH, CONNECTION_LOST, FLUSH, AGE = "crash", "connection lost", "FLUSHALL", "grows old"
TTL_SECONDS = 3600
_ROWS = "SELECT body, execution FROM payment WHERE key = %s"
_INSERT = "INSERT INTO payment VALUES (%s, %s, %s)"
_CLEAN = "DELETE FROM payment WHERE key = %s; DELETE FROM idempotency_record WHERE key = %s"
NAME: Name = ("", "")
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


FAILS, OTHER = Plan(fails=True), Plan(other=True)
ALONE, THREE = (Plan(),), (Plan(),) * 3


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


WAITS = (Plan(), Plan(wait=5))

BOUNDS = {
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


class World:
    """One schedule: a fresh key, its attempts, and what has happened so far."""

    def __init__(self, servers: Servers, bound: Bound) -> None:
        self._servers, self._bound = servers, bound
        self.key = hashlib.sha256(b"%d" % next(_numbers)).digest()
        self._lock_name = f"explored:{self.key.hex()}"
        self._trace: list[tuple[str, str]] = []
        self._runs: list[Run] = []
        self._left, self._time_outs = set(bound.faults), bound.time_outs
        if bound.before:
            self._attempt("before", bound.before)
        if bound.expired:
            servers.ask("UPDATE idempotency_record SET expires_at = now() - interval '1 hour'")
            servers.ask("DELETE FROM payment")  # of a lifetime that does not count here
            self._runs.clear()
        self._stage = Stage(servers.is_waiting)
        self._plans = dict(zip("ABC", bound.plans, strict=False))
        for name, plan in self._plans.items():
            self._stage.add(name, lambda name=name, plan=plan: self._attempt(name, plan))
        if bound.expired:
            self._stage.add("purge", lambda: next(servers.records.admin().purge(10), 0))

    # What the attempts do

    def _attempt(self, name: str, plan: Plan) -> Request:
        """What a request does in a process of its own, as in ``attempt.py``; what it is told."""
        request = Request(*NAME, int(plan.other), at=0, returned=0)
        lock = RedisLock(self._servers.redis, "explored:")
        fast = lock if self._bound.redis else Lock()
        engine = DecisionEngine(self._servers.records, fast, Sealer(), Clock())
        fingerprint = Fingerprint(1, (b"b" if plan.other else b"a") * 16)
        claim = Claim(self.key, "pay", fingerprint, f"{name}{self.key.hex()}"[:22], TTL_SECONDS)
        try:
            match engine.decide(claim, plan.wait):
                case Replay(answer):
                    return replace(request, status=201, replayed=True, **_facts(answer))
                case Execution() as execution:
                    at, number = len(self._trace), execution.hold.attempt
                    self._runs.append(Run(*NAME, int(plan.other), number, name, at))
                    try:
                        return replace(request, **self._view(name, plan, execution))
                    except Exception as error:
                        raise execution.hold.explain(error) or error from error
                    finally:
                        execution.abandon()
        except (KeyReused, StoreUnavailable, RequestInProgress) as error:
            return replace(request, status=error.status)
        except NotAtomic:
            return replace(request, status=500)

    def _view(self, name: str, plan: Plan, execution: Execution) -> dict[str, Any]:
        actor, hold = Actor.current(), execution.hold
        if actor and plan.escapes:
            actor.stop_before("escape", Kind.CHANGE)
            own_cursor(hold.transaction.raw.driver).execute(f"ROLLBACK; BEGIN; SAVEPOINT {FIRST}")
        if actor:
            actor.stop_before("write", Kind.UNNOTICED)
        hold.transaction.show()
        hold.transaction.connection.exec_driver_sql(_INSERT, (self.key, int(plan.other), name))
        if plan.fails:
            return {"status": 500}
        answer = StoredResponse(201, (("X-By", name),), f"{name}\n".encode())
        execution.complete(answer)
        return {"status": 201, **_facts(answer)}

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
        step = None if actor.blocked else actor.pending
        found = []
        if actor.acted and not actor.over:  # else it is as if it had died before its last step
            found.append(Choice(actor.name, CRASH, kind, FAULT))
        if step and actor.backend:
            found.append(Choice(actor.name, CONNECTION_LOST, kind, FAULT))
        of_redis = step and step.step in ("acquire", "release", "mark")
        if step and (of_redis or (step.step == "commit" and actor.holds)):
            found.append(replace(step, how=ANSWER_LOST))
        return [each for each in found if {each.step, each.how} & self._left]

    def _faults_around(self) -> list[Choice]:
        held = {FLUSH, AGE} & self._left and self._servers.redis.get(self._lock_name)
        possible = {FLUSH: held, AGE: held and held != b"1:done"}
        return [
            Choice("redis", fault, Kind.REDIS, FAULT)
            for fault, now in possible.items()
            if now and fault in self._left
        ]

    def do(self, choice: Choice) -> list[Choice]:
        self._trace.append((choice.actor, choice.step))
        self._left.discard(choice.step if choice.how == FAULT else choice.how)
        self._time_outs -= choice.how == TIMES_OUT
        others = []
        if choice.step == FLUSH:
            self._servers.redis.flushall()
        elif choice.step == AGE:
            self._servers.redis.pexpire(self._lock_name, PROBE_AFTER_SECONDS * 500)
        elif choice.step == CRASH:
            self._crash(self._stage[choice.actor])
        elif choice.step == CONNECTION_LOST:
            self._servers.terminate(self._stage[choice.actor].backend or 0)
        else:
            actor = self._stage[choice.actor]
            actor.go(choice.how)
            self._stage.settle(actor, may_wait=choice.how != TIMES_OUT)
            if actor.blocked and not choice.how and self._time_outs:
                others.append(replace(choice, how=TIMES_OUT))
        for actor in self._stage.actors:
            if actor.blocked:
                self._stage.settle(actor)  # it goes on, if it has got its lock
        return others

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
        """Nothing moves any more: retry, and give all that was told and is there to the checker."""
        requests = [self._request(name) for name in self._plans]
        if any(each.status == 503 for each in requests) and self._done <= {AGE, FLUSH}:
            raise Violation("told that the store is unavailable, which it was not")
        self._servers.check_connections()
        record, at = self._servers.records.look(self.key), len(self._trace)
        owner = record is not None and record.fingerprint.digest[:1] == b"b"
        bodies = {plan.other for plan in self._plans.values()} | {owner}
        for other in sorted(bodies, key=lambda other: other is not owner):  # the owner's first
            retry = self._retry(Plan(other=other))
            requests.append(replace(retry, at=at, returned=at + 0.5))
            if not requests[-1].is_definite:
                raise Violation(f"stuck: the retry is told {retry.status}")
            at += 1
        self._servers.check_connections()
        rows = [Row(*NAME, *row) for row in self._servers.ask(_ROWS, self.key)]
        record = self._servers.records.look(self.key)
        kept = Kept(False)
        if record is not None and record.state is State.COMPLETED and record.response is not None:
            kept = Kept(True, 201, _facts(record.response)["answer"])
        # Redis may not know of the end from then on.
        faults = [Fault(FLUSH, -1, at)] if self._done - {AGE} else []
        history = History(requests, self._runs, faults=faults, healed=len(self._trace))
        for violation in violations(history, Truth(rows, {NAME: kept}), longest_view_seconds=1):
            raise Violation(violation.rule)
        ends = [f"{request.status}{' replayed' * request.replayed}" for request in requests]
        return ", ".join(ends)

    def _request(self, name: str) -> Request:
        actor, plan = self._stage[name], self._plans[name]
        if isinstance(actor.result, _MISTAKES):
            raise actor.result
        if isinstance(actor.result, BaseException):
            raise Violation(f"{name} raised {actor.result!r}") from actor.result
        places = [at for at, (who, _) in enumerate(self._trace) if who == name]
        told = Request(*NAME, int(plan.other), at=0) if actor.crashed else actor.result
        return replace(told, at=places[0], returned=places[-1])

    def _retry(self, plan: Plan) -> Request:
        """One retry to the end; another one once the lock is old, if nobody can have taken it away."""
        told = self._attempt_again(plan)
        marked = max(self._at(name, "mark") for name in self._plans)
        is_left = {CRASH, ANSWER_LOST} & self._done and marked <= self._at("redis", FLUSH)
        if told.status == 409 and is_left:
            self._servers.redis.pexpire(self._lock_name, PROBE_AFTER_SECONDS * 500)
            told = self._attempt_again(plan)
        return told

    def _attempt_again(self, plan: Plan) -> Request:
        try:
            return self._attempt("retry", plan)
        except _MISTAKES:
            raise
        except Exception as error:
            raise Violation(f"the retry raised {error!r}") from error

    @property
    def _done(self) -> set[str]:
        return set(self._bound.faults) - self._left

    def _at(self, actor: str, step: str) -> int:
        return max((at for at, event in enumerate(self._trace) if event == (actor, step)), default=-1)


def _facts(answer: StoredResponse) -> dict[str, Any]:
    """All of a response, and the run that made it."""
    body = (answer.body or b"").decode()
    whole = (answer.status, tuple(answer.headers or ()), body)
    return {"answer": str(whole), "execution": body.strip()}


def explore_bound(bound: Bound, postgres: Any, redis_server: Any, limit: int | None = None) -> Report:
    """Every schedule of a bound, on a fresh database; or the first ones, up to a limit."""
    url = postgres.database(f"explored_{next(_numbers)}")
    logging.disable(logging.CRITICAL)  # the package warns of every fault
    try:
        with Servers(url, redis_server.url).in_steps() as servers:
            return explore(lambda: World(servers, bound), depth=bound.depth, limit=limit)
    finally:
        logging.disable(logging.NOTSET)
