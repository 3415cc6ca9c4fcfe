"""``Idempotency.run_many``: many items in one call, each with a key and a fate of its own.

All of it happens in the transaction of one atomic operation, that of the whole call. The items' records
are inserted and committed first, then locked in that transaction; each item runs in a savepoint; the
results are stored at the end, and commit with the operation. So the number of round trips of ours does
not depend on the number of items.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

from flask import current_app
from sqlalchemy.orm import Session
from sqlalchemy.orm.session import SessionTransactionOrigin

from flask_idempotency.core.errors import (
    ConfigurationError,
    IdempotencyError,
    KeyExpired,
    KeyMalformed,
    KeyReused,
    NotAtomic,
    OperationInterrupted,
    Problem,
    RequestInProgress,
    shown,
)
from flask_idempotency.core.machine import Next, decide
from flask_idempotency.core.ports import ManyItems
from flask_idempotency.core.records import Claim, Record, StoredResponse
from flask_idempotency.core.storable import interrupts, releases
from flask_idempotency.session.operation import OpenTransaction, Operation, running_operation

from .request.identity import new_claim
from .request.response import capture, replay
from .run import read_fingerprint, read_route, read_scope, response_of, result_of, run
from .setup.options import NOT_GIVEN, ManyOptions, Route
from .setup.state import AppState, app_state
from .signals import (
    Told,
    conclude,
    operation_executed,
    operation_replayed,
    operation_rolled_back,
    reject,
)

_ALONE = (
    "run_many() was called inside begin(), begin_nested() or another run_many(), where no item could be"
    " undone alone: call it after that has ended"
)

Outcome = Literal["executed", "replayed", "in_progress", "mismatch", "failed"]


@dataclass(frozen=True)
class ItemResult:
    """What became of one item of :meth:`Idempotency.run_many`.

    ``outcome`` is one of

    * ``"executed"``: the function ran; ``result`` is what it returned.
    * ``"replayed"``: it ran in an earlier call, or for an item before; ``result`` is what it returned
      then.
    * ``"in_progress"``: another call is running it; ask again later.
    * ``"mismatch"``: the key was used for another payload.
    * ``"failed"``: the function raised ``error``, and what it wrote is undone; the same key may try
      again. Or its earlier result cannot be given: ``error`` says why.

    ``error`` is also there for ``"in_progress"`` and ``"mismatch"``: what :meth:`Idempotency.run` would
    have raised.
    """

    key: str = field(repr=False)
    outcome: Outcome
    result: Any = None
    error: Exception | None = None

    @property
    def status(self) -> int:
        """The HTTP status for it in a response with many (RFC 4918 section 13): 200, 409, 422, 500.

        Of an ``error`` that is an HTTP exception of Werkzeug's, such as ``abort(404)``, its own.
        """
        if self.error is None:
            return 200
        status = getattr(self.error, "status" if isinstance(self.error, Problem) else "code", 500)
        return status if isinstance(status, int) else 500


def run_many(
    items: Iterable[tuple[str, Any]],
    function: Callable[[Any], Any],
    scope: Any,
    options: ManyOptions,
) -> list[ItemResult]:
    """See :meth:`Idempotency.run_many`."""
    state = app_state(current_app)
    route = read_route(state, "run_many", function, options, ManyOptions)
    pairs = _checked(items)
    running = running_operation()
    if scope is NOT_GIVEN and running is not None:
        scope = running.operation.scope
    scope = read_scope(state, "run_many", scope)
    if not pairs:
        return []
    if running is not None or not state.settings.enabled:
        return _run_all(state, route, function, pairs, scope)
    if (session := state.sessions.present()) is not None:
        _settle(session)
    results: list[ItemResult] = []
    # The call has no key of its own, so nobody repeats it: its record need not last.
    run(
        secrets.token_urlsafe(),
        lambda: results.extend(_run_all(state, route, function, pairs, scope)),
        (),
        scope,
        None,
        {"name": "run_many", "ttl": 1},
    )
    return results


def _checked(items: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The items. Raises ``ConfigurationError``, or ``KeyMalformed``, for the first wrong one."""
    if isinstance(items, str | bytes | dict) or not isinstance(items, Iterable):
        raise ConfigurationError(f"the items are {shown(items)}; allowed: pairs of a key and a payload")
    pairs = list(items)
    for number, item in enumerate(pairs):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ConfigurationError(
                f"item {number} is {shown(item)}; allowed: a pair of a key and a payload"
            )
        if not isinstance(item[0], str) or not item[0]:
            raise KeyMalformed(f"The key of item {number} is not a string of at least one character.")
    return [(key, payload) for key, payload in pairs]


