"""Observing: what enforcement would do with a request is found out and told; its view runs as ever.

The record of an observed request is claimed with a lease, whatever its route says, as nothing is
committed together with its view. It has another hash than that of an enforced request, so the two never
meet, and holds only the status of the response: it is never replayed.

Nothing here raises an ``Exception``, and nothing uses ``db.session`` or a connection of its pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cache
from logging import DEBUG, INFO, WARNING
from typing import Any

from flask import Request, Response
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from flask_idempotency.core.engine import (
    Claimed,
    Decision,
    Execution,
    Gone,
    InProgress,
    Interrupted,
    Mismatch,
    Replay,
)
from flask_idempotency.core.errors import (
    BodyIncomplete,
    ConfigurationError,
    KeyExpired,
    KeyRequired,
    LeaseLost,
    OperationFailed,
    OperationInterrupted,
    Problem,
    RecordBroken,
    ReplayForbidden,
    RequestInProgress,
    ResponseNotKept,
    SealBroken,
)
from flask_idempotency.core.fingerprint import UNCOMPARED
from flask_idempotency.core.keys import observed_namespace
from flask_idempotency.core.logs import log
from flask_idempotency.core.machine import assert_never
from flask_idempotency.core.records import OBSERVED, Claim, StoredResponse
from flask_idempotency.core.storable import is_stored_by_default
from flask_idempotency.session.operation import Operation
from flask_idempotency.session.undone import Commits, warn_undone, watch_commits, watched
from flask_idempotency.web.background.observer import PAUSE_SECONDS, Observer
from flask_idempotency.web.request.body import fingerprint
from flask_idempotency.web.request.identity import (
    identify,
    new_claim,
    prepare,
    request_claim,
    told_birth,
)
from flask_idempotency.web.request.observed_body import NotKept, OverheardBody
from flask_idempotency.web.request.state import RequestState, current_scope
from flask_idempotency.web.setup.options import Route
from flask_idempotency.web.setup.state import AppState

from .signals import Told, conclude, event_of, operation_observed, tell_failure

TOO_LARGE = "body-too-large"
"""What events call the application's 413, which is no problem of ours."""


def observe(state: AppState, route: Route, current: RequestState, request: Request) -> None:
    """Find out what would happen to a request; the first of its views counts."""
    if state.observer is None or current.observation is not None:
        return
    observed = Observed(state, state.observer, route, current)
    if observed.begin(request):
        current.observation, current.told.has_outcome = observed, True
    current.body = None  # an enforced function that the view calls keeps the body in its own way


