"""Work inside a transaction that holds a record's row: an atomic view's, or a step's."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from flask_idempotency.core.errors import ConfigurationError, NotAtomic
from flask_idempotency.core.ports import Step, Transaction
from flask_idempotency.web.operation import OpenTransaction, Operation, forget_ended
from flask_idempotency.web.setup.state import AppState

from . import joining as session


def engines_of(state: AppState, bind_keys: Sequence[str | None]) -> frozenset[Engine]:
    """The engines of some binds. Raises ``ConfigurationError`` for one that is not there."""
    try:
        return frozenset(state.engines[key] for key in bind_keys)
    except KeyError as error:
        raise ConfigurationError(
            f"other_binds names {error.args[0]!r}; this application has {list(state.engines)}"
        ) from None


class Joined:
    """``db.session`` joined to the transaction of ``hold``, from now on. A context manager.

    ``before`` is what the session was in the middle of. On leaving the context, what the function did
    not commit is undone or, after an error, all of it. Raises ``ConfigurationError`` if the session
    does not join, or if a bind is not there.
    """

    def __init__(
        self,
        state: AppState,
        operation: Operation,
        hold: Transaction | Step,
        other_binds: Sequence[str | None] = (),
        before: session.SetAside | None = None,
    ) -> None:
        self._state, self._hold = state, hold
        self._left: tuple[int, int] | None = None
        binds = engines_of(state, other_binds)
        self._running = OpenTransaction(operation, hold, state.units_of(hold), binds)
        try:
            self._prove()
            if before is not None:
                before.go_on(self._running.units)
        except BaseException:
            self.end()
            raise

    def _prove(self) -> None:
        """Make sure, before the first view runs, that its session cannot escape the operation."""
        state = self._state
        if not state.is_proved:
            session.prove(state.db, self._running, state.table)
            state.is_proved = True
        elif not session.is_joining(state.db):
            raise ConfigurationError(
                "db.session was replaced after init_app, so its writes would not be protected"
            )

    def __enter__(self) -> Joined:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if error is None:
                session.leave(self._state.db, self._running)
                self._running.is_open = False
        except SQLAlchemyError as lost:  # the connection is: nothing can be undone or stored
            self.raise_if_uncommittable(lost)
            raise
        finally:
            self.end()

    def end(self) -> None:
        """Undo all of it, unless it has ended."""
        running = self._running
        try:
            if running.is_open:
                session.undo(self._state.db, running)
        finally:
            running.is_open = False
            running.sessions.clear()
            forget_ended()

    def commit(self) -> None:
        """Commit what the function has left uncommitted in ``db.session``."""
        session.commit(self._state.db, self._running)

    def is_settled(self) -> bool:
        """Whether everything is committed, so that a commit above the view has nothing left to do."""
        running = self._running
        if session.is_settled(self._state.db, running):
            return True
        if session.has_leftovers(self._state.db, running):
            self._left = running.units.commits, running.units.rollbacks
        return False

    def has_committed(self) -> bool:
        """Whether a unit of the view that did more than read was committed."""
        return self._running.units.wrote

    def is_undone(self) -> bool:
        """Whether what was left then has been dropped since."""
        running = self._running
        if self._left is None:
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
        if status >= 400 and not session.commits_in_teardown(self._state.app):
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
        found = self._running.units.broken or self._hold.explain(error)
        if error is not None and found is error:
            raise error  # handlers hear of it above, once
        if found is not None:
            raise found from error