def _run_all(
    state: AppState,
    route: Route,
    function: Callable[[Any], Any],
    pairs: list[tuple[str, Any]],
    scope: Any,
) -> list[ItemResult]:
    running = running_operation()
    if running is None:  # switched off, or the database is unavailable and the settings allow it
        return [_unprotected(state, function, *pair) for pair in pairs]
    if not isinstance(running, OpenTransaction):
        raise IdempotencyError(
            f"run_many() was called inside {running.operation.name}, which is not atomic: its items"
            " would not commit together with it. Call it in a step with atomic=True, or give the view"
            " no atomic=False"
        )
    return _Items(state, route, function, running, pairs, scope).run()


def _unprotected(state: AppState, function: Callable[[Any], Any], key: str, payload: Any) -> ItemResult:
    try:
        result = ItemResult(key, "executed", function(payload))
        state.sessions.current().commit()
        return result
    except Exception as error:
        state.sessions.current().rollback()
        return ItemResult(key, "failed", error=error)


def _settle(session: Session) -> None:
    """Commit what was written so far: each item is undone on its own."""
    transaction = session.get_transaction()
    is_explicit = transaction is not None and transaction.origin is SessionTransactionOrigin.BEGIN
    if is_explicit or session.in_nested_transaction():
        raise IdempotencyError(_ALONE)
    session.commit()