class Observed(Told):
    """What would have happened to one request. Has what its signals need.

    It is found out

    * before the view, unless that needs a body which the application has not read yet;
    * in the call that reads the last byte of that, unless functions of the application look into it;
    * after the view, with what they find then.
    """

    error: BaseException | None = None  # what left the view

    def __init__(
        self, state: AppState, observer: Observer, route: Route, current: RequestState
    ) -> None:
        self._state, self._observer = state, observer
        # A view may change the scope: what was found before it counts.
        bind_key = cache(route.bind_key) if callable(route.bind_key) else route.bind_key
        self._route = replace(route, scope=route.scope and cache(route.scope), bind_key=bind_key)
        self._current = copy(current)  # an enforced function that the view calls has the other
        self.name, self.began = route.name, time.monotonic()
        self._body: OverheardBody | None = None
        self._waits = False
        self._execution: Execution | None = None
        self._commits: Commits | None = None
        self._would = "unknown"
        self._facts: dict[str, Any] = {}

    def begin(self, request: Request) -> bool:
        """Judge the request, or wait for its body. False if ``protect(skip=...)`` leaves it out."""
        try:
            if not isinstance(self._current.body, OverheardBody):
                self._current.body = OverheardBody(request, self._state.settings)
            self._body = self._current.body
            prepare(request, self._state, self._route, self._current)
            if self._current.presented.skipped:
                self._body.stop()
                return False
            self._judge(self._body)
            if not (self._waits or self._execution):
                self._body.stop()
            elif self._route.atomic:
                self._commits = watch_commits(self._state.sessions)
        except Exception as error:
            self._reject(error)
        self.began = time.monotonic()  # what our own question took does not count
        return True

    def finish(self, response: Response | None) -> None:
        """See :class:`~.request.state.Observation`."""
        error, self.error = self.error, None  # its traceback leads here
        status = None if response is None else response.status_code
        body = self._body
        try:
            if body is not None and self._waits:
                self._judge(body, at_last=True)
            if body is not None and self._execution is not None:
                with body.lent():
                    self._end(self._execution, body, response, error)
            committed = self._commits is not None and self._commits.has_committed
            if committed and self._would == "rolled_back" and status is not None and status < 500:
                warn_undone(self.name, status, observed=True)
            conclude(
                self._state.app,
                operation_observed,
                self,
                self._level(status),
                would=self._would,
                status=status,
                **self._facts,
            )
        except Exception:
            log.exception("operation %s: observing it failed", self.name)
        finally:
            watched.set(None)
            if body is not None:
                body.stop()

    def _judge(self, body: OverheardBody, *, at_last: bool = False) -> None:
        """Claim as enforcement would, or wait for the body. ``at_last`` it waits no more."""
        self._waits = False
        try:
            with body.lent():
                operation = identify(body.request, self._state, self._route, self._current)
                if operation is None:
                    self._would = "unprotected"
                else:
                    state = self._state.of_bind(operation.bind_key)
                    self._observer = state.observer or self._observer
                    self.claim = self._claimed(body, operation, at_last)
                    self._decide(self.claim, operation)
        except NotKept:
            if not at_last:
                self._wait(body)
        except Exception as error:
            self._reject(error)

    def _wait(self, body: OverheardBody) -> None:
        """Judge when the body is whole; where functions may look into it, after the view."""
        route = self._route
        asks = callable(route.key) or callable(route.fingerprint) or bool(route.authorize_replay)
        try:
            with body.lent():
                current_scope(route.scope, required=False)
                self._state.of_bind(route.bind_key)
        except NotKept:
            asks = True
        self._waits = True
        if not asks:
            body.when_whole = lambda: self._judge(body, at_last=True)

    def _decide(self, claim: Claim, operation: Operation) -> None:
        route = self._route
        # An interrupted one that is atomic would have been rolled back, and taken over.
        resume = route.atomic or route.on_interrupted not in ("hold", "fail")
        try:
            decision = self._observer.decide(claim, resume=resume)
        except (KeyExpired, RecordBroken, SealBroken):
            raise
        except Exception as error:
            self._report(error)
            return
        if decision is not None:
            self._note(decision, operation)

    def _claimed(self, body: OverheardBody, operation: Operation, at_last: bool) -> Claim:
        """Make the claim of the request, without what is only for enforced ones."""
        state, route = self._state, replace(self._route, resumable=None)
        born = told_birth(body.request, self._current) if route.refuse_old_keys else None
        apart = replace(operation, namespace=observed_namespace(operation.namespace))
        try:
            if callable(route.fingerprint):  # it may do without the body
                body.check()
                claim = new_claim(state, route, apart, fingerprint(body.request, b"", route), born)
            else:
                claim = request_claim(body.request, state, route, self._current, apart)
        except NotKept:
            if not at_last and (body.is_awaited or callable(route.fingerprint)):
                raise
            claim = new_claim(state, route, apart, UNCOMPARED, born)
        return replace(claim, owner=OBSERVED + claim.owner, lease_seconds=route.lease)

    def _note(self, decision: Decision, operation: Operation) -> None:
        """Note what the decision would have meant. Raises the problem that a client would have got."""
        match decision:
            case Claimed(execution):
                self._execution = execution
                self._facts["attempt"] = execution.hold.attempt
            case Mismatch():
                raise self._route.reused()
            case InProgress():
                raise RequestInProgress
            case Interrupted(is_spent=False) if self._route.on_interrupted == "fail":
                raise OperationFailed
            case Interrupted() | Gone():
                raise OperationInterrupted
            case Replay(stored, attempt, _):
                self._facts.update(attempt=attempt, first_status=stored.status)
                operation.attempt = attempt
                if self._route.authorize_replay and not self._route.authorize_replay(operation):
                    raise ReplayForbidden
                if stored.body is None:
                    raise ResponseNotKept
                self._would = "replayed"
            case impossible:
                assert_never(impossible)

    def _reject(self, error: Exception) -> None:
        """``error`` would have been the response."""
        self._would = "rejected"
        self._facts["error"] = error.with_traceback(None)  # which leads here
        if isinstance(error, Problem):
            self._facts["problem"] = error.type
        elif isinstance(error, RequestEntityTooLarge):
            self._facts["problem"] = TOO_LARGE

    def _end(
        self,
        execution: Execution,
        body: OverheardBody,
        response: Response | None,
        error: BaseException | None,
    ) -> None:
        """Note what would have become of the view's run, in the record too."""
        try:
            body.check()
        except BodyIncomplete as incomplete:  # the view would not have run
            self._reject(incomplete)
            self._ask(execution.release)
            return
        try:
            self._would = self._outcome(response, error)
        except Exception as failure:  # of the option store
            if not isinstance(failure, NotKept):
                self._reject(failure)
            self._ask(execution.release if self._route.atomic else execution.abandon)
            return
        if error is not None and self._would != "executed":
            self._facts["error"] = error
        match self._would:
            case "executed":
                stored = self._stored(response)
                self._ask(lambda: execution.complete(stored))
            case "interrupted":
                self._ask(execution.abandon)
            case _:
                self._ask(execution.release)

    def _ask(self, act: Callable[[], object]) -> None:
        """Ask the records to note the end of the run."""
        try:
            self._observer.ask(act)
        except LeaseLost as lost:
            if not self._route.atomic:  # no lease would have ended
                self._reject(lost)
        except Exception as error:
            self._report(error)

    def _outcome(self, response: Response | None, error: BaseException | None) -> str:
        """The outcome that the run of the view would have had."""
        if self._route.atomic:
            return "executed" if response is not None and self._stores(response) else "rolled_back"
        if isinstance(error, Exception) and (outcome := self._route.outcome_after(error)):
            return outcome
        if response is None:
            return "executed" if isinstance(error, Exception) else "interrupted"
        return "executed" if self._stores(response) else "released"

    def _stores(self, response: Response) -> bool:
        """Return True if the response would be stored. The option ``store`` sees no streamed one."""
        status = response.status_code
        if self._route.store is not None and response.is_sequence:
            shown = self._state.app.response_class(
                response.get_data(), response.status, response.headers.copy()
            )
            return bool(self._route.store(shown))
        return (status >= 500 and not self._route.atomic) or is_stored_by_default(status)

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

    def _report(self, error: Exception) -> None:
        """Log and signal that the records did not do what was asked."""
        cause = error if isinstance(error, ConfigurationError) else error.__cause__ or error
        text = "nothing is observed for %g s, the store failed: %r"
        event = event_of(self, error=error)
        tell_failure(self._state.app, event, text, PAUSE_SECONDS, cause)
