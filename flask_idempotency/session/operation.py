"""The operation that runs, and the transaction that is open for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Select
from sqlalchemy.orm import Session

from flask_idempotency.core.errors import NotAtomic
from flask_idempotency.core.keys import SHOWN, Scope, derive_key, hash_key
from flask_idempotency.core.records import Process
from flask_idempotency.private import (
    connections,
    continue_nested,
    present,
    present_context,
    present_request,
)

from .databases import Databases
from .leftovers import COMMIT_THEM, end_transactions, has_unsaved, is_explicit, undo
from .transaction import FAILED, LATE, OperationTransaction, innermost

T = TypeVar("T")


@dataclass
class Operation:
    """One operation, identified by scope, namespace, name and key.

    ``attempt`` is committed before the view runs, so no crash of a process makes two attempts carry one
    number; a crash of PostgreSQL may, if the operation is atomic.
    """

    name: str
    namespace: str
    scope: Scope = field(repr=False)
    key: str = field(repr=False)
    attempt: int
    steps: Any = field(default=None, init=False, repr=False, compare=False)  # where it is not atomic
    after_commit: list[Callable[[], object]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @property
    def id(self) -> str:
        """The digits by which commands, log lines and events name the record. They are no secret."""
        return self.hashed_key().hex()[:SHOWN]

    @property
    def connection(self) -> Connection:
        """The SQLAlchemy connection of the operation's transaction, while the view runs.

        What is executed on it commits together with the response (in a step with ``atomic=True``: with
        the step), and is part of the transaction that ``db.session`` is in. Do not end its transaction.
        Raises ``RuntimeError`` if none is open.
        """
        running = innermost.get()
        if not isinstance(running, OpenTransaction) or running.operation is not self:
            raise RuntimeError("the operation has no transaction open, so it has no connection")
        running.transaction.show()
        return running.transaction.connection

    def step(
        self,
        name: str,
        function: Callable[..., T],
        /,
        *args: Any,
        atomic: bool = False,
        **kwargs: Any,
    ) -> T:
        """Run ``function(*args, **kwargs)`` once for this operation, and store its result.

        For operations with ``atomic=False``. If the operation runs again, the stored result is returned
        without another call; a call that was cut off is made again. ``name`` has 1 to 255 characters,
        and is another one for each step. The result must be JSON; what comes back is the decoded JSON,
        even the first time. The lease is renewed before the call and after it. With ``atomic=True`` the
        function's writes in ``db.session`` commit together with the step, even if it does not call
        ``commit()``.

        Raises ``RequestInProgress`` if another request has taken the operation over,
        ``StoreUnavailable``, with ``atomic=True`` ``TransactionConflict``, what the function raises,
        and an ``IdempotencyError`` for a name or a result that cannot be recorded, and for a step while
        another runs.
        """
        steps = self._running_steps("step")
        return steps.run(name, partial(function, *args, **kwargs), atomic=atomic)  # type: ignore[no-any-return]

    def extend(self, seconds: float | timedelta) -> None:
        """Let the lease run for at least ``seconds`` (a number or a timedelta) from now on.

        For operations with ``atomic=False``. Raises ``RequestInProgress``, ``StoreUnavailable``,
        ``StepError`` in an atomic step, and ``ConfigurationError`` for a value that the option
        ``lease`` would reject.
        """
        self._running_steps("extend").extend(seconds)

    def note_after_commit(self, function: Callable[[], object]) -> None:
        """Call ``function`` once this, and the step whose function asks for it, has committed."""
        (self.after_commit if self.steps is None else self.steps.after_commit()).append(function)

    def derive_key(self, name: str) -> str:
        """A key to send to another API, so that it recognises the call ``name`` of this operation.

        The same for every attempt, different for every operation and name: 43 letters, digits, ``-``
        and ``_``. It reveals nothing about the client's key.
        """
        return derive_key(self.hashed_key(), name)

    def hashed_key(self) -> bytes:
        """The 23 bytes by which the operation's record is found. They reveal nothing about the key."""
        return hash_key(self.namespace, self.name, self.scope, self.key)

    def _running_steps(self, what: str) -> Any:
        if self.steps is None:
            raise RuntimeError(f"{what}() is for views with @idempotent(atomic=False), while they run")
        return self.steps


class Running:
    """An operation from its beginning on, in the context in which it was begun and copies of that."""

    is_open = False  # before its beginning, and after its end

    def __init__(self, operation: Operation) -> None:
        self.operation, self.is_open, self.pid = operation, True, Process.number
        self._request, self._context = present()
        self.outer = innermost.get()
        innermost.set(self)

    def is_here(self) -> bool:
        """Return True if it is the present request's, not that of a view that has sent this request.

        In a forked child nothing is.
        """
        return self._request is present_request() and self.pid == Process.number

    def has_joined(self, _session: Any) -> bool:
        """Return True if a session's work is that of its transaction: it has none."""
        return False

    def end(self) -> None:
        """End it: what follows is no part of it."""
        self.is_open = False
        if innermost.get() is self:
            innermost.set(self.outer)