class _Items:
    """The items of one call, in the transaction of the operation that is ``running``."""

    def __init__(
        self,
        state: AppState,
        route: Route,
        function: Callable[[Any], Any],
        running: OpenTransaction,
        pairs: list[tuple[str, Any]],
        scope: Any,
    ) -> None:
        if not hasattr(running.hold, "hold_items"):
            raise ConfigurationError(
                "run_many() needs a store that can hold many records in one transaction: 'hybrid',"
                " 'postgres', 'sql' or 'memory'"
            )
        self._state, self._route, self._function = state, route, function
        self._running, self._pairs = running, pairs
        self._hold = cast("ManyItems", running.hold)
        bind_key = running.operation.bind_key
        self._operations = [
            Operation(route.name, route.namespace, scope, key, attempt=0, bind_key=bind_key)
            for key, _ in pairs
        ]
        self._claims = [
            new_claim(state, route, operation, read_fingerprint("run_many", payload))
            for operation, (_, payload) in zip(self._operations, pairs, strict=True)
        ]
        if running.items is None:
            running.items = {}
        self._before: dict[bytes, tuple[Claim, ItemResult]] = running.items
        self._done: list[tuple[Claim, Record, StoredResponse]] = []

    def run(self) -> list[ItemResult]:
        """Claim them, run those that are ours, and leave the results to the hold."""
        running, mine = self._running, self._running.operation.hashed_key()
        first = {claim.key: claim for claim in reversed(self._claims)}
        if mine in first:
            raise ConfigurationError(
                f"an item of run_many() is the operation {running.operation.name} itself, which has its"
                " key: give the items a name of their own, run_many(name=...)"
            )
        for session in self._sessions():
            _settle(session)
        if running.units.is_around:
            raise IdempotencyError(_ALONE)
        running.units.rise()
        claims = [claim for claim in first.values() if claim.key not in self._before]
        found = self._hold.hold_items(claims) if claims else {}
        try:
            return [
                self._item(number, *found.get(claim.key, (None, False)))
                for number, claim in enumerate(self._claims)
            ]
        finally:  # somebody may catch what stops them, and go on
            if self._done and running.units.broken is None:
                running.units.rise()
                self._hold.complete_items(self._done)

    def _sessions(self) -> list[Session]:
        """Those that are in use."""
        present = self._state.sessions.present()
        every = {**self._running.sessions, **({} if present is None else {present: None})}
        return [session for session in every if session.in_transaction()]

    def _item(self, number: int, record: Record | None, held: bool) -> ItemResult:
        claim, key = self._claims[number], self._pairs[number][0]
        told = Told()
        told.began, told.claim = time.monotonic(), claim
        if (done := self._before.get(claim.key)) is not None:
            return self._repeat(done, claim, told)
        step = None if record is None else decide(record, claim)
        if record is not None and step is Next.REPLAY:
            return self._replay(key, record, told)
        if record is not None and held and step is Next.TAKE_OVER:
            return self._execute(number, record, told)
        outcome: Outcome = "failed"
        problem: Problem = RequestInProgress(retry_after=1)
        if step is Next.REFUSE:
            outcome, problem = "mismatch", KeyReused()
        elif step is Next.ASK_ROUTE:
            problem = OperationInterrupted()
        elif record is None and claim.begins_until is not None:
            problem = KeyExpired()
        else:
            outcome = "in_progress"
        return self._rejected(key, outcome, problem, told)

    def _repeat(self, done: tuple[Claim, ItemResult], claim: Claim, told: Told) -> ItemResult:
        """Return what this transaction has done for the key already."""
        first, result = done
        if claim.fingerprint.matches(first.fingerprint) is False:
            return self._rejected(result.key, "mismatch", KeyReused(), told)
        conclude(self._state.app, operation_replayed, told, status=200)
        return replace(result, outcome="replayed")

    def _rejected(self, key: str, outcome: Outcome, error: IdempotencyError, told: Told) -> ItemResult:
        reject(self._state.app, told, error)
        return ItemResult(key, outcome, error=error)

    def _replay(self, key: str, record: Record, told: Told) -> ItemResult:
        app, state = self._state.app, self._state
        try:
            result = result_of(replay(app, state.engine.opened(record), state.settings))
        except IdempotencyError as error:  # it was too large, or somebody has changed it
            return self._rejected(key, "failed", error, told)
        conclude(app, operation_replayed, told, attempt=record.attempt, status=200)
        return ItemResult(key, "replayed", result)

    def _execute(self, number: int, record: Record, told: Told) -> ItemResult:
        (key, payload), claim = self._pairs[number], self._claims[number]
        operation, running, app = self._operations[number], self._running, self._state.app
        operation.attempt = told.attempt = record.attempt + (record.owner != claim.owner)
        outer, running.operation = running.operation, operation
        savepoint = running.units.begin_item()
        try:
            response = response_of(self._state, self._function(payload))
            stored = capture(response, self._state.settings)
            for session in self._sessions():
                session.commit()
        except BaseException as error:
            try:
                self._undo(error, savepoint)
            finally:
                if not isinstance(error, Exception) or interrupts(error) or releases(error):
                    raise error
            attempt = operation.attempt
            conclude(app, operation_rolled_back, told, attempt=attempt, error=error)
            return ItemResult(key, "failed", error=error)
        finally:
            running.operation = outer
        running.units.end_item(savepoint, undo=False)
        self._done.append((claim, record, self._state.sealer.seal(stored, claim)))
        tell = partial(conclude, app, operation_executed, told)
        seconds = time.monotonic() - told.began
        outer.after_commit += [
            partial(tell, attempt=operation.attempt, status=stored.status, seconds=seconds)
        ]
        outer.after_commit += operation.after_commit
        outer.flashes += operation.flashes
        result = ItemResult(key, "executed", result_of(response))
        self._before[claim.key] = claim, result
        return result

    def _undo(self, error: BaseException, savepoint: str) -> None:
        """Undo one item. Raises what undoes them all."""
        running = self._running
        broken = running.units.broken or running.hold.explain(None)
        if broken is not None:
            raise broken from error
        running.units.broken = NotAtomic("an item of run_many() failed, and could not be undone alone")
        for session in self._sessions():
            session.rollback()
        running.units.end_item(savepoint, undo=True)
        for session in list(running.sessions):
            session.expire_all()
        running.units.broken = None
