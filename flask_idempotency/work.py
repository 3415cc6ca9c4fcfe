"""Work inside a transaction that holds a record's row: an atomic view's, or a step's."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.exc import SQLAlchemyError

from . import session
from .core.ports import Step, Transaction
from .operation import Operation, Running
from .state import AppState


class Work:
    """``db.session`` joined to the transaction of ``hold``, until :meth:`leave` or :meth:`abandon`.

    Raises ``ConfigurationError`` if it does not join, or if a bind is not there.
    """

    def __init__(
        self,
        state: AppState,
        operation: Operation,
        hold: Transaction | Step,
        other_binds: Sequence[str | None],
    ) -> None:
        self._hold = hold
        self._running: Running | None = None
        try:
            binds = state.engines_of(other_binds)
            self._running = Running(operation, hold.connection, binds)
            state.prove_join(self._running)
        except BaseException:
            self.abandon()
            raise

    def raise_if_void(self, error: Exception | None) -> None:
        """Raise what makes the work void, now that it ended with ``error`` (or None).

        It cannot commit then, whatever came of it.
        """
        broken = self._running.broken if self._running is not None else None
        found = broken or self._hold.explain(error)
        if found is not None and found is not error:
            raise found from error

    def leave(self) -> None:
        """The function has returned: undo what it did not commit, and let the sessions go."""
        if self._running is None:
            return
        try:
            session.leave(self._running)
        except SQLAlchemyError as error:  # the connection is lost: nothing can be undone or kept
            self.raise_if_void(error)
            raise
        self._running.end()

    def abandon(self) -> None:
        """Undo all of it. Does nothing after the end."""
        if self._running is not None:
            try:
                if self._running.is_open:
                    session.undo(self._running)
            finally:
                self._running.end()

    def leave_context(self) -> None:
        """Forget the work in the present context (an async view's end ran in a copy of it)."""
        if self._running is not None:
            self._running.leave_context()
