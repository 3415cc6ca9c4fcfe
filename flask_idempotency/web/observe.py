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
from copy import copy
from dataclasses import replace
from functools import partial
from logging import DEBUG, INFO, WARNING
from typing import Any, NoReturn, TypeVar

import flask
from flask import Response
from werkzeug.exceptions import HTTPException

from flask_idempotency.core.engine import Claimed, Decision, Execution, Replay
from flask_idempotency.core.errors import (
    ConfigurationError,
    KeyExpired,
    KeyRequired,
    LeaseLost,
    Problem,
    RecordBroken,
    ResponseNotKept,
)
from flask_idempotency.core.keys import observed_namespace
from flask_idempotency.core.logs import log
from flask_idempotency.core.records import OBSERVED, Claim, StoredResponse
from flask_idempotency.core.storable import is_stored_by_default, outcome_after
from flask_idempotency.session.operation import Operation

from .app_state import AppState
from .identity import (
    found_for_old,
    identify,
    prepare,
    request_claim,
)
from .options import Route
from .request import Request, watch_end
from .response import replayed
from .signals import conclude, event_of, operation_observed, problem_type, tell_failure

T = TypeVar("T")

PAUSE_SECONDS = 10.0
"""How long nothing is observed after a failure of the store. A request waits for it twice at most."""

_OF_THE_RECORD = (KeyExpired, LeaseLost, RecordBroken)
"""Errors about one record. The others are about the store."""


def observe(state: AppState, route: Route, current: Request, request: flask.Request) -> Observed | None:
    """Find out what would happen to a request; the first of its views counts."""
    if current.observation is not None:
        return None
    observed = Observed(state, route, current)
    observed.begin(request)
    if current.skipped:
        return None
    current.observation = observed
    watch_end(state.app)
    return observed


class Observed:
    """What would have happened to one request: found out before its view, and told after it."""

    _error: BaseException | None = None  # what left the view
    _execution: Execution | None = None

    def __init__(self, state: AppState, route: Route, current: Request) -> None:
        self._state, self._route, self._current = state, route, current
        self._would = "unknown"
        self._facts: dict[str, Any] = {}

    def begin(self, request: flask.Request) -> None:
        """Judge the request."""
        current = self._current
        try:
            prepare(request, self._state, self._route, current)
            self._judge(request)
        except Exception as error:
            self._reject(error)
        current.began = time.monotonic()  # what our own question took does not count
        self._current = copy(current)  # a function that the view calls changes it

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

    def finish(self, response: Response | None, error: BaseException | None) -> None:
        """The request has its ``response``, or ends with ``error``. Raises no ``Exception``."""
        error, self._error = self._error or error, None  # its traceback leads here
        status = None if response is None else response.status_code
        try:
            if self._execution is not None:
                self._end(self._execution, response, error)
            level, facts = self._level(status), {"status": status, "would": self._would, **self._facts}
            conclude(self._state.app, operation_observed, self._current, level, **facts)
        except Exception:
            log.exception("operation %s: observing it failed", self._current.name)

    def _judge(self, request: flask.Request) -> None:
        """Claim as enforcement would. Raises the problem that a client would have got."""
        state, route, current = self._state, self._route, self._current
        operation = identify(request, state, route, current)
        if operation is None:
            self._would = "unprotected"
            return
        apart = replace(operation, namespace=observed_namespace(operation.namespace))
        claim = request_claim(request, state, route, current, apart)
        claim = replace(claim, owner=OBSERVED + claim.owner, lease_seconds=route.lease)
        current.claim = claim
        decision = self._asked(partial(self._decided, operation, claim))
        if isinstance(decision, Claimed):
            self._execution = decision.execution
            self._facts["attempt"] = decision.execution.hold.attempt
        elif decision is not None:
            if isinstance(decision, Replay):
                self._facts.update(attempt=decision.attempt, first_status=decision.response.status)
            if replayed(decision, route, operation, claim, 0.0).response.body is None:
                raise ResponseNotKept
            self._would = "replayed"

    def _decided(self, operation: Operation, claim: Claim) -> Decision:
        """What enforcement decides."""
        state, route = self._state, self._route
        found = found_for_old(state.observed_records, route, operation, claim)
        # An interrupted one that is atomic would have been rolled back, and taken over.
        policy = "retry" if route.atomic else route.on_interrupted
        return state.observer.decide(claim, on_interrupted=policy, found=found)

    def _asked(self, question: Callable[[], T]) -> T | None:
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
            cause = error if isinstance(error, ConfigurationError) else error.__cause__ or error
            text = "nothing is observed for %g s, the store failed: %r"
            event = event_of(self._current, error=error)
            tell_failure(state.app, event, text, PAUSE_SECONDS, cause)
            return None

    def _reject(self, error: Exception) -> None:
        """``error`` would have been the response."""
        self._would = "rejected"
        self._facts["error"] = error.with_traceback(None)  # which leads here
        self._facts["problem"] = problem_type(error)

    def _end(
        self, execution: Execution, response: Response | None, error: BaseException | None
    ) -> None:
        """Note what would have become of the view's run, in the record too."""
        act: Callable[[], object] = execution.release
        try:
            self._would = self._outcome(response, error)
        except Exception as failure:  # of the option store
            self._reject(failure)
            act = execution.release if self._route.atomic else execution.abandon
        if self._would == "executed":
            act = partial(execution.complete, self._stored(response))
        elif self._would == "interrupted":
            act = execution.abandon
        if error is not None and self._would in ("rolled_back", "released", "interrupted"):
            self._facts["error"] = error
        try:
            self._asked(act)
        except _OF_THE_RECORD as lost:
            if not self._route.atomic:  # no lease would have ended
                self._reject(lost)

    def _outcome(self, response: Response | None, error: BaseException | None) -> str:
        """The outcome that the run of the view would have had."""
        route = self._route
        if not route.atomic and isinstance(error, Exception):
            if (outcome := outcome_after(error)) is not None:
                return outcome
            if response is None:
                return "executed"
        if response is None:
            return "rolled_back" if route.atomic else "interrupted"
        if route.store is not None and response.is_sequence:  # the option sees a copy, and no stream
            shown = self._state.app.response_class(
                response.get_data(), response.status, response.headers.copy()
            )
            is_stored = route.store(shown)
        else:
            is_stored = is_stored_by_default(response.status_code, route.atomic)
        if is_stored:
            return "executed"
        return "rolled_back" if route.atomic else "released"

    def _stored(self, response: Response | None) -> StoredResponse:
        """The status alone; without a body where the response's would not be kept."""
        status = 500 if response is None else response.status_code
        longest = self._state.settings.max_response_bytes
        too_large = response is not None and response.is_sequence and len(response.get_data()) > longest
        return StoredResponse(status, (), None if too_large else b"")

    def _level(self, status: int | None) -> int:
        """The level of the log's line about a response with ``status``."""
        error = self._facts.get("error")
        if self._would == "replayed":
            return INFO if self._facts["first_status"] == status else WARNING
        if isinstance(error, KeyRequired):  # clients that know of no keys yet: too many for lines
            return DEBUG
        if self._would == "rejected":
            return INFO if isinstance(error, (Problem, HTTPException)) else WARNING
        return DEBUG
