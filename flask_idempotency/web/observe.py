"""Observing: what enforcement would do with a request is found out and told; its view runs as ever.

The record of an observed request is claimed with a lease, whatever its route says, as nothing is
committed together with its view. It has another hash than that of an enforced request, so the two never
meet, and holds only the status of the response: it is never replayed. An error of the view counts as
the response that the application makes of it.

Nothing here raises an ``Exception``, and nothing uses ``db.session`` or a connection of its pool. After
a failure of the store, nothing is observed for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from logging import DEBUG, INFO, WARNING
from typing import Any

import flask
from flask import Response

from flask_idempotency.core.engine import Execution
from flask_idempotency.core.errors import StoreUnavailable
from flask_idempotency.core.records import StoredResponse

from .request import Request
from .response import replay
from .signals import Subject, conclude, operation_observed, problem_type, tell_failure

PAUSE_SECONDS = 10.0
"""How long nothing is observed after a failure of the store. A request waits for it twice at most."""


class Observed(Subject):
    """What would have happened to one request: found out before its view, and told after it."""

    _execution: Execution | None = None
    _asks = False  # the store: what fails now, and is not about one record, is a failure of that

    def __init__(self, current: Request, request: flask.Request) -> None:
        self.state, self._route, self.name = current.state, current.route, current.name
        self._facts: dict[str, Any] = {"would": "unknown"}
        try:
            self._judge(current, request)
        except Exception as error:
            self._fail(error)
        self.began = time.monotonic()  # what our own question took does not count

    def _judge(self, current: Request, request: flask.Request) -> None:
        """Claim as enforcement would. Raises the problem that a client would have got."""
        state, route = self.state, self._route
        claimed = current.claim_for(request)
        if claimed is None:
            self._facts["would"] = "unprotected"
            return
        operation, self.claim = claimed
        if self._is_paused():
            return
        engine = state.of_test() or state.observer
        # An interrupted one that is atomic would have been rolled back, and taken over.
        policy = "retry" if route.atomic else route.on_interrupted
        self._asks = True
        decision = engine.decide(self.claim, on_interrupted=policy)
        self._asks = False
        if isinstance(decision, Execution):
            self._execution = decision
            self.attempt = decision.hold.attempt
        else:
            self.attempt, self._facts["first_status"] = decision.attempt, decision.response.status
            replay(current, operation, decision)
            self._facts["would"] = "replayed"

    def finish(self, response: Response | None, error: BaseException | None) -> None:
        """The request has its ``response``, or ends with ``error``. Raises no ``Exception``."""
        if self.has_outcome:
            return
        status = None if response is None else response.status_code
        try:
            if self._execution is not None:
                self._end(self._execution, response, error)
        except Exception as failure:  # of the option store, or about the record
            self._fail(failure)
        conclude(operation_observed, self, self._level(status), status=status, **self._facts)

    def _end(self, run: Execution, response: Response | None, error: BaseException | None) -> None:
        """Note what would have become of the view's run, in the record too."""
        would: str = "rolled_back" if self._route.atomic else "released"
        act: Callable[[], object] = run.release
        if response is not None and self._route.is_stored(response):
            would, error = "executed", None
            act = partial(run.complete, StoredResponse(response.status_code, (), b""))
        elif response is None and not self._route.atomic:
            would, act = "interrupted", run.abandon
        self._facts.update(would=would, error=error)
        if not self._is_paused():
            self._asks = True
            act()

    def _is_paused(self) -> bool:
        """Return True while the records are left alone."""
        return time.monotonic() < self.state.unobserved_until or self.state.blocks_records()

    def _fail(self, error: Exception) -> None:
        """``error`` would have been the response; or nothing is observed for a while."""
        if self._asks and problem_type(error) in (None, StoreUnavailable.type):
            self.state.unobserved_until = time.monotonic() + PAUSE_SECONDS
            tell_failure(self, error, f"nothing is observed for {PAUSE_SECONDS:g} s, the store failed")
        else:
            error = error.with_traceback(None)  # which leads here
            self._facts.update(would="rejected", error=error, problem=problem_type(error))

    def _level(self, status: int | None) -> int:
        """The level of the log's line about a response with ``status``."""
        would, problem = self._facts["would"], self._facts.get("problem")
        if would == "replayed":
            return INFO if self._facts["first_status"] == status else WARNING
        if would != "rejected" or problem == "key-required":
            return DEBUG  # clients that know of no keys yet: too many for lines
        return INFO if problem else WARNING
