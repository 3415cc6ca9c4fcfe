"""Observing: what enforcement would do with a request is found out and told; its view runs as ever.

The record of an observed request is claimed with a lease, whatever its route says, as nothing is
committed together with its view. It has another hash than that of an enforced request, so the two never
meet, and holds only the status of the response: it is never replayed.

Nothing here raises an ``Exception``, and nothing uses ``db.session`` or a connection of its pool. After
a failure of the store, nothing is observed for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from logging import DEBUG, INFO, WARNING
from typing import Any, NoReturn

import flask
from flask import Response

from flask_idempotency.core.engine import Decision, Execution, Replay
from flask_idempotency.core.errors import KeyExpired, LeaseLost, RecordBroken
from flask_idempotency.core.keys import observed_namespace
from flask_idempotency.core.logs import log
from flask_idempotency.core.records import OBSERVED, StoredResponse
from flask_idempotency.core.storable import outcome_after

from .identity import found_for_old, identify, prepare, request_claim
from .request import Request, watch_end
from .response import replay, replayed
from .routes import AppState
from .settings import Route
from .signals import Subject, conclude, operation_observed, problem_type, tell_failure

PAUSE_SECONDS = 10.0
"""How long nothing is observed after a failure of the store. A request waits for it twice at most."""

_OF_THE_RECORD = (KeyExpired, LeaseLost, RecordBroken)
"""Errors about one record. The others are about the store."""


def observe(state: AppState, route: Route, current: Request, request: flask.Request) -> Observed | None:
    """Find out what would happen to a request; the first of its views counts."""
    if current.observation is not None:
        return None
    observed = Observed(state, route)
    try:
        prepare(request, state, route, current)
        if current.skipped:
            return None
        observed.judge(request, current)
    except Exception as error:
        observed.reject(error)
    observed.began = time.monotonic()  # what our own question took does not count
    current.observation = observed
    watch_end(state.app)
    return observed


class Observed(Subject):
    """What would have happened to one request: found out before its view, and told after it."""

    _error: BaseException | None = None  # what left the view
    _execution: Execution | None = None

    def __init__(self, state: AppState, route: Route) -> None:
        self._state, self._route, self.name = state, route, route.name
        self._facts: dict[str, Any] = {"would": "unknown"}

    def __enter__(self) -> Observed:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._error = error

    def returned(self, result: Any) -> Any:
        """The view returned: that is what the application gets."""
        return result

    def raised(self, error: Exception) -> NoReturn:
        """The view raised ``error``, which goes the way that it goes in any application."""
        raise error

    def judge(self, request: flask.Request, current: Request) -> None:
        """Claim as enforcement would. Raises the problem that a client would have got."""
        state, route = self._state, self._route
        operation = identify(request, state, route, current)
        if operation is None:
            self._facts["would"] = "unprotected"
            return
        observed = replace(operation, namespace=observed_namespace(operation.namespace))
        claim = request_claim(request, state, route, current, observed)
        claim = self.claim = replace(claim, owner=OBSERVED + claim.owner, lease_seconds=route.lease)
        # An interrupted one that is atomic would have been rolled back, and taken over.
        policy = "retry" if route.atomic else route.on_interrupted

        def decided() -> Decision:
            found = found_for_old(state.observed_records, route, operation, claim)
            return state.observer.decide(claim, on_interrupted=policy, found=found)

        decision = self._asked(decided)
        if isinstance(decision, Execution):
            self._execution = decision
            self._facts["attempt"] = decision.hold.attempt
        elif decision is not None:
            if isinstance(decision, Replay):
                self._facts.update(attempt=decision.attempt, first_status=decision.response.status)
            replay(state.app, replayed(decision, route, operation, claim, 0.0).response)
            self._facts["would"] = "replayed"

    def reject(self, error: Exception) -> None:
        """``error`` would have been the response."""
        error = error.with_traceback(None)  # which leads here
        self._facts.update(would="rejected", error=error, problem=problem_type(error))

    def finish(self, response: Response | None, error: BaseException | None) -> None:
        """The request has its ``response``, or ends with ``error``. Raises no ``Exception``."""
        error, self._error = self._error or error, None  # its traceback leads here
        status = None if response is None else response.status_code
        try:
            if self._execution is not None:
                self._end(self._execution, response, error)
            level = self._level(status)
            conclude(self._state.app, operation_observed, self, level, status=status, **self._facts)
        except Exception:
            log.exception("operation %s: observing it failed", self.name)

    def _asked(self, question: Callable[[], Any]) -> Any:
        """Return what the records say; None while they are left alone. Raises what is of one record."""
        state = self._state
        if time.monotonic() < state.unobserved_until or state.blocks_records():
            return None
        try:
            return question()
        except _OF_THE_RECORD:
            raise
        except Exception as error:
            state.unobserved_until = time.monotonic() + PAUSE_SECONDS
            text = f"nothing is observed for {PAUSE_SECONDS:g} s, the store failed"
            tell_failure(state.app, self, error, text)
            return None

    def _end(
        self, execution: Execution, response: Response | None, error: BaseException | None
    ) -> None:
        """Note what would have become of the view's run, in the record too."""
        try:
            would = self._outcome(response, error)
            self._facts.update(would=would, error=None if would == "executed" else error)
        except Exception as failure:  # of the option store
            self.reject(failure)
        acts: dict[str, Callable[[], object]] = {
            "executed": partial(execution.complete, self._stored(response)),
            "interrupted": execution.abandon,
        }
        try:
            self._asked(acts.get(self._facts["would"], execution.release))
        except _OF_THE_RECORD as lost:
            self.reject(lost)

    def _outcome(self, response: Response | None, error: BaseException | None) -> str:
        """The outcome that the run of the view would have had."""
        route = self._route
        if not route.atomic and isinstance(error, Exception):
            outcome = outcome_after(error)
            if outcome is not None or response is None:
                return outcome or "executed"
        if response is not None and route.is_stored(response):
            return "executed"
        if route.atomic:
            return "rolled_back"
        return "interrupted" if response is None else "released"

    def _stored(self, response: Response | None) -> StoredResponse:
        """The status alone; without a body where the response's would not be kept."""
        if response is None:
            return StoredResponse(500, (), b"")
        length = len(response.get_data()) if response.is_sequence else 0
        is_kept = length <= self._state.settings.max_response_bytes
        return StoredResponse(response.status_code, (), b"" if is_kept else None)

    def _level(self, status: int | None) -> int:
        """The level of the log's line about a response with ``status``."""
        would, problem = self._facts["would"], self._facts.get("problem")
        if would == "replayed":
            return INFO if self._facts["first_status"] == status else WARNING
        if would != "rejected" or problem == "key-required":
            return DEBUG  # clients that know of no keys yet: too many for lines
        return INFO if problem else WARNING
