"""The transaction of an operation: one connection of SQLAlchemy's, whose COMMIT is ours.

A session joins it by SQLAlchemy's own recipe (:mod:`.joining`): each of its transactions is a savepoint
here, a *unit*. What SQLAlchemy asks of its dialect, to set, release or roll back to a savepoint, to
commit and to roll back, comes here first, and so does each statement, by the dialect's events. A
savepoint waits, and is sent in a message of its own before the next statement, or in front of the last
message: one in which nothing was sent is never sent.

The operation is found by SQLAlchemy's connection, and where only the driver's is known, by that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import Any, NoReturn
from weakref import WeakSet, ref

from sqlalchemy import Connection, Dialect, Engine, event, exc

from flask_idempotency.core.errors import (
    IdempotencyError,
    NotAtomic,
    StoreUnavailable,
    TransactionConflict,
    sqlstate,
)
from flask_idempotency.core.process import INHERITED
from flask_idempotency.drivers.raw_connection import IDLE, IN_ERROR, RawConnection, give_back, taken
from flask_idempotency.drivers.raw_connection import innermost as innermost_of

from . import guard, settings
from .undone import watched

FIRST = "idempotency_first"
"""The savepoint that is made behind the row's lock, in the same message, for the first unit."""

ABORTED = "25P02"
SERIALIZATION_FAILURE = "40001"

CHECK = ["SET CONSTRAINTS ALL IMMEDIATE"]
"""Every deferred check now, as in a COMMIT."""

CHECK_ALONE = ["SAVEPOINT idempotency_check", *CHECK, "ROLLBACK TO idempotency_check"]
"""The same, and what is deferred stays so: no name of a constraint can go stale."""

AT_ONCE = {"idle_in_transaction_session_timeout", "idle_session_timeout"}
"""Settings that work while nothing is sent."""

LASTING = {"isolation_level", "postgresql_readonly", "postgresql_deferrable"}
"""Options of a connection that no transaction of it ends."""

OVERLAP = (
    "two sessions or connections of the view have uncommitted work at the same time, and one would undo"
    " or commit what is the other's: commit one before using the other"
)
NOT_OURS = (
    "the view ended the operation's transaction: inside an atomic operation use db.session.commit() and"
    " rollback(), not those of a connection"
)
FAILED = (
    "a statement in db.session had failed before the idempotent view began, and nobody had rolled back:"
    " call db.session.rollback() where the error is caught"
)
ENDED = "the operation has ended: this connection was part of it, and is no more"
ELSEWHERE = (
    "a statement was sent on the operation's connection outside of its context, in a thread without a"
    " copy of it: use a session or connection of its own there"
)

innermost: ContextVar[Any] = ContextVar("flask_idempotency_running", default=None)
"""What runs, or ran, in this context, inside what it calls ``outer``. In most requests there is none.

Not on the request: threads, tasks and greenlets that share one may each run operations.
"""

_open: dict[int, ref[OperationTransaction]] = {}
"""By the identity of SQLAlchemy's connection, which an operation's transaction keeps."""


def transaction_of(connection: Connection) -> OperationTransaction | None:
    """The operation's transaction that is open on a connection, or None."""
    found = _open.get(id(connection))
    return None if found is None else found()


@dataclass(eq=False)
class _Savepoint:
    """One of the savepoints that are open, from outermost to innermost.

    ``owner`` is the session whose unit it is. ``did`` says that a statement in it may have done more
    than read, ``has_inner`` that a unit was committed in it, and ``saved`` which settings were changed
    in it, for the transaction or not.
    """

    name: str
    sql: str
    owner: Any
    is_unit: bool = False
    did: bool = False
    has_inner: bool = False
    saved: dict[str, bool] = field(default_factory=dict)


