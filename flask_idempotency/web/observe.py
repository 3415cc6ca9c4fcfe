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
from functools import cache, partial
from logging import DEBUG, INFO, WARNING
from typing import Any, TypeVar

from flask import Request, Response
from werkzeug.exceptions import HTTPException

from flask_idempotency.core.engine import Claimed, Execution, Replay
from flask_idempotency.core.errors import (
    BodyIncomplete,
    ConfigurationError,
    KeyRequired,
    Problem,
    ResponseNotKept,
)
from flask_idempotency.core.fingerprint import UNCOMPARED
from flask_idempotency.core.keys import observed_namespace
from flask_idempotency.core.logs import log
from flask_idempotency.core.records import OBSERVED, Claim, StoredResponse
from flask_idempotency.core.storable import is_stored_by_default, outcome_after
from flask_idempotency.session.operation import Operation
from flask_idempotency.session.undone import Commits, warn_undone, watch_commits, watched
from flask_idempotency.web.background.observer import OF_THE_RECORD, PAUSE_SECONDS, Observer
from flask_idempotency.web.request.identity import (
    found_for_old,
    identify,
    prepare,
    request_claim,
)
from flask_idempotency.web.request.observed_body import NotKept, OverheardBody
from flask_idempotency.web.request.response import replayed
from flask_idempotency.web.request.state import RequestState, current_scope
from flask_idempotency.web.setup.options import Route
from flask_idempotency.web.setup.state import AppState

from .signals import Told, conclude, event_of, operation_observed, problem_type, tell_failure

T = TypeVar("T")


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
    _body: OverheardBody | None = None

    def __init__(
        self, state: AppState, observer: Observer, route: Route, current: RequestState
    ) -> None:
        self._state, self._observer = state, observer
        self._current = copy(current)  # an enforced function that the view calls has the other
        # A view may change the scope: what was found before it counts.
        bind_key = cache(route.bind_key) if callable(route.bind_key) else route.bind_key
        self._route = replace(route, scope=route.scope and cache(route.scope), bind_key=bind_key)
        self.name, self.began = route.name, time.monotonic()
        self._waits = False
        self._execution: Execution | None = None
        self._commits: Commits | None = None
        self._would = "unknown"
        self._facts: dict[str, Any] = {}

    def begin(self, request: Request) -> bool:
        """Judge the request, or wait for its body. False if ``protect(skip=...)`` leaves it out."""
        try:
            body = self._current.body
            if not isinstance(body, OverheardBody):
                body = OverheardBody(request, self._state.settings)
            self._body = self._current.body = body
            prepare(request, self._state, self._route, self._current)  # its skip may read the body
            self._judge(body)
            if not (self._waits or self._execution):
                body.stop()
            elif self._route.atomic:
                self._commits = watch_commits(self._state.sessions)
        except Exception as error:
            self._reject(error)
        self.began = time.monotonic()  # what our own question took does not count
        return not self._current.presented.skipped

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
                    self._observer = self._state.of_bind(operation.bind_key).observer or self._observer
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
            body.when_whole = partial(self._judge, body, at_last=True)

    def _claimed(self, body: OverheardBody, operation: Operation, at_last: bool) -> Claim:
        """Make the claim of the request."""
        route = self._route
        apart = replace(operation, namespace=observed_namespace(operation.namespace))
        make = partial(request_claim, body.request, self._state, route, self._current, apart)
        try:
            claim = make()
        except NotKept:
            if not at_last and (body.is_awaited or callable(route.fingerprint)):
                raise
            claim = make(UNCOMPARED)
        return replace(claim, owner=OBSERVED + claim.owner, lease_seconds=route.lease)

    def _decide(self, claim: Claim, operation: Operation) -> None:
        """Note what the decision would have meant. Raises the problem that a client would have got."""
        route = self._route
        # An interrupted one that is atomic would have been rolled back, and taken over.
        policy = "retry" if route.atomic else route.on_interrupted
        look = partial(found_for_old, self._state.own_records, route, operation, claim)
        record = None if operation.born is None else self._asked(partial(self._observer.ask, look))
        decision = self._asked(partial(self._observer.decide, claim, policy, record))
        if isinstance(decision, Claimed):
            self._execution = decision.execution
            self._facts["attempt"] = decision.execution.hold.attempt
        elif decision is not None:
            if isinstance(decision, Replay):
                self._facts.update(attempt=decision.attempt, first_status=decision.response.status)
            found = replayed(decision, route, operation, claim, 0.0)
            if found.response.body is None:
                raise ResponseNotKept
            self._would = "replayed"

    def _asked(self, question: Callable[[], T]) -> T | None:
        """Return what the records say; None, and tell, if they fail. Raises ``OF_THE_RECORD``."""
        try:
            return question()
        except OF_THE_RECORD:
            raise
        except Exception as error:
            cause = error if isinstance(error, ConfigurationError) else error.__cause__ or error
            text = "nothing is observed for %g s, the store failed: %r"
            tell_failure(self._state.app, event_of(self, error=error), text, PAUSE_SECONDS, cause)
            return None

    def _reject(self, error: Exception) -> None:
        """``error`` would have been the response."""
        self._would = "rejected"
        self._facts["error"] = error.with_traceback(None)  # which leads here
        self._facts["problem"] = problem_type(error)

    def _end(
        self,
        execution: Execution,
        body: OverheardBody,
        response: Response | None,
        error: BaseException | None,
    ) -> None:
        """Note what would have become of the view's run, in the record too."""
        act: Callable[[], object] = execution.release
        try:
            body.check()
            self._would = self._outcome(response, error)
        except BodyIncomplete as incomplete:  # the view would not have run
            self._reject(incomplete)
        except Exception as failure:  # of the option store
            if not isinstance(failure, NotKept):
                self._reject(failure)
            if not self._route.atomic:
                act = execution.abandon
        if self._would == "executed":
            act = partial(execution.complete, self._stored(response))
        elif self._would == "interrupted":
            act = execution.abandon
        if error is not None and self._would in ("rolled_back", "released", "interrupted"):
            self._facts["error"] = error
        try:
            self._asked(partial(self._observer.ask, act))
        except OF_THE_RECORD as lost:
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