class OpenTransaction(Running):
    """An operation while its transaction is open: what the request's sessions join. A context manager.

    ``hold`` has the record's row locked in that transaction; ``other_binds`` may be used besides.
    :meth:`let_go` keeps what was committed; :meth:`end`, and so the end of the context, undoes all of
    it. Raises ``ConfigurationError`` if a bind is not there.
    """

    def __init__(
        self,
        databases: Databases,
        operation: Operation,
        hold: Any,
        other_binds: Sequence[str | None] = (),
    ) -> None:
        self._databases, self._hold = databases, hold
        self.transaction: OperationTransaction = hold.transaction
        self.other_binds = databases.engines_of(other_binds) if other_binds else frozenset()
        self._modes: dict[Any, Any] = {}  # of the sessions that joined, their join_transaction_mode
        self._has_left = False  # what nobody had committed when the view returned
        try:  # an exit may strike in any line from here on
            super().__init__(operation)
            # On SQLite the driver does not say so, as its transactions begin late.
            if self.transaction.raw.continues or databases.records.one_writer:
                self._continue(databases.sessions.present())
        except BaseException:
            self.end()
            raise

    def _continue(self, session: Session | None) -> None:
        """Let the session's own transaction, if the operation continues it, go on as the first unit."""
        connection = self.transaction.connection
        if session is not None and connection in connections(session):
            self._note(session)
            self.transaction.begins(session, connection.get_execution_options())
            continue_nested(session, connection)

    def _note(self, session: Session) -> None:
        self._modes[session] = session.join_transaction_mode
        session.join_transaction_mode = "create_savepoint"

    def has_joined(self, session: Any) -> bool:
        """Return True if a session's work is the view's. Asked for each statement.

        So is the work of a request that the view makes to its own application, if the two share their
        application context, and therefore ``db.session``. Raises ``NotAtomic`` if the operation has
        ended, and in a forked child.
        """
        is_known = session in self._modes or self.is_here() or self._context is present_context()
        if not is_known:
            return False
        if not self.is_open or self.pid != Process.number:
            raise NotAtomic(LATE)
        return True

    def bind_of(
        self, session: Any, bind: Engine | Connection, given: Mapping[str, Any]
    ) -> Engine | Connection:
        """The operation's connection in place of its engine; another database's engine as it is.

        ``given`` has the ``bind`` that the caller has chosen for this statement alone, if any. Raises
        ``NotAtomic`` if the session would escape the operation.
        """
        transaction = self.transaction
        connection, pool = transaction.connection, transaction.connection.engine.pool
        engine, found = bind.engine, connections(session)  # an engine is its own
        if bind is not engine and given.get("bind") is not None:  # bind_arguments={"bind": connection}
            return bind
        # Another request's dispose() may have changed the pool of one engine between two looks at it.
        if engine is not connection.engine and engine.pool is not pool:
            if self._context is present_context() and engine not in self.other_binds:
                transaction.refuse(
                    f"a session of the view of {self.operation.name} uses another bind, the database"
                    f" {engine.url.database}, which cannot commit with the record. A get_bind() of your"
                    " own must return what super().get_bind() returns while current_operation is there."
                    " If a lost or doubled write does no harm, make it a bind of the application, and"
                    " name that in other_binds"
                )
            return bind
        has_begun = connection in found
        is_elsewhere = found and not has_begun and any(each.engine.pool is pool for each in found)
        if is_elsewhere or bind not in (engine, connection):
            transaction.refuse(
                f"a session of the view of {self.operation.name} has a connection of its own, as its"
                " bind or in a transaction that had begun: end that before the view, or use db.session"
            )
        if session not in self._modes:
            self._note(session)
        transaction.queries = "clause" in given and given["clause"].__class__ is Select
        if has_begun:
            transaction.turn(session)
        else:
            transaction.begins(session, bind.get_execution_options())
        return connection

    def __enter__(self) -> OpenTransaction:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    def _sessions(self) -> list[Session]:
        """Those that joined, and the present one, which may hold changes and not have joined yet."""
        sessions = self._databases.sessions
        # Where one has joined, the present one is there, or costs nothing to make.
        present = sessions.current() if self._modes else sessions.present()
        return list({**self._modes, **({} if present is None else {present: None})})

    def has_leftovers(self) -> bool:
        """Return True if changes are left that nobody has committed."""
        return any(map(has_unsaved, self._sessions())) or self.transaction.has_written()

    def commit(self) -> None:
        """Commit what the function has left uncommitted in ``db.session``.

        Raises SQLAlchemy's error if the session waits for a rollback, as any ``commit()`` does then,
        and ``NotAtomic`` where PostgreSQL makes a rollback of it and says nothing.
        """
        if self.transaction.has_lost or self.transaction.is_failed():
            self.transaction.refuse(FAILED)
        if self.has_leftovers() or not all(session.is_active for session in self._modes):
            self._databases.sessions.current().commit()

    def is_settled(self) -> bool:
        """Return True if everything is committed: a commit above the view has nothing left to do.

        Nor to raise, as it has to after one of the view that failed. Asks the server only if it may.
        """
        waits = self.transaction.waits_for_commit()
        for session in self._sessions():
            waits = waits or has_unsaved(session) or is_explicit(session) or not session.is_active
        self._has_left = waits and self._needs_end()
        return not waits

    def is_undone(self) -> bool:
        """Return True if all that was done was left then, and has been rolled back since."""
        return self._has_left and not self.transaction.wrote and not self._needs_end()

    def _needs_end(self) -> bool:
        """Return True if a commit or a rollback of the application would make a difference."""
        return self.transaction.is_failed() or self.has_leftovers()

    def raise_if_uncommittable(self, error: Exception | None) -> None:
        """Raise what keeps the work from committing, now that it ended with ``error`` (or None)."""
        found = self._hold.explain(error)
        if error is not None and found is error:
            raise error  # handlers hear of it above, once
        if found is not None:
            raise found from error

    def let_go(self, status: int | None = None, *, is_settled: bool = False) -> None:
        """Undo what was not committed, as without us, and let the sessions go: all the rest commits.

        Raises what makes the work void, and ``NotAtomic`` if something was left uncommitted beside a
        response of success. Beside a rejection it is undone. ``status`` is the response's, or None for
        a step; ``is_settled`` is what :meth:`is_settled` has just said.
        """
        self.raise_if_uncommittable(None)
        has_left = not is_settled and self.has_leftovers()
        if has_left and status is not None and status < 400:
            raise NotAtomic(
                f"the view of {self.operation.name} responded with {status} and left changes in"
                f" db.session that nobody committed: {COMMIT_THEM}"
            )
        self._leave(undo if has_left else end_transactions)

    def end(self) -> None:
        """Undo all of it, unless the sessions were let go; from now on they go their own way."""
        if self.is_open:
            self._leave(undo)

    def _leave(self, how: Callable[[Session], None]) -> None:
        self.transaction.leaving = True  # the last message, or a ROLLBACK, follows
        try:
            for session in self._modes if how is end_transactions else self._sessions():
                how(session)
        finally:
            for session, mode in self._modes.items():
                session.join_transaction_mode = mode
            super().end()


