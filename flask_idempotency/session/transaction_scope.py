"""Work inside a transaction that holds a record's row: an atomic view's, or a step's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from flask_idempotency.core.errors import NotAtomic

from .databases import Databases
from .joining import join, prove
from .leftovers import COMMIT_THEM, drop, drop_leftovers, has_unsaved, undo, waits_for_commit
from .operation import OpenTransaction, Operation


class Joined:
    """``db.session`` joined to the transaction of ``hold``, from now on. A context manager.

    :meth:`let_go` keeps what was committed; :meth:`end`, and so the end of the context, undoes all of
    it. Raises ``ConfigurationError`` if the session does not join, or if a bind is not there.
    """

    def __init__(
        self,
        databases: Databases,
        operation: Operation,
        hold: Any,
        other_binds: Sequence[str | None] = (),
    ) -> None:
        self._databases, self._hold = databases, hold
        self._transaction = hold.transaction
        self._left: tuple[int, int, bool] | None = None
        self._settled: list[Session] | None = None
        binds = databases.engines_of(other_binds)
        self._running = OpenTransaction(operation, self._transaction, databases.engines, binds)
        try:
            prove(databases, self._running)
            join(self._running, databases.sessions.present())
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Joined:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    def end(self, *, shows: bool = False) -> None:
        """Undo all of it, unless the sessions were let go; from now on they go their own way.

        ``shows``: somebody may still show loaded objects as they were, such as a request's error
        handlers. Otherwise they are read again: what goes on in this session must not believe them.
        """
        running = self._running
        if not running.is_open:
            return
        try:
            lost = self._transaction.is_lost() or self._transaction.broken is not None
            self._transaction.leaving = True  # nothing of it need be sent: a ROLLBACK follows
            for session in self._sessions():
                undo(session, lost=lost) if shows else drop(session)
        finally:
            running.let_sessions_go()

    def let_go(self, status: int | None = None) -> None:
        """Undo what was not committed, as without us, and let the sessions go: all the rest commits.

        Raises what makes the work void, and ``NotAtomic`` if something was left uncommitted beside a
        response of success. Beside a rejection it is undone. ``status`` is the response's, or None for
        a step.
        """
        self.raise_if_uncommittable(None)
        running, has_written, sessions = self._running, False, self._settled
        unsaved: list[Session] = []
        if sessions is None:
            sessions = self._sessions()
            has_written = self._transaction.has_written()
            unsaved = [session for session in sessions if has_unsaved(session)]
        if status is not None and status < 400 and (has_written or unsaved):
            raise NotAtomic(
                f"the view of {running.operation.name} responded with {status} and left changes in"
                f" db.session that nobody committed: {COMMIT_THEM}"
            )
        self._transaction.leaving = True
        try:
            for session in sessions:
                transaction = session.get_transaction()
                if session in unsaved or (has_written and transaction is not None):
                    drop_leftovers(session, running.operation.name)
                elif transaction is not None and transaction.is_active and session in running.sessions:
                    transaction.close()  # it has left nothing, so loaded objects stay usable
        except SQLAlchemyError as lost:  # the connection is lost: nothing can be undone or stored
            self.raise_if_uncommittable(lost)
            raise
        running.let_sessions_go()

    def _sessions(self) -> list[Session]:
        """Those that joined, and the present one, which may hold changes and not have joined yet."""
        present = self._databases.sessions.present()
        return list({**self._running.sessions, **({} if present is None else {present: None})})

    def has_leftovers(self) -> bool:
        """Return True if changes are left that nobody has committed."""
        return self._transaction.has_written() or any(map(has_unsaved, self._sessions()))

    def commit(self) -> None:
        """Commit what the function has left uncommitted in ``db.session``."""
        if self.has_leftovers():
            self._databases.sessions.current().commit()

    def is_settled(self) -> bool:
        """Return True if everything is committed: a commit above the view has nothing left to do.

        Then :meth:`let_go` follows at once: it need not ask again. Sends nothing.
        """
        transaction, sessions = self._transaction, self._sessions()
        if not (transaction.waits_for_commit() or any(map(waits_for_commit, sessions))):
            self._settled = sessions
            return True
        self._left = transaction.commits, transaction.rollbacks, any(map(has_unsaved, sessions))
        return False

    def has_committed(self) -> bool:
        """Return True if a unit of the view that did more than read was committed."""
        return bool(self._transaction.wrote)

    def is_undone(self) -> bool:
        """Return True if what was left then has been dropped since."""
        if self._left is None:
            return False
        commits, rollbacks, was_unsaved = self._left
        is_dropped = was_unsaved and self._transaction.commits == commits and not self.has_leftovers()
        return is_dropped or self._transaction.rollbacks > rollbacks

    def raise_if_uncommittable(self, error: Exception | None) -> None:
        """Raise what keeps the work from committing, now that it ended with ``error`` (or None)."""
        found = self._hold.explain(error)
        if error is not None and found is error:
            raise error  # handlers hear of it above, once
        if found is not None:
            raise found from error
