"""What is called once a commit has happened: the session's, and then that of the operation around it.

SQLAlchemy's own event ``after_commit`` comes with each commit of the view, before the operation's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import iscoroutinefunction

from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction

from flask_idempotency.core.errors import shown
from flask_idempotency.core.logs import log

from .leftovers import is_settled_outside
from .operation import OpenTransaction, running_operation
from .sources import sessions_here

Call = Callable[[], object]

_WAITING = "flask_idempotency.after_commit"
"""Where the session's ``info`` has its :class:`_Waiting`."""


def after_commit(function: Call, /) -> None:
    """Call ``function()`` once what the application has done here is committed.

    The same line is right with a key and without one, in jobs and in commands. Where ``db.session``
    holds changes or has locked rows, the function waits for the session's next commit, and is dropped
    if they are rolled back. (If a transaction is open, the database is asked whether it has only read.)
    Then, or where the session holds none,

    - inside an operation, the function is called when that has committed, before the response is sent.
      Not for a replay, not after a rollback, and not if the step whose function called this failed;
    - elsewhere it is called at once.

    A call that was put off logs its exception, which does not change the response. It is lost if the
    process dies between the commit and the call: what must not be lost belongs in a table, in the
    same transaction. Raises ``TypeError`` for what cannot be called, and for an ``async def`` function.
    """
    if not callable(function) or iscoroutinefunction(function):
        raise TypeError(f"after_commit was given {shown(function)}; allowed: a function, not async def")
    running = running_operation()
    note = None if running is None else running.operation.note_after_commit
    session = _session()
    if session is None:
        function() if note is None else note(function)
        return
    waiting: _Waiting | None = session.info.get(_WAITING)
    if waiting is None:
        waiting = session.info[_WAITING] = _Waiting(session)
    waiting.calls.append(partial(_call, function) if note is None else partial(note, function))


def _session() -> Session | None:
    """The present session, if it has something to commit."""
    sessions = sessions_here()
    return None if sessions is None or is_settled_outside(sessions) else sessions.present()


def _call(function: Call) -> None:
    """Call what was asked for outside of an operation, or leave it to the one that commits it."""
    running = running_operation()
    if isinstance(running, OpenTransaction):
        running.operation.note_after_commit(function)
    else:
        function()


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
        if has_committed:
            call_all(calls, "db.session")
