"""Tells which points an application's operations pass, for as long as a test asks for it.

Nothing in the package knows of it: ``decide`` of the engines and ``commit`` of the application's
sessions are replaced by others that pass everything on, and put back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, cast
from unittest.mock import patch

from sqlalchemy.orm import Session

from flask_idempotency.core.engine import Decision, DecisionEngine, Execution
from flask_idempotency.core.records import StoredResponse
from flask_idempotency.session.operation import running_operation
from flask_idempotency.web.routes import AppState

Point = Literal["after-claim", "in-view", "before-commit", "after-commit"]

Watch = Callable[..., None]
"""Called at each point, and with the name of a step that is not recorded yet.

What it raises surfaces where the operation is.

* ``"after-claim"``: the operation is ours, and its view has not begun.
* ``"in-view"``: the view has committed its session, or a step has run and is not recorded yet.
* ``"before-commit"``: the view has returned, and nothing is committed yet.
* ``"after-commit"``: the response is committed, and nobody has heard of it yet.
"""

_execution: ContextVar[Execution | None] = ContextVar("flask_idempotency_watched", default=None)


@contextmanager
def watched(state: AppState, watch: Watch) -> Iterator[None]:
    """Let ``watch`` know what happens in an application."""
    session_class = cast("Any", state.sessions.let_join().class_)
    inner_decide, inner_commit = DecisionEngine.decide, session_class.commit

    def decide(engine: DecisionEngine, *args: Any, **options: Any) -> Decision:
        execution = inner_decide(engine, *args, **options)
        # Each application has its own sealer, and one more engine in a test that rolls back.
        is_ours = engine.sealer is state.sealer and engine is not state.observer
        if is_ours and isinstance(execution, Execution):
            execution.hold = _WatchedHold(execution.hold, watch, execution)
            _execution.set(execution)
            try:
                watch("after-claim", execution)
            except BaseException:
                execution.abandon()
                raise
        return execution

    def commit(session: Session) -> None:
        inner_commit(session)
        execution = _execution.get()
        if execution and running_operation() is not None and state.sessions.present() is session:
            watch("in-view", execution)

    with (
        patch.object(DecisionEngine, "decide", decide),
        patch.object(session_class, "commit", commit),
    ):
        yield


class _WatchedHold:
    """Any hold, or a step's transaction. It passes on what it does not watch."""

    def __init__(self, inner: Any, watch: Watch, execution: Execution) -> None:
        self._inner, self._watch, self._execution = inner, watch, execution

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def complete(self, response: StoredResponse, **how: Any) -> None:
        """See :class:`Hold`."""
        self._watch("before-commit", self._execution)
        self._inner.complete(response, **how)
        self._watch("after-commit", self._execution)

    def record(self, step: str, result: bytes) -> None:
        """See :class:`Lease`."""
        self._watch("in-view", self._execution, step)
        self._inner.record(step, result)

    def open_step(self, connection: Any = None) -> _WatchedHold:
        """See :class:`Lease`."""
        return _WatchedHold(self._inner.open_step(connection), self._watch, self._execution)
