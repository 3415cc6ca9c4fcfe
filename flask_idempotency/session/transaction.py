"""The transaction of an operation: one connection of SQLAlchemy's, whose COMMIT is ours.

A session joins it by SQLAlchemy's own recipe (:mod:`.sessions`): each of its transactions is a
savepoint here, a *unit*. What SQLAlchemy asks of its dialect, to set, release or roll back to a
savepoint, to commit and to roll back, comes here first, and so does each statement, by the dialect's
events.

A savepoint is set, and rolled back to, at once. Two things wait, as they change nothing that anybody
could see: a RELEASE, and the savepoint of a unit that a query begins. The query takes them along in its
message, if the driver can; otherwise they are sent in front of what comes next.

The operation is found by SQLAlchemy's connection, and where only the driver's is known, by that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn
from weakref import WeakSet, ref

from sqlalchemy import Connection, Dialect, Engine, event, exc

from flask_idempotency.core.errors import (
    ConfigurationError,
    IdempotencyError,
    NotAtomic,
    StoreUnavailable,
    TransactionConflict,
    sqlstate,
)
from flask_idempotency.drivers.raw_connection import IDLE, IN_ERROR, RawConnection, give_back, taken
from flask_idempotency.drivers.raw_connection import innermost as innermost_of
from flask_idempotency.private import is_block, savepoint_of

from . import guard

SERIALIZATION_FAILURE = "40001"

FIRST = "idempotency_first"
"""The savepoint that is made behind the row's lock, in the same message, for the first unit."""


CHECK_NOW = "SET CONSTRAINTS ALL IMMEDIATE"

CHECK = [
    "SAVEPOINT idempotency_check",
    CHECK_NOW,
    "ROLLBACK TO idempotency_check",
]
"""Every deferred check now, as in a COMMIT; what is deferred stays so."""

HAS_WRITTEN = """SELECT count(*) FILTER (WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock'),
       coalesce(bool_or(locktype = 'relation' AND mode NOT IN ('AccessShareLock', 'RowShareLock')
                        AND relkind IS DISTINCT FROM 'S'), false),
       coalesce(bool_or(locktype = 'advisory' OR locktype = 'relation' AND mode <> 'AccessShareLock'
                        AND relkind IS DISTINCT FROM 'S'), false)
  FROM pg_locks LEFT JOIN pg_class ON pg_class.oid = relation WHERE pid = pg_backend_pid()"""
"""What texts do not tell: how many of the transaction and its open savepoints have a number; whether
any table was changed; and whether one was changed or locked.

A transaction, and a savepoint in it, gets a number when it first changes or locks a row, or draws from
a sequence; so do all above it. It holds the lock on that until it ends (Postgres manual,
"Subtransactions"). The locks of tables are held until the end of the whole transaction, or until a
rollback to a savepoint before them."""

LASTING = {"isolation_level", "postgresql_readonly", "postgresql_deferrable"}
"""Options of a connection that no transaction of it ends."""

OVERLAP = (
    "two sessions or connections of the view work at the same time, and one would undo or commit what"
    " is the other's: commit or close one before using the other"
)
NOT_OURS = (
    "the view ended the operation's transaction: inside an atomic operation use db.session.commit() and"
    " rollback(), not those of a connection"
)
FAILED = (
    "a statement failed and its error was caught without db.session.rollback(), in the view or before"
    " it, so its transaction cannot commit: call that where the error is caught"
)
UNREAD = (
    "the server could not read a query behind a commit, because of its syntax or a character, so it"
    " carried out nothing of that message, not even the savepoint to which a rollback goes back:"
    " correct the query, or send it within db.session.begin_nested()"
)
LATE = (
    "the view's session or connection is used where the operation is not: after its end, outside of"
    " its context, or in a child process that was forked in the view. Use a session or connection of"
    " its own there, in an application context of its own (with app.app_context():)"
)

