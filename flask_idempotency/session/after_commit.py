"""What is called once a commit has happened: that of the operation, or else of the session.

SQLAlchemy's own event ``after_commit`` comes with each commit of the view, before the operation's.
"""

from __future__ import annotations

from collections.abc import Callable

from flask import current_app, has_app_context
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction

from flask_idempotency.core.logs import log

from .leftovers import is_settled_outside, present_session
from .operation import running_operation

Call = Callable[[], object]

_WAITING = "flask_idempotency.after_commit"
"""Where the session's ``info`` has its :class:`_Waiting`."""


def after_commit(function: Call, /) -> None:
    """Call ``function()`` once what the application has done here is committed.

    The same line is right with a key and without one, in jobs and in commands:

    - Inside an operation: when the operation has committed, before its response is sent. Not for a
      replay, not after a rollback, and not if the step whose function called this failed.
    - Elsewhere, where ``db.session`` holds changes: after its next commit, not after a rollback.
    - Elsewhere, where it holds none: at once. If a transaction is open, the database is asked whether
      it has only read.

    A call that was put off logs its exception, which does not change the response. It is lost if the
    process dies between the commit and the call: what must not be lost belongs in a table, in the
    same transaction.
    """
    running = running_operation()
    if running is not None:
        running.operation.note_after_commit(function)
        return
    session = _session()
    if session is None:
        function()
        return
    waiting: _Waiting | None = session.info.get(_WAITING)
    if waiting is None:
        waiting = session.info[_WAITING] = _Waiting(session)
    waiting.calls.append(function)


def _session() -> Session | None:
    """The present session, if it has something to commit."""
    db: SQLAlchemy | None = current_app.extensions.get("sqlalchemy") if has_app_context() else None
    return None if db is None or is_settled_outside(db) else present_session(db)


def call_all(calls: list[Call], what: str) -> None:
    """Call each; what has been committed stands, whatever they raise."""
    for call in calls:
        try:
            call()
        except Exception:
            log.exception("%s: a function failed after the commit", what)


class _Waiting:
    """The calls that wait for the next commit of a session."""

    def __init__(self, session: Session) -> None:
        self.calls: list[Call] = []
        self._has_committed = False
        event.listen(session, "after_commit", self._note)
        event.listen(session, "after_transaction_end", self._end)

    def _note(self, session: Session) -> None:
        # Here the session cannot send anything yet, and a released savepoint is no commit.
        self._has_committed = session.get_nested_transaction() is None

    def _end(self, _session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is not None:
            return
        calls, self.calls = self.calls, []
        has_committed, self._has_committed = self._has_committed, False
        if not has_committed:
            return
        running = running_operation()
        if running is None:
            call_all(calls, "db.session")
            return
        for call in calls:  # asked for before the view, which has committed it
            running.operation.note_after_commit(call)
