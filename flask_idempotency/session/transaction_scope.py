"""Work inside a transaction that holds a record's row: an atomic view's, or a step's."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from flask_idempotency.core.errors import NotAtomic
from flask_idempotency.core.ports import Step, Transaction
from flask_idempotency.drivers.sqlalchemy_private import has_options

from .before_view import SetAside
from .databases import Databases
from .leftovers import (
    COMMIT_THEM,
    commits_in_teardown,
    drop,
    drop_leftovers,
    end_session,
    has_unsaved,
    undo,
    waits_for_commit,
)
from .operation import OpenTransaction, Operation
from .session_class import prove
from .units import units_of


class Joined:
    """``db.session`` joined to the transaction of ``hold``, from now on. A context manager.

    ``before`` is what the session was in the middle of. :meth:`let_go` keeps what was committed;
    :meth:`end`, and so the end of the context, undoes all of it. Raises ``ConfigurationError`` if the
    session does not join, or if a bind is not there.
    """

    def __init__(
        self,
        databases: Databases,
        operation: Operation,
        hold: Transaction | Step,
        other_binds: Sequence[str | None] = (),
        before: SetAside | None = None,
    ) -> None:
        self._databases, self._hold = databases, hold
        self._left: tuple[int, int, bool] | None = None
        self._settled: list[Session] | None = None
        binds = databases.engines_of(other_binds)
        self._running = OpenTransaction(operation, hold, units_of(hold), databases.engines, binds)
        try:
            prove(databases, self._running)
            if before is not None:
                before.go_on(self._running.units)
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
        try:
            if running.is_open:
                lost = running.units.is_lost() or running.units.broken is not None
                running.units.leave()  # nothing of it need be sent: the operation's ROLLBACK follows
                for session in self._sessions():
                    undo(session, lost=lost) if shows else drop(session)
        finally:
            running.sessions.clear()
            running.end()

    def let_go(self, status: int | None = None) -> None:
        """Undo what was not committed, as without us, and let the sessions go: all the rest commits.

        Raises what makes the work void, and ``NotAtomic`` if something was left uncommitted beside a
        response of success. Beside a rejection it is undone, unless the application commits in a
        teardown. ``status`` is the response's, or None for a step.
        """
        sessions, self._settled = self._settled, None
        self.raise_if_uncommittable(None)
        running, has_written, unsaved = self._running, False, []
        if sessions is None:
            sessions, has_written = self._sessions(), running.units.has_unsaved_writes()
            unsaved = [session for session in sessions if has_unsaved(session)]
        if status is not None and (has_written or unsaved):
            self._refuse_leftovers(status)
        running.units.leave()
        try:
            for session in sessions:
                if session in unsaved or (has_written and session.in_transaction()):
                    drop_leftovers(session, running.operation.name)
                else:
                    end_session(session, running)
        except SQLAlchemyError as lost:  # the connection is lost: nothing can be undone or stored
            self.raise_if_uncommittable(lost)
            raise
        running.sessions.clear()
        running.end()

    def _refuse_leftovers(self, status: int) -> None:
        if status < 400 or commits_in_teardown(self._databases.app):
            raise NotAtomic(
                f"the view of {self._running.operation.name} responded with {status} and left changes"
                f" in db.session that nobody committed: {COMMIT_THEM}"
            )

    def _sessions(self) -> list[Session]:
        """Those that joined, and the present one, which may hold changes and not have joined yet."""
        present = self._databases.sessions.present()
        return list({**self._running.sessions, **({} if present is None else {present: None})})

    def has_leftovers(self) -> bool:
        """Return True if changes are left that nobody has committed."""
        return self._running.units.has_unsaved_writes() or any(map(has_unsaved, self._sessions()))

    def commit(self) -> None:
        """Commit what the function has left uncommitted in ``db.session``."""
        if self.has_leftovers():
            self._databases.sessions.current().commit()

    def is_settled(self) -> bool:
        """Return True if everything is committed: a commit above the view has nothing left to do.

        Then :meth:`let_go` follows at once: it need not ask again. Sends nothing.
        """
        units, sessions = self._running.units, self._sessions()
        # What goes on above the view may still want what was set before it.
        waits = units.carried or units.may_have_work
        waits = waits or any(map(waits_for_commit, sessions)) or any(map(has_options, sessions))
        if not waits:
            self._settled = sessions
            return True
        self._left = units.commits, units.rollbacks, any(map(has_unsaved, sessions))
        return False

    def has_committed(self) -> bool:
        """Return True if a unit of the view that did more than read was committed."""
        return self._running.units.wrote

    def is_undone(self) -> bool:
        """Return True if what was left then has been dropped since."""
        if self._left is None:
            return False
        units = self._running.units
        commits, rollbacks, was_unsaved = self._left
        is_dropped = was_unsaved and units.commits == commits and not self.has_leftovers()
        return is_dropped or units.rollbacks > rollbacks

    def raise_if_uncommittable(self, error: Exception | None) -> None:
        """Raise what keeps the work from committing, now that it ended with ``error`` (or None)."""
        found = self._running.units.broken or self._hold.explain(error)
        if error is not None and found is error:
            raise error  # handlers hear of it above, once
        if found is not None:
            raise found from error