def running_operation() -> Running | None:
    """Return what runs in this request, or None. Raises ``NotAtomic`` if its transaction has ended.

    A request that a view makes to its own application, and a thread, are not part of it.
    """
    running: Running | None = innermost.get()
    if running is None or not running.is_here():
        return None
    if running.is_open:
        return running
    if isinstance(running, OpenTransaction):
        raise NotAtomic(LATE)
    return None


def outer_transaction() -> OpenTransaction | None:
    """That of the operation whose view makes the present request to its own application, or None."""
    running = innermost.get()
    if running is None or not isinstance(running, OpenTransaction):
        return None
    return running if running.is_open and running.pid == Process.number else None


NESTED = (
    "db.session was inside begin_nested() when the idempotent view began, whose savepoint would be"
    " around the record's lock: end that before the view"
)


def refuse_inside(databases: Databases) -> None:
    """Raise ``NotAtomic``, in both, if an atomic view makes the present request to its application."""
    outer = None if innermost.get() is None else outer_transaction()  # most requests are in none
    if outer is not None and outer.transaction.connection.engine.pool is databases.database.pool:
        outer.transaction.refuse(
            f"the view of {outer.operation.name} made a request to its own application for another"
            " operation, which could not commit with it: call that view's function, or make the first"
            " view not atomic"
        )


def to_continue(databases: Databases) -> Connection | None:
    """The connection of the request's session, if the operation is to continue its transaction.

    None if the session is idle. Raises ``NotAtomic`` for what the operation cannot be a part of.
    """
    refuse_inside(databases)
    session = databases.sessions.joining()
    transaction = None if session is None else session.get_transaction()
    if session is None or transaction is None:
        return None
    if not transaction.is_active:
        raise NotAtomic(FAILED)
    pool = databases.database.pool
    found = next((each for each in connections(session) if each.engine.pool is pool), None)
    if session.in_nested_transaction() or (found is not None and found.in_nested_transaction()):
        raise NotAtomic(NESTED)
    return found
