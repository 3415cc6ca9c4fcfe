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
    waiting.add(session, partial(_call, function) if note is None else partial(note, function))


def _session() -> Session | None:
    """The present session, if it has something to commit."""
    sessions = sessions_here()
    session = None if sessions is None else sessions.present()
    if sessions is None or session is None:
        return None
    # A savepoint may be rolled back, and what was asked for in it goes with it.
    return session if session.in_nested_transaction() or not is_settled_outside(sessions) else None


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
    """The calls that wait for the next commit of a session, and the transactions each was asked in."""

    def __init__(self, session: Session) -> None:
        self.calls: list[tuple[list[SessionTransaction], Call]] = []
        self._released: SessionTransaction | None
        self._has_committed, self._released = False, None
        event.listen(session, "after_commit", self._note)
        event.listen(session, "after_transaction_end", self._end)

    def add(self, session: Session, call: Call) -> None:
        """Let a call wait. It goes with any of the transactions and savepoints that are open now."""
        around, transaction = [], session.get_nested_transaction() or session.get_transaction()
        while transaction is not None:
            around.append(transaction)
            transaction = transaction.parent
        self.calls.append((around, call))

    def _note(self, session: Session) -> None:
        # Here the session cannot send anything yet, and a released savepoint is no commit.
        self._released = session.get_nested_transaction()
        self._has_committed = self._released is None

    def _end(self, _session: Session, ended: SessionTransaction) -> None:
        if ended.nested and ended is not self._released:  # it was rolled back
            self.calls = [(around, call) for around, call in self.calls if ended not in around]
        if ended.parent is not None:
            return
        calls, self.calls = self.calls, []
        has_committed, self._has_committed = self._has_committed, False
        if has_committed:
            call_all([call for _around, call in calls], "db.session")
