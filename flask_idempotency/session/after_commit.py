"""What is called once a commit has happened: the session's, and then that of the operation around it.

SQLAlchemy's own event ``after_commit`` comes with each commit of the view, before the operation's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from inspect import iscoroutinefunction

from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction

from flask_idempotency.core.errors import shown
from flask_idempotency.core.logs import log
from flask_idempotency.private import begun_by

from .leftovers import waits_for_commit
from .operation import OpenTransaction, running_operation
from .sessions import sessions_here

Call = Callable[[], object]

_WAITING = "flask_idempotency.after_commit"
"""Where the session's ``info`` has its :class:`_Waiting`."""


def after_commit(function: Call, /) -> None:
    """Call ``function()`` once what the application has done here is committed.

    Where ``db.session`` holds changes or has locked rows, the function waits for the session's next
    commit, and is dropped if they are rolled back. Then, or where the session holds none, it is called
    at once; inside an operation, when that has committed, before the response is sent: not for a
    replay, not after a rollback, and not if the step whose function called this failed.

    A call that was put off logs its exception, which does not change the response. It is lost if the
    process dies between the commit and the call. Raises ``TypeError`` for what cannot be called, or is
    ``async def``.
    """
    if not callable(function) or iscoroutinefunction(function):
        raise TypeError(f"after_commit was given {shown(function)}; allowed: a function, not async def")
    running, sessions = running_operation(), sessions_here()
    call = partial(_call if running is None else running.operation.note_after_commit, function)
    session = None if sessions is None else sessions.present()
    # A savepoint may be rolled back, and what was asked for in it goes with it.
    if session is not None and (session.in_nested_transaction() or waits_for_commit(session)):
        waiting = session.info.get(_WAITING)
        if waiting is None:
            waiting = session.info[_WAITING] = _Waiting(session)
        waiting.calls[begun_by(session)[0]].append(call)
    else:
        call()


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
    """The calls that wait for the next commit of a session, by the transaction each was asked in."""

    def __init__(self, session: Session) -> None:
        self.calls: defaultdict[SessionTransaction | None, list[Call]] = defaultdict(list)
        event.listen(session, "after_commit", self._hand_on)
        event.listen(session, "after_transaction_end", self._end)

    def _hand_on(self, session: Session) -> None:
        """A savepoint was released, or the transaction committed: here nothing can be sent yet."""
        done = begun_by(session)[0]
        self.calls[done.parent] += self.calls.pop(done, [])

    def _end(self, _session: Session, ended: SessionTransaction) -> None:
        self.calls.pop(ended, None)  # it was rolled back
        if ended.parent is None:
            call_all(self.calls.pop(None, []), "db.session")
