"""Work inside a transaction that holds a record's row: an atomic view's, or a step's."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.exc import SQLAlchemyError

from flask_idempotency.core.errors import NotAtomic
from flask_idempotency.core.ports import Step, Transaction
from flask_idempotency.web.operation import OpenTransaction, Operation
from flask_idempotency.web.setup.state import AppState

from . import joining as session


class Joined:
    """``db.session`` joined to the transaction of ``hold``, until :meth:`leave` or :meth:`abandon`.

    ``before`` is what the session was in the middle of. Raises ``ConfigurationError`` if it does not
    join, or if a bind is not there.
    """

    def __init__(
        self,
        state: AppState,
        operation: Operation,
        hold: Transaction | Step,
        other_binds: Sequence[str | None],
        before: session.SetAside | None = None,
    ) -> None:
        self._state, self._hold = state, hold
        self._running: OpenTransaction | None = None
        self._left: tuple[int, int] | None = None
        try:
            binds = state.engines_of(other_binds)
            self._running = OpenTransaction(operation, hold, state.units_of(hold), binds)
            state.prove_join(self._running)
            if before is not None:
                before.go_on(self._running.units)
        except BaseException:
            self.abandon()
            raise

    def commit(self) -> None:
        """Commit what the function has left uncommitted in ``db.session``."""
        if self._running is not None:
            session.commit(self._state.db, self._running)

    def is_settled(self) -> bool:
        """Whether everything is committed, so that a commit above the view has nothing left to do."""
        running = self._running
        if running is None or session.is_settled(self._state.db, running):
            return True
        if session.has_leftovers(self._state.db, running):
            self._left = running.units.commits, running.units.rollbacks
        return False

    def has_committed(self) -> bool:
        """Whether a unit of the view that did more than read was committed."""
        return self._running is not None and self._running.units.wrote

    def is_undone(self) -> bool:
        """Whether what was left then has been dropped since."""
        running = self._running
        if running is None or self._left is None:
            return False
        commits, rollbacks = self._left
        if running.units.rollbacks > rollbacks:
            return True
        return running.units.commits == commits and not session.has_leftovers(self._state.db, running)

    def refuse_leftovers(self, status: int) -> None:
        """Raise ``NotAtomic`` if changes are left that nobody committed, with a response of success.

        Beside a rejection they are undone, as without us: unless the application commits in a teardown.
        """
        running = self._running
        if running is None or (status >= 400 and not session.commits_in_teardown(self._state.app)):
            return
        if session.has_leftovers(self._state.db, running):
            name = running.operation.name
            raise NotAtomic(
                f"the view of {name} answered {status} and left changes in db.session that nobody"
                " committed: commit them in the view, in a decorator or in an after_request function (a"
                " teardown is too late), or drop them with db.session.rollback()"
            )

    def raise_if_uncommittable(self, error: Exception | None) -> None:
        """Raise what makes the work void, now that it ended with ``error`` (or None).

        It cannot commit then, whatever came of it.
        """
        broken = self._running.units.broken if self._running is not None else None
        found = broken or self._hold.explain(error)
        if error is not None and found is error:
            raise error  # handlers hear of it above, once
        if found is not None:
            raise found from error

    def leave(self) -> None:
        """The function has returned: undo what it did not commit, and let the sessions go."""
        if self._running is None:
            return
        try:
            session.leave(self._state.db, self._running)
        except SQLAlchemyError as error:  # the connection is lost: nothing can be undone or kept
            self.raise_if_uncommittable(error)
            raise
        self._running.end()

    def abandon(self) -> None:
        """Undo all of it. Does nothing after the end."""
        if self._running is not None:
            try:
                if self._running.is_open:
                    session.undo(self._state.db, self._running)
            finally:
                self._running.end()

    def leave_context(self) -> None:
        """Forget the work in the present context (an async view's end ran in a copy of it)."""
        if self._running is not None:
            self._running.leave_context()