EARLIER = (
    "the engine has a listener for do_execute, do_executemany or do_execute_no_params, which may"
    " execute a statement before the extension has seen it: add it after idempotency.init_app()"
)

innermost: ContextVar[Any] = ContextVar("flask_idempotency_running", default=None)
"""What runs, or ran, in this context, inside what it calls ``outer``. In most requests there is none.

Not on the request: threads, tasks and greenlets that share one may each run operations.
"""

_open: dict[int, ref[OperationTransaction]] = {}
"""By SQLAlchemy's connection, until the operation's transaction leaves that."""


def transaction_of(connection: Connection) -> OperationTransaction | None:
    """The operation's transaction that is open on a connection, or None."""
    found = _open.get(id(connection))
    return None if found is None else found()


@dataclass(eq=False)
class _Savepoint:
    """One of the savepoints that are open, from outermost to innermost.

    ``sql`` is its name on the server, and ``owner`` the session whose unit it is, if it is one.
    ``did`` says that a statement in it may have done more than read.
    """

    name: str
    sql: str
    owner: Any
    did: bool


_NAME = attrgetter("name")


@dataclass(eq=False, repr=False)
class OperationTransaction:
    """The transaction on ``connection``, which is ``raw`` and holds the record's row.

    The row is locked there, and behind that the savepoint ``first`` is set. ``deferred`` says that the
    database has constraints that are deferred by definition, and ``reads_may_write`` that no text tells
    what a SELECT does. ``again`` is there for a session that was in the transaction before the view: it
    rolls all of that back, begins once more, and locks the row; ``had_written`` says that the session
    had written. ``queries`` says that a session asks for the connection to send a query, ``wrote`` that
    a committed unit did more than read, and ``has_lost`` that one failed and its commit kept nothing.
    ``broken`` is why the operation can no longer commit, even if the view catches the error;
    ``is_over`` says that nothing more is to be sent.

    ==============  ========================  ===================================================
    It is           as is told by             What may come next
    ==============  ========================  ===================================================
    fresh           ``first``                 a unit, whose savepoint that is; the last message
    in a unit       ``_savepoints``           its session's statements, its RELEASE or ROLLBACK TO
    between units   no savepoint              a unit; a statement by the connection; the last message
    failed          ``is_failed()``           a rollback; a commit keeps nothing, and is noted
    shown           ``raw.is_shown``          the same, but the driver refuses to end it
    broken          ``broken``                what the view does, in vain: the end rolls back
    lost            ``is_lost()``             nothing: SQLAlchemy asks for a rollback
    leaving         ``leaving``               the ends of its units, then the last message or ROLLBACK
    over            ``is_over``               nothing: ``NotAtomic``
    ==============  ========================  ===================================================
    """

    connection: Connection
    raw: RawConnection
    deferred: bool = False
    reads_may_write: bool = False
    is_strict: bool = False
    had_written: bool = False
    again: Callable[[], Any] | None = None
    first: str | None = FIRST

    broken: IdempotencyError | None = field(default=None, init=False)
    error: BaseException | None = field(default=None, init=False)
    is_over = True  # until it has begun
    wrote = leaving = has_lost = queries = _hurries = False
    _savepoints: list[_Savepoint] = field(default_factory=list, init=False)
    _waiting: list[str] = field(default_factory=list, init=False)
    _beginner: Any = field(default=None, init=False)  # the session whose unit the next savepoint is
    _last: Callable[[], None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        engine = self.connection.engine
        self._options = engine.get_execution_options()
        # The session's get_bind() returns the connection, and Flask-AppBuilder asks it for its name.
        vars(self.connection).update(name=engine.name, driver=engine.driver, url=engine.url)
        key = id(self.connection)
        # An exit may strike before it has begun: then it ends nothing, and only goes. Another one that
        # has begun on its connection meanwhile stays.
        forget = lambda dead: _open.get(key) is dead and _open.pop(key)  # noqa: E731
        self.raw.operation = _open[key] = ref(self, forget)
        self.is_over = False
        if not self.connection.in_transaction():
            self.connection.begin()

    def begins(self, session: Any, options: Mapping[str, Any]) -> None:
        """A unit of this session comes next: inside that of another one, if that has only read.

        When it is committed, the other one begins once more behind it.
        """
        outer = self._savepoints
        if outer and (outer[0].owner is None or self._is_used()) and not self.is_lost():
            self.refuse(OVERLAP)  # where it is lost, SQLAlchemy refuses what comes
        self._beginner = session
        found = self.connection.get_execution_options()
        if options is not found:  # what a session chose for its connection ends with its transaction
            if any(options[name] != found.get(name) for name in LASTING & options.keys()):
                self.refuse(guard.REFUSED)
            names = {*found, *options} - LASTING
            self.connection.execution_options(**{name: options.get(name) for name in names})

    def turn(self, session: Any) -> None:
        """A statement of this session comes next: it would be part of the innermost unit."""
        for each in reversed(self._savepoints):
            if each.owner is session:
                if self._waiting and not self.queries and not self.is_failed():
                    self.flush()
                return
            if each.owner is not None:
                self.refuse(OVERLAP)
        if session.is_active:  # else SQLAlchemy asks for a rollback
            self.refuse(NOT_OURS)

    # What SQLAlchemy asks of its dialect.

    def savepoint(self, name: str) -> None:
        """Set a savepoint: the unit of a session that begins, or one inside."""
        owner, self._beginner = self._beginner, None
        if self.is_over:
            raise NotAtomic(LATE)
        sql, self.first = self.first or name, None
        if sql is name:
            self._waiting.append(f"SAVEPOINT {name}")
            if owner is None or not self.queries or self._hurries or self._is_heard(owner):
                self.flush()
        self._savepoints.append(_Savepoint(name, sql, owner, self.had_written))
        self.had_written = False

    def _is_heard(self, session: Any) -> bool:
        """Return True if somebody may use the driver's connection before a query is sent."""
        engine: Any = self.connection.engine
        return bool(
            session.dispatch.after_begin
            or engine.dispatch.before_execute
            or engine.dispatch.before_cursor_execute
            or len(engine.dialect.dispatch.do_execute) > 1  # one is ours
        )

    def release(self, name: str) -> None:
        """Release a savepoint. Raises what a COMMIT would raise, if it is a unit."""
        if self.is_over:
            raise NotAtomic(LATE)
        if self._savepoints and self._savepoints[-1].name != name:
            self._end_inside(name, "commit")
        if not self._savepoints or self._savepoints[-1].name != name:
            self.refuse(OVERLAP)
        done = self._savepoints[-1]
        if done.owner is not None:
            self._commit(done)
            return
        self._savepoints.pop()  # if its end fails, SQLAlchemy never asks for it again
        if self._savepoints:
            self._savepoints[-1].did |= done.did
        self._waiting.append(f"RELEASE {done.sql}")
        if self._hurries or self.is_failed():
            self.flush()  # the server says so, if it has failed or is gone

    def _end_inside(self, name: str, how: str) -> None:
        """End what a connection has opened inside a unit, as the end of a transaction does.

        So does a session on the session's connection, which nobody may ever end: SQLAlchemy-Continuum
        has one for each transaction. What is another session's unit stays.
        """
        if self.is_failed():
            return
        if not any(each.name == name and each.owner is not None for each in self._savepoints):
            return
        while (last := self._savepoints[-1]).name != name and last.owner is None:
            nested = self.connection.get_nested_transaction()
            if nested is None or savepoint_of(nested) != last.name or is_block(nested):
                return  # SQLAlchemy has forgotten it, or its end is still to come
            getattr(nested, how)()

    def _commit(self, unit: _Savepoint) -> None:
        if self.is_failed():  # the server then replies ROLLBACK to COMMIT, and no error
            self.has_lost = True
            self.roll_back_to(unit.name)
            return
        if unit.did and self.deferred:
            self._waiting += CHECK
            try:
                self.flush()
            except exc.DBAPIError:
                self.roll_back_to(unit.name)
                raise
        outer = self._savepoints
        outer.pop()
        self._waiting.append(f"RELEASE {unit.sql}")
        self.wrote = self.wrote or unit.did
        self.again = None  # what was done before the view is committed, too
        if outer:  # they have only read: see begins
            self._waiting += [f"RELEASE {outer[0].sql}", *(f"SAVEPOINT {each.sql}" for each in outer)]
            self.flush()

    def roll_back_to(self, name: str) -> None:
        """Roll back to a savepoint and release it, at once: that frees locks."""
        if self.is_over or name not in map(_NAME, self._savepoints):
            return
        if self._savepoints[-1].name != name:
            self._end_inside(name, "rollback")
        place = list(map(_NAME, self._savepoints)).index(name)
        done, *inner = self._savepoints[place:]
        del self._savepoints[place:]
        if not self.leaving and any(each.did and each.owner is not None for each in inner):
            self.refuse(OVERLAP)
        if done.sql == FIRST and self.again is not None:
            again, self.again, self._waiting = self.again, None, []
            self._exchange(again)
            self.first = FIRST
        else:
            if f"SAVEPOINT {done.sql}" not in self._waiting:  # else no statement came
                self._waiting = []
            self._waiting += [f"ROLLBACK TO {done.sql}", f"RELEASE {done.sql}"]
            if not self.leaving:
                try:
                    self.flush()
                except exc.DBAPIError:
                    if done.owner is not None:
                        self.broken = self.broken or NotAtomic(UNREAD)
                    raise

    def before(self, cursor: Any, text: object, *more: Any) -> bool:
        """A statement is about to be sent: refuse it, or send first what belongs in front of it.

        Returns True if the statement was sent, too.
        """
        if self.is_over:  # or the operation is of a parent process
            raise NotAtomic(LATE)
        if not isinstance(text, str) or (traits := guard.traits_of(text)).is_refused:
            self.refuse(guard.REFUSED)
        if self.raw.status() == IDLE:
            self.refuse(NOT_OURS)  # outside a transaction, what comes next would commit by itself
        self.raw.is_unsure |= traits.unprepares
        self._hurries |= traits.ends
        if self._savepoints:
            self._savepoints[-1].did |= traits.writes or self.reads_may_write
        else:
            self.wrote |= traits.writes
        is_on_server = bool(getattr(cursor, "name", None))
        if self._waiting and self.queries and self.first is None:
            is_plain = type(cursor) is self.raw.plain_cursor and not is_on_server
            # With values for one execution: without any, psycopg 3 sends a text in another way.
            if is_plain and more[0] and isinstance(more[0], dict):
                waiting, self._waiting = self._waiting, []
                do_execute = partial(self.connection.dialect.do_execute, cursor)
                self.raw.execute_behind(waiting, cursor, lambda ours: do_execute(ours + text, *more))
                return True
        if self._waiting or self.first is not None:
            self.flush()
        if is_on_server:
            self.show()
        return False

    def flush(self) -> None:
        """Send what waits, in a message of its own."""
        if self.first is not None:  # what comes next is part of no unit
            self._waiting.append(f"RELEASE {self.first}")
            self.first = None
        if self._waiting:  # once: what has failed is not sent again
            waiting, self._waiting = self._waiting, []
            self._exchange(partial(self.raw.send, "", None, waiting))

    def _exchange(self, send: Callable[[], Any]) -> Any:
        """Send something of ours. After an error, all waits for a rollback, as after the view's own."""
        if self.raw.status() == IDLE:  # SQLite would begin another transaction
            self.refuse(NOT_OURS)
        try:
            return send()
        except IdempotencyError as error:
            self.broken = error
            raise
        except self.raw.Error as error:
            self.error = error
            if self.is_lost():
                self.connection.invalidate(error)  # so that nobody above the view meets it again
                self.broken = self.broken or StoreUnavailable()
            # As SQLAlchemy raises those of a statement.
            dialect = self.connection.dialect
            raise exc.DBAPIError.instance(None, None, error, self.raw.Error, dialect=dialect) from error
        except BaseException as error:
            self.connection.invalidate(error)  # nobody knows what has arrived
            raise

    def show(self) -> None:
        """The driver's connection is about to be used by itself: it sees all, and ends nothing."""
        self.raw.is_unsure = self._hurries = True
        if self._savepoints:
            self._savepoints[-1].did = True
        if self.is_failed():  # nothing can be sent before the view's rollback
            return
        self.flush()
        if not self.raw.is_shown:
            self.raw.show()
            if not self.raw.is_shown:
                pooled: Any = self.connection.connection
                pooled.dbapi_connection = _Door(self.raw.driver, partial(self.refuse, NOT_OURS))

    def has_written(self, *, or_locked: bool = False) -> bool:
        """Return True if an open unit has changed anything: asks the server, if it may have.

        ``or_locked`` a row. So counts behind a committed change, too: the server does not tell which.
        Raises ``StoreUnavailable`` or ``NotAtomic``.
        """
        if self.is_failed() or not any(each.did for each in self._savepoints):
            return False
        if self.connection.dialect.name != "postgresql":
            return True
        try:
            self.flush()
            numbers, has_changed, _ = self._exchange(partial(self.raw.send, HAS_WRITTEN))[0][0]
            return bool(numbers > 1 and (has_changed or or_locked))
        except exc.DBAPIError as error:
            raise self.broken or NotAtomic(FAILED) from error

    def waits_for_commit(self) -> bool:
        """Return True if a commit above the view may still have something to do. Sends nothing."""
        return self.again is not None or self._is_used()

    def _is_used(self) -> bool:
        for each in self._savepoints:
            if each.did:
                return True
        return self.connection.get_execution_options() != self._options or self.is_failed()

    def is_failed(self) -> bool:
        """Return True if a statement has failed and nobody has rolled back, as far as one can tell."""
        return self.raw.status() == IN_ERROR

    def is_lost(self) -> bool:
        """Return True if the connection is gone."""
        return self.connection.invalidated or self.connection.closed or self.raw.is_lost()

    def failed(self, error: BaseException) -> None:
        """A statement of the view has failed."""
        self.error = error
        if self.is_strict and sqlstate(error) == SERIALIZATION_FAILURE:
            # The snapshot is the operation's: no retry in the view can succeed on it.
            self.broken = self.broken or TransactionConflict()

    def refuse(self, what: str) -> NoReturn:
        """Break the operation for good: what the view did would split it from its record."""
        self.broken = NotAtomic(what)
        raise self.broken

    # The end.

    def commit(self, text: str, values: dict[str, Any]) -> None:
        """Send the last message, with what waits in front of it, and commit."""
        if self.deferred:  # before PostgreSQL 18 a trigger runs as the role that COMMIT finds: ours
            self._waiting.append(CHECK_NOW)
        root: Any = self.connection.get_transaction()
        self._last = lambda: self.raw.commit(text, values, self._waiting)
        try:
            root.commit()
        finally:
            self._last, self.is_over = None, True

    def end(self) -> None:
        """Roll back what is open, and give the connection back. Does nothing the second time."""
        if self.connection not in _inherited:
            self.leave()
            give_back(self.connection, self.raw)

    def __del__(self) -> None:
        # An exit may strike before anybody can end it, and a connection in a transaction is a cycle.
        if not self.is_over:
            self.end()

    def leave(self) -> None:
        """Leave the connection to whoever goes on with it."""
        self.is_over = True
        _open.pop(id(self.connection), None)
        if self.raw.is_unsure and not (self.connection.invalidated or self.connection.closed):
            pooled: Any = self.connection.connection
            if isinstance(pooled.dbapi_connection, _Door):
                pooled.dbapi_connection = self.raw.driver
        self.raw.operation = bool

    def end_by(self, how: str) -> None:
        """SQLAlchemy commits or rolls back the connection's own transaction."""
        if self._last is not None and how == "commit":
            self._last()
        elif not self.is_over:
            self.refuse(NOT_OURS)


_inherited: list[Connection] = []
"""In a forked child: if one were collected, SQLite would roll back the parent's transaction."""


def leave_to_parent() -> None:
    """In a forked child, refuse what would go on in the parent's transactions."""
    for found in _open.values():
        if (transaction := found()) is not None:
            transaction.is_over = True
            _inherited.append(transaction.connection)


class _Door:
    """The driver's connection, as a view reaches it: only the operation ends its transaction."""

    def __init__(self, driver: Any, refuse: Callable[[], NoReturn]) -> None:
        vars(self).update(__wrapped__=driver, commit=refuse, rollback=refuse)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__wrapped__, name, value)