class OperationTransaction:
    """The transaction on ``connection``, which is ``raw`` and holds the record's row.

    The row is locked there, and behind that the savepoint ``first`` is set. ``deferred`` says that the
    database has constraints that are deferred by definition, and ``reads_may_write`` that no text tells
    what a SELECT does. ``again`` refers to what begins the
    transaction once more, and locks the row: after a rollback of all of it, for a session that was in
    it before the view, and ``had_written`` or not. ``wrote`` says that a committed unit did more than
    read; ``rollbacks`` counts units that may have and were rolled back. ``running`` is who runs in it,
    if sessions joined. ``broken`` is why the operation can no longer commit, even if the view catches
    the error.
    """

    broken: IdempotencyError | None = None
    running: Callable[[], Any] | None = None
    wrote = leaving = at_once = _flushing = _defers = _is_shown = False
    commits = rollbacks = 0
    is_parents = False  # in a forked child
    _is_over = True  # until it has begun
    _beginner: Any = None  # the session whose unit the next savepoint is
    _last: Callable[[], None] | None = None
    _error: BaseException | None = None

    def __init__(
        self,
        connection: Connection,
        raw: RawConnection,
        *,
        deferred: bool = False,
        reads_may_write: bool = False,
        is_strict: bool = False,
        had_written: bool = False,
        again: Callable[[], Any] | None = None,
        first: str | None = FIRST,
    ) -> None:
        self.connection, self.raw, self.lock = connection, raw, RLock()
        self._deferred, self._is_strict, self.again = deferred, is_strict, again
        self._had_written, self._reads_may_write = had_written, reads_may_write
        self._first = first  # the savepoint that is there and nobody's yet
        self._savepoints: list[_Savepoint] = []
        self._gave_way: dict[Any, str] = {}  # sessions whose unit had only read, with its name
        self._waiting: list[str] = []
        self._options = connection.engine.get_execution_options()
        raw.operation = ref(self)
        _open[id(connection)] = raw.operation
        self._is_over = False
        if not connection.in_transaction():
            connection.begin()

    def begins(self, session: Any, options: Mapping[str, Any], *, at_once: bool) -> None:
        """A unit of this session comes next; ``at_once``: others may look on its connection."""
        if self._savepoints:
            self._give_way()
        self._beginner, self.at_once = session, self.at_once or at_once
        if options is not self._options:
            level = self._options.get("isolation_level")
            if options.get("isolation_level", level) != level:
                self.refuse(guard.CHOSEN)
            self.connection.execution_options(**options)

    def turn(self, session: Any) -> None:
        """A statement of this session comes next: its unit is to be open."""
        if self._gave_way and session in self._gave_way:
            self.begins(session, self._options, at_once=False)
            self.savepoint(self._gave_way.pop(session))

    def _give_way(self) -> None:
        """Release a unit that has only read: its session sets it again when it is its turn."""
        if self.is_lost():
            self._savepoints.clear()  # SQLAlchemy refuses what comes next
        place = next((n for n, each in enumerate(self._savepoints) if each.is_unit), None)
        if place is None:
            return
        unit = self._savepoints[place]
        is_plain = self.connection.get_execution_options() is self._options
        is_alone = is_plain and not unit.saved and unit is self._savepoints[-1] and not self.is_failed()
        if (unit.did and not self._reads_may_write) or not is_alone or self._has_number(unit):
            self.refuse(OVERLAP)
        self._gave_way[unit.owner] = self._savepoints.pop().name
        self._release(unit)

    def flushes(self, session: Any, flush: Callable[[], None]) -> None:
        """Let a session send its changes, and nothing wait meanwhile."""
        is_waiting = self._savepoints and self._waiting and not self.is_failed()
        if is_waiting and (session.new or session.dirty or session.deleted):
            self.flush()
        before, self._flushing = self._flushing, True
        try:
            flush()
        finally:
            self._flushing = before

    # What SQLAlchemy asks of its dialect.

    def savepoint(self, name: str) -> None:
        """Set a savepoint: the unit of a session that begins, or one inside."""
        self._check()
        owner, self._beginner = self._beginner, None
        new = _Savepoint(name, name, owner)
        if self._savepoints:
            new.is_unit = owner is not None and not any(each.is_unit for each in self._savepoints)
            self._waiting.append(f"SAVEPOINT {name}")
        else:
            new.is_unit = owner is not None
            if self._first is None:
                self._waiting.append(f"SAVEPOINT {name}")
            else:
                new.sql, self._first, new.did = self._first, None, self._had_written
        if self._waiting and (self.at_once or self._flushing or self.is_failed()):
            try:
                self.flush()
            except self.raw.Error:
                self._forget(new)
                raise
        self._savepoints.append(new)

    def release(self, name: str) -> None:
        """Release a savepoint. Raises what a COMMIT would raise, if it is a unit."""
        self._check()
        done = self._savepoints[-1] if self._savepoints else None
        if done is None or done.name != name:
            if any(each.name == name for each in self._savepoints):
                self.refuse(OVERLAP)
            return  # it gave way
        if done.is_unit:
            self._commit(done)
            return
        self._release(done)
        if self._waiting and self.is_failed():
            try:
                self.flush()
            finally:
                self._waiting = []  # the view's rollback ends it
        self._savepoints.pop()
        if self._savepoints:
            self._savepoints[-1].did = self._savepoints[-1].did or done.did
            self._savepoints[-1].saved.update(done.saved)

    def _commit(self, unit: _Savepoint) -> None:
        if self.is_failed():  # the server then replies ROLLBACK to COMMIT, and no error
            self.roll_back_to(unit.name)
            return
        if unit.did and (self._deferred or self._defers):
            self._check_constraints(unit)
        self._savepoints.pop()
        names = [name for name, local in unit.saved.items() if local]
        if names:
            self._waiting.append(settings.put_back(names))
        self._release(unit)
        if AT_ONCE.intersection(names):
            self.flush()
        for outer in self._savepoints:
            outer.has_inner = True
        self.commits += 1
        self.wrote = self.wrote or unit.did
        self.again, self._had_written = None, False  # what was done before the view is committed, too
        self._put_options_back()

    def _check_constraints(self, unit: _Savepoint) -> None:
        self._waiting += CHECK_ALONE if self._deferred else CHECK
        try:
            self.flush(may_fail=True)
        except self.raw.Error:
            self._savepoints.pop()
            self._undo(unit)
            raise

    def roll_back_to(self, name: str) -> None:
        """Roll back to a savepoint and release it, at once: that frees locks."""
        if self.is_parents:
            return  # the session has let go of it, and nothing may be sent
        self._check()
        place = next((n for n, each in enumerate(self._savepoints) if each.name == name), None)
        if place is None:
            return
        done = self._savepoints[place]
        if done.has_inner or any(each.is_unit and each.did for each in self._savepoints[place + 1 :]):
            self.refuse(OVERLAP)
        del self._savepoints[place:]
        if not self._forget(done):
            self._undo(done)
        if done.is_unit:
            self.rollbacks += done.did
            self._put_options_back()

    def _undo(self, done: _Savepoint) -> None:
        if done.sql == FIRST and self.again is not None:
            self._waiting = []
            again, self.again, self._had_written = self.again, None, False
            again()()
            self._first = FIRST
            if self._is_shown:
                self.raw.show()
            return
        self._waiting = [f"ROLLBACK TO {done.sql}", f"RELEASE {done.sql}"]
        if not self.leaving:
            self.flush()

    def _release(self, done: _Savepoint) -> None:
        if not self._forget(done):
            self._waiting.append(f"RELEASE {done.sql}")

    def _forget(self, done: _Savepoint) -> bool:
        """Drop a savepoint that was never sent, with all that waits behind it."""
        begin = f"SAVEPOINT {done.sql}"
        if begin not in self._waiting:
            return False
        del self._waiting[self._waiting.index(begin) :]
        return True

    def _put_options_back(self) -> None:
        """What a session chose for its connection ends with its transaction."""
        options = self.connection.get_execution_options()
        if options is not self._options:
            changed = {name for name in options if options[name] is not self._options.get(name)}
            if changed := changed - LASTING:
                before = {name: self._options.get(name) for name in changed}
                self.connection.execution_options(**before)

    def before(self, cursor: Any, text: str, values: Any) -> None:
        """A statement is about to be sent: refuse it, or send first what belongs in front of it."""
        self._check()
        with self.lock:
            traits = guard.traits_of(text)
            if refused := traits.refused or self._ended_past_us():
                self.refuse(refused)
            if not traits.plain:
                self.raw.is_unsure = True
            if not self._savepoints:
                self.wrote = self.wrote or traits.writes
                if self._first is not None:
                    self._leave_first()
            else:
                if traits.writes or self._reads_may_write:
                    self._savepoints[-1].did = True
                if traits.sets:
                    self._save_settings(text, values)
            self._defers = self._defers or traits.defers
            if self._waiting:
                self.flush()
            if getattr(cursor, "name", None):  # a cursor on the server
                if self.is_failed():
                    self._send([], "SELECT")  # the server says so; psycopg2 would say another thing
                self.show()

    def _ended_past_us(self) -> str | None:
        """Return why nothing more may be sent: outside a transaction, it would commit by itself."""
        return NOT_OURS if self.raw.status() == IDLE else None

    def _leave_first(self) -> None:
        """What comes next is part of no unit."""
        self._waiting.append(f"RELEASE {self._first}")
        self._first = None

    def _save_settings(self, text: str, values: Any) -> None:
        found = guard.settings_of(text, values)
        if found is None:
            self.refuse(guard.NAMELESS)
        known = {name for each in self._savepoints for name, local in each.saved.items() if local}
        if new := {name for name, local in found.items() if local} - known:
            self._waiting.append(settings.save(new))
        for each in self._savepoints:
            each.saved = {name: kept for name, kept in each.saved.items() if name not in found}
        self._savepoints[-1].saved.update(found)

    def flush(self, *, may_fail: bool = False) -> None:
        """Send what waits, in a message of its own. ``may_fail``: that breaks nothing."""
        if self._waiting:
            self._send(self._waiting, may_fail=may_fail)
            self._waiting = []

    def ask(self, question: str) -> Any:
        """The first value of a statement of ours. Raises ``StoreUnavailable`` or ``NotAtomic``."""
        try:
            if self._waiting:
                self.flush()
            return self._send([], question).fetchall()[0][0]
        except self.raw.Error as error:
            raise (
                StoreUnavailable() if self.is_lost() else self.broken or NotAtomic(FAILED)
            ) from error

    def _send(self, first: list[str], text: str = "", *, may_fail: bool = False) -> Any:
        try:
            return self.raw.send(text, None, first)
        except self.raw.Error as error:
            self._error = error
            # In a failed transaction all waits for the view's rollback; on a lost connection nothing
            # does.
            if not may_fail and sqlstate(error) != ABORTED and not self.is_lost():
                self.broken = self.broken or NotAtomic(
                    f"a savepoint of the operation could not be set or ended: {error}"
                )
            raise
        except BaseException as error:
            self.connection.invalidate(error)  # nobody knows what has arrived
            raise

    def show(self) -> None:
        """The driver's connection is about to be used by itself: it sees all, and ends nothing."""
        self.at_once = self.raw.is_unsure = True
        if self._savepoints:
            self._savepoints[-1].did = True
        elif self._first is not None:
            self._leave_first()
        if self._is_shown or self.is_failed():
            return
        self._is_shown = True
        if self._waiting:
            self.flush()
        self.raw.show()
        pooled: Any = self.connection.connection
        pooled.dbapi_connection = _Door(self.raw.driver, self)

    def has_written(self) -> bool:
        """Return True if the open unit has changed or locked a row: asks the server, if it may have."""
        did = [each for each in self._savepoints if each.did]
        return bool(did) and not self.is_failed() and self._has_number(did[0])

    def _has_number(self, savepoint: _Savepoint) -> bool:
        """Ask the server what texts do not tell: whether anything was changed in an open savepoint.

        A subtransaction that did has a number of its own, as have all above it, and holds the lock on
        it until it ends (Postgres manual, "Subtransactions").
        """
        if self.connection.dialect.name != "postgresql":
            return savepoint.did
        return f"SAVEPOINT {savepoint.sql}" not in self._waiting and bool(
            self.ask(
                "SELECT count(*) > 1 FROM pg_locks WHERE pid = pg_backend_pid()"
                " AND locktype = 'transactionid' AND mode = 'ExclusiveLock'"
            )
        )

    def waits_for_commit(self) -> bool:
        """Return True if a commit above the view may still have something to do. Sends nothing."""
        if self.again is not None or any(each.did or each.saved for each in self._savepoints):
            return True
        return self.connection.get_execution_options() != self._options or self.is_failed()

    def is_failed(self) -> bool:
        """Return True if a statement has failed and nobody has rolled back, as far as one can tell."""
        return self.raw.status() == IN_ERROR

    def is_lost(self) -> bool:
        """Return True if the connection is gone."""
        return self.connection.invalidated or self.connection.closed or self.raw.is_lost()

    def is_ours(self, error: BaseException | None) -> bool:
        """Return True if the driver's error came from this connection."""
        return error is not None and error is self._error

    def failed(self, error: BaseException) -> None:
        """A statement of the view has failed."""
        self._error = error
        if self._is_strict and sqlstate(error) == SERIALIZATION_FAILURE:
            # The snapshot is the operation's: no retry in the view can succeed on it.
            self.broken = self.broken or TransactionConflict()

    def refuse(self, what: str) -> NoReturn:
        """Break the operation for good: what the view did would split it from its record."""
        self.broken = NotAtomic(what)
        raise self.broken

    def _check(self) -> None:
        """Raise ``NotAtomic`` for what is sent after the end, by a forked child, or from elsewhere."""
        if self._is_over:
            raise NotAtomic(INHERITED if self.is_parents else ENDED)
        if self.running is not None:
            running, mine = innermost.get(), self.running()
            while running is not mine:  # in the operation's context, copies of it, or operations inside
                if running is None:
                    self.refuse(ELSEWHERE)
                running = running.outer

    # The end.

    def commit(self, text: str, values: dict[str, Any]) -> None:
        """Send the last message, with what waits in front of it, and commit."""
        root = self.connection.get_transaction()
        if root is None or not root.is_active:
            raise NotAtomic(NOT_OURS)
        with self.lock:
            self.running = None  # what a listener for the commit writes is part of it
            self._last = lambda: self.raw.commit(text, values, self._waiting)
            try:
                root.commit()
            finally:
                self._last, self._is_over = None, True

    def end(self) -> None:
        """Roll back what is open, and give the connection back. Does nothing the second time."""
        if self.is_parents:
            return
        with self.lock:
            self.leave()
            give_back(self.connection, self.raw)

    def __del__(self) -> None:
        # An exit may strike before anybody can end it, and a connection in a transaction is a cycle.
        if not self._is_over:
            self.end()

    def leave(self) -> None:
        """Leave the connection to whoever goes on with it."""
        self._is_over = True
        _open.pop(id(self.connection), None)
        if self._is_shown and not (self.connection.invalidated or self.connection.closed):
            pooled: Any = self.connection.connection
            pooled.dbapi_connection = self.raw.driver
        self.raw.operation = bool

    def end_by(self, how: str) -> None:
        """SQLAlchemy commits or rolls back the connection's own transaction."""
        if self._last is not None and how == "commit":
            self._last()
        elif not self._is_over:
            self.refuse(NOT_OURS)


_inherited: list[Connection] = []
"""In a forked child: if one were collected, SQLite would roll back the parent's transaction."""


def leave_to_parent() -> None:
    """In a forked child, refuse what would go on in the parent's transactions."""
    for found in _open.values():
        if (transaction := found()) is not None:
            transaction.is_parents = transaction._is_over = True  # noqa: SLF001 -- of this file
            _inherited.append(transaction.connection)


class _Door:
    """The driver's connection, as a view reaches it: only the operation ends its transaction."""

    def __init__(self, driver: Any, transaction: OperationTransaction) -> None:
        vars(self).update(__wrapped__=driver, _transaction=transaction)

    def commit(self) -> None:
        """Refuse."""
        self._transaction.refuse(NOT_OURS)

    rollback = __enter__ = commit

    def __exit__(self, *_error: object) -> None:
        """It was not entered."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__wrapped__, name, value)


# The hooks on an engine's dialect.

_hooked: WeakSet[Dialect] = WeakSet()
Stray = Callable[[Connection, str], None]


def hook(engine: Engine, stray: Stray) -> None:
    """Let the dialect's public verbs and events come here first; ``stray`` hears the others."""
    dialect = engine.dialect
    if dialect in _hooked:
        return
    _hooked.add(dialect)
    verbs: Any = dialect
    verbs.do_savepoint = partial(_about_savepoint, OperationTransaction.savepoint, verbs.do_savepoint)
    verbs.do_release_savepoint = partial(
        _about_savepoint, OperationTransaction.release, verbs.do_release_savepoint
    )
    verbs.do_rollback_to_savepoint = partial(
        _about_savepoint, OperationTransaction.roll_back_to, verbs.do_rollback_to_savepoint
    )
    verbs.do_commit = partial(_about_transaction, "commit", verbs.do_commit)
    verbs.do_rollback = partial(_about_transaction, "rollback", verbs.do_rollback)

    # Events of the dialect: one of the engine would cost each statement of the application some 200
    # function calls.
    def execute(cursor: Any, statement: Any, parameters: Any, context: Any) -> None:
        found = _open.get(id(context.root_connection)) if _open else None
        if found is not None and (transaction := found()) is not None:
            text = statement if type(statement) is str else _text(statement, cursor)
            transaction.before(cursor, text, parameters)
        elif innermost.get() is not None or watched.get() is not None:
            stray(context.root_connection, statement)

    def execute_without_parameters(cursor: Any, statement: Any, context: Any) -> None:
        execute(cursor, statement, None, context)

    def failed(context: Any) -> None:
        transaction = context.connection and transaction_of(context.connection)
        if transaction is not None:
            transaction.failed(context.original_exception)

    event.listen(dialect, "handle_error", failed)
    for name in ("do_execute", "do_executemany"):
        event.listen(dialect, name, execute, insert=True)
    event.listen(dialect, "do_execute_no_params", execute_without_parameters, insert=True)


def _text(statement: Any, cursor: Any) -> str:
    """What only the driver understands: bytes, or what it composes."""
    if isinstance(statement, bytes):
        return statement.decode("utf-8", "replace")
    return str(statement.as_string(cursor) if hasattr(statement, "as_string") else statement)


def _about_savepoint(
    ours: Callable[[OperationTransaction, str], None],
    theirs: Callable[[Connection, str], None],
    connection: Connection,
    name: str,
) -> None:
    transaction = transaction_of(connection)
    if transaction is None:
        theirs(connection, name)
        return
    kind = transaction.raw.Error
    try:
        ours(transaction, name)
    except kind as error:  # as SQLAlchemy raises those of a statement
        raise exc.DBAPIError.instance(None, None, error, kind, dialect=connection.dialect) from error


def _about_transaction(how: str, theirs: Callable[[Any], None], pooled: Any) -> None:
    raw = taken.get(innermost_of(pooled.dbapi_connection)) if taken else None
    if raw is None:
        theirs(pooled)
    elif operation := raw.operation():
        operation.end_by(how)
    else:
        raw.put_right()  # an exit has struck: whoever had it could not give it back