# The hooks on an engine's dialect.

_hooked: WeakSet[Dialect] = WeakSet()


EXECUTE = ("do_execute", "do_executemany", "do_execute_no_params")
"""The events of a dialect that come before each statement. A listener that returns True has executed
it, and those behind it are not called. So ours must be the first; SQLAlchemy puts none in front."""


def hook(engine: Engine, stray: Callable[[Connection, str], None]) -> None:
    """Let the dialect's public verbs and events come here first; ``stray`` hears the others.

    Raises ``ConfigurationError`` if a listener for its statements is there already.
    """
    dialect = engine.dialect
    if dialect in _hooked:
        return
    if any(len(getattr(dialect.dispatch, name)) for name in EXECUTE):
        raise ConfigurationError(EARLIER)
    _hooked.add(dialect)
    verbs = {
        "do_savepoint": partial(_about_savepoint, OperationTransaction.savepoint),
        "do_release_savepoint": partial(_about_savepoint, OperationTransaction.release),
        "do_rollback_to_savepoint": partial(_about_savepoint, OperationTransaction.roll_back_to),
        "do_commit": partial(_about_transaction, "commit"),
        "do_rollback": partial(_about_transaction, "rollback"),
    }
    for name, ours in verbs.items():
        setattr(dialect, name, partial(ours, getattr(dialect, name)))

    # Events of the dialect: one of the engine would cost each statement of the application some 200
    # function calls.
    def execute(cursor: Any, statement: Any, *more: Any) -> bool:
        root = more[-1].root_connection
        found = _open.get(id(root)) if _open else None
        if found is not None and (transaction := found()) is not None:
            return transaction.before(cursor, statement, *more)
        if _open and innermost.get() is not None:
            stray(root, str(statement))
        return False

    def failed(context: Any) -> None:
        transaction = context.connection and transaction_of(context.connection)
        if transaction is not None:
            transaction.failed(context.original_exception)

    event.listen(dialect, "handle_error", failed)
    for name in EXECUTE:
        event.listen(dialect, name, execute)


def _about_savepoint(ours: Any, theirs: Any, connection: Connection, name: str) -> None:
    found = _open.get(id(connection)) if _open else None
    if found is None or (transaction := found()) is None:
        theirs(connection, name)
    else:
        ours(transaction, name)


def _about_transaction(how: str, theirs: Callable[[Any], None], pooled: Any) -> None:
    raw = taken.get(innermost_of(pooled.dbapi_connection)) if taken else None
    if raw is None:
        theirs(pooled)
    elif operation := raw.operation():
        operation.end_by(how)
    else:
        raw.put_right()  # an exit has struck: whoever had it could not give it back
