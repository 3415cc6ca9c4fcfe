"""A *unit of work*: a savepoint in the operation's transaction, in place of a transaction of its own.

An operation has one connection and one transaction. A session of the view does not notice: it gets an
engine whose ``connect()`` gives an ordinary SQLAlchemy connection, and under it, in the place of the
pooled connection, a :class:`StandIn`. What SQLAlchemy asks of that, ``commit()`` and ``rollback()``,
ends a unit: RELEASE or ROLLBACK TO. So everything above the driver behaves as it does without us:
``begin``, ``commit`` and ``rollback`` events, nested transactions, errors, execution options, which
live as long as the connection.

There is one place, so at most one unit is open. Another session, or another connection of a view, may
take its turn while the open unit has done nothing but read: then nothing is lost when it gives way.
Otherwise the operation fails: what is committed inside another's savepoint would share its fate. The
same holds for ``current_operation.connection``, whose statements are in no unit, unless they only read.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import lru_cache, partial
from threading import RLock
from typing import Any, NoReturn

from sqlalchemy import Connection, Engine, PoolProxiedConnection

from flask_idempotency.core.errors import IdempotencyError, NotAtomic
from flask_idempotency.core.process import INHERITED
from flask_idempotency.drivers.port import FAILED, IDLE, KINDS
from flask_idempotency.drivers.sqlalchemy_private import StandsUnder, put_under
from flask_idempotency.drivers.sqltext import (
    LOCKS,
    READS,
    SAVEPOINT,
    SUSPECT,
    TRAITS,
    UNSURE,
    WRITES,
    ends_transaction,
    savepoint_of,
)

from .questions import Carried

NAME = "idempotency_"
"""What the name of a unit's savepoint begins with; its number follows.

No two have the same name: one that was never made is never mistaken for an older one."""

_DATA = WRITES | UNSURE  # what a savepoint's rollback undoes for certain
_EMPTY = "\0"
"""In front of the name of a savepoint that was rolled back to: nobody needs it, but it is there."""

ENDED = "the operation has ended: this connection was part of it, and is no more"


class StandIn(StandsUnder, PoolProxiedConnection):
    """Stands for the pooled connection, under one SQLAlchemy connection.

    ``is_top`` says that what goes through it is part of no unit (``current_operation.connection``).
    """

    def __init__(self, units: Units, *, is_top: bool = False) -> None:
        self.units = units
        self.is_top = is_top
        self.is_returned = False

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        """A cursor whose statements are part of a unit."""
        return self._there().cursor(self, *args, **kwargs)

    def commit(self) -> None:
        """Commit the unit: its savepoint is released."""
        with self.units.lock:
            self.units.commit(self)

    def rollback(self) -> None:
        """Roll the unit back."""
        with self.units.lock:
            self.units.rollback(self)

    def close(self) -> None:
        """Roll back, as the pool does, but keep the connection: the operation needs it."""
        self.is_returned = True
        with self.units.lock:
            self.units.rollback(self)

    def invalidate(self, e: BaseException | None = None, soft: bool = False) -> None:  # noqa: ARG002
        """Let go of a lost connection. Refused while it is not lost."""
        self.units.invalidate(e)

    def detach(self) -> None:
        """Refuse: the connection is the operation's."""
        self._there().refuse("the view detached the operation's connection from its pool")

    @property
    def is_valid(self) -> bool:
        """True if there is a connection to end a transaction on."""
        return not self.units.is_closed

    @property
    def is_detached(self) -> bool:
        """Never."""
        return False

    @property
    def driver_connection(self) -> Any:  # type: ignore[override]
        """The driver's own connection, for what SQLAlchemy lacks."""
        if self.units.is_parents:
            raise NotAtomic(INHERITED)
        return self._there().door(self)

    @property
    def dbapi_connection(self) -> Any:  # type: ignore[override]
        """See :attr:`driver_connection`."""
        return self.driver_connection

    @property
    def info(self) -> dict[Any, Any]:
        """The application's notes about the pooled connection."""
        return self._there().fairy.info

    @property
    def record_info(self) -> dict[Any, Any] | None:
        """See :attr:`info`."""
        return self._there().fairy.record_info

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith("tpc_"):
            self._there().refuse(
                "the view began a transaction in two phases (twophase=True), but the operation commits"
                " in one: leave twophase=True out of the session's options"
            )
        return getattr(self._there().fairy, name)

    def _there(self) -> Units:
        if self.is_returned:
            raise self.units.engine.dialect.loaded_dbapi.InterfaceError(
                "this connection was returned to its pool"
            )
        return self.units


class Units:
    """The units of work on one connection. This one sends each savepoint, on any database.

    ``engine`` is the store's, ``fairy`` the pooled connection, in a transaction that is ours to end.
    ``traits`` are what the open unit did (see :mod:`~flask_idempotency.drivers.sqltext`), and ``wrote``
    says whether an earlier, committed one did more than read. ``commits`` counts units, ``rollbacks``
    those that had written. ``broken`` is why the operation can no longer commit, even if the view
    catches the error. ``carried`` is what was set before the operation, until a
    session goes on with it. ``lock`` is held over whatever is sent: a thread that the view has left
    behind must find the transaction open, or send nothing, as its connection may be somebody else's.
    ``top`` is what stands under :attr:`connection`, and ``present`` whose unit is open, or was last.
    """

    is_parents = False  # in a forked child: the transaction is not its own

    def __init__(self, engine: Engine, fairy: PoolProxiedConnection) -> None:
        self.engine, self.fairy = engine, fairy
        self.lock = RLock()
        self.broken: IdempotencyError | None = None
        self.is_closed = False
        self.traits = READS
        self.wrote = False
        self.begun = self.commits = self.rollbacks = 0
        self._open: StandIn | None = None
        self._nested: list[str] = []
        self._before: list[int] = []  # what the unit had done when each of these was made
        self._around: list[str] = []  # savepoints of the top's
        self._spanning = 0  # how many of these a unit that wrote has been committed in
        self._leaving = False
        self._engines: dict[Engine, Engine] = {}
        self.carried: dict[StandIn, Carried] = {}
        self.top = self.present = StandIn(self, is_top=True)
        self._connection: Connection | None = None

    @property
    def connection(self) -> Connection:
        """A connection in the transaction, and in none of the view's units of work."""
        if self._connection is None:
            self._connection = operation_engine(self.engine, lambda: self.top).connect()
            self._connection.begin()  # the transaction that is open already: sends nothing
        return self._connection

    def bind(self, engine: Engine) -> Engine:
        """The engine that a session works on in place of ``engine`` while the operation runs."""
        if engine not in self._engines:
            self._engines[engine] = operation_engine(engine, partial(StandIn, self))
        return self._engines[engine]

    def adopt(self, connection: Connection, settings: Carried | None) -> None:
        """Let a connection that was in use before the operation go on in it.

        ``settings`` are what its transaction had set.
        """
        if settings is not None:
            raise NotAtomic("settings of the transaction before the view cannot be carried into it")
        self.put_under(connection)

    def put_under(self, connection: Connection) -> StandIn:
        """Let a connection work in these units from now on."""
        stand_in = StandIn(self)
        put_under(connection, stand_in)
        return stand_in

    @property
    def may_have_work(self) -> bool:
        """True if the open unit has failed, or its texts are not all plain reads. Sends nothing."""
        return self._open is not None and (self.traits != READS or self.state() == FAILED)

    @property
    def has_open_work(self) -> bool:
        """True if the open unit has done anything but read, or has failed."""
        known = self.traits & ~(WRITES | UNSURE)
        return self._open is not None and (bool(known) or self.is_failed() or self._would_lose())

    def is_failed(self) -> bool:
        """Return True if a statement has failed and nobody has rolled back."""
        return self.state() == FAILED

    def is_current(self, owner: StandIn, number: int) -> bool:
        """Return True if the owner's unit of that number (``begun``) is still open."""
        return owner.is_top or (self._open is owner and self.begun == number)

    def has_unsaved_writes(self) -> bool:
        """Return True if the open unit has changed data. Asks the server, unless all are reads."""
        if self._open is None or self.is_failed():
            return False
        return bool(self.traits & (WRITES | UNSURE)) and self._did_more_than_read()

    def is_bound(self, bind: object) -> bool:
        """Return True if ``bind`` is one of :meth:`bind`."""
        return any(bind is bound for bound in self._engines.values())

    def is_joined(self, connection: Connection) -> bool:
        """Return True if an SQLAlchemy connection works in these units."""
        below: Any = connection.connection
        return isinstance(below, StandIn) and below.units is self

    def cursor(self, owner: StandIn, *args: Any, **kwargs: Any) -> Any:
        """A cursor of the driver's whose statements pass through :meth:`enter`."""
        return WatchedCursor(self.fairy.cursor(*args, **kwargs), self, owner)

    def enter(self, owner: StandIn, text: str) -> None:
        """A statement is about to be sent: open a unit, or refuse it."""
        if self.is_closed:
            raise NotAtomic(INHERITED if self.is_parents else ENDED)
        traits = TRAITS[text]
        if traits & SUSPECT and ends_transaction(text):
            self.refuse("the view sent a statement that begins or ends a transaction")
        if self.state() == IDLE:
            self.refuse("a statement of the view, or a trigger, ended the operation's transaction")
        self._take_turn(owner, traits & ~SUSPECT)

    def _take_turn(self, owner: StandIn, traits: int) -> None:
        if owner.is_top and traits == READS:
            return
        if self._open is not owner:
            if self._open is not None:
                self._give_way(owner)
            self._open, self.traits, self._nested, self._before = None, READS, [], []
            self.present = owner
            if owner.is_top:
                self.wrote = self.wrote or traits != SAVEPOINT
                if not self.begun:
                    self._before_units()
                return
            self._open = owner
            self.begun += 1
            self._begin(owner)
        self.traits |= traits & ~SAVEPOINT

    def note_savepoint(self, owner: StandIn, text: str) -> None:
        """Keep account of a savepoint, if the text is about one. It is about to be sent."""
        found = savepoint_of(text)
        if found is None:
            if TRAITS[text] & SAVEPOINT:  # one of several statements
                if owner.is_top:
                    self.refuse(
                        "the view sent a savepoint of current_operation.connection together with other"
                        " statements, so nobody knows what it is around: send it on its own"
                    )
                self._nested.append(text)  # it lasts as long as the unit
                self._before.append(self.traits)
            return
        (self._note_around if owner.is_top else self._note_nested)(*found)

    def _note_nested(self, verb: str, name: str) -> None:
        if verb == "SAVEPOINT":
            self._nested.append(name)
            self._before.append(self.traits)
        elif (place := _last(self._nested, name)) is not None:
            is_back = verb == "ROLLBACK"
            if is_back:  # what was written since is undone
                self.traits &= ~_DATA | self._before[place]
            self._nested[place:] = [_EMPTY + name] if is_back else []
            self._before[place:] = [self.traits] if is_back else []

    def _note_around(self, verb: str, name: str) -> None:
        if verb == "SAVEPOINT":
            self._around.append(name)
        elif (place := _last(self._around, name)) is not None:
            if verb == "ROLLBACK":  # it is still there afterwards
                place += 1
                if self._spanning >= place:
                    self.refuse(
                        "the view rolled back to a savepoint of current_operation.connection, in which"
                        " db.session had committed"
                    )
            del self._around[place:]
            self._spanning = min(self._spanning, place)

    @property
    def _is_nested(self) -> bool:
        return any(not name.startswith(_EMPTY) for name in self._nested)

    def commit(self, owner: StandIn) -> None:
        """End the owner's unit as a COMMIT would. Raises what a COMMIT would raise."""
        if self.carried:
            self._carry(self.carried.pop(owner, None))
        if owner.is_top:
            self.refuse("the view ended the operation's transaction")
        if self.is_parents:
            raise NotAtomic(INHERITED)
        if self._open is not owner or self.is_closed:
            return
        state = self.state()
        if state == IDLE:
            self.refuse("the view ended the operation's transaction through the driver's connection")
        if state == FAILED:  # the server then replies ROLLBACK to COMMIT, and no error
            self.rollback(owner)
            return
        self._release()
        if self.traits & (WRITES | UNSURE | LOCKS):
            self.wrote, self._spanning = True, len(self._around)
        self.commits += 1
        self._open, self.traits = None, READS

    ends = "commit", "rollback"

    def end(self, how: str) -> None:
        """End the open unit in one of two ways (``ends``), whoever's it is."""
        with self.lock:
            if self._open is not None:
                getattr(self._open, how)()

    def rollback(self, owner: StandIn) -> None:
        """End the owner's unit as a ROLLBACK would."""
        if self.carried:
            self.carried.pop(owner, None)
        if owner.is_top and not self._leaving:
            self.refuse("the view ended the operation's transaction")
        if self._open is not owner or self.is_closed:
            return
        if self.traits & (WRITES | UNSURE):
            self.rollbacks += 1
        self._open, self.traits = None, READS
        if not self.is_lost() and self.state() != IDLE:
            self._undo()

    def _give_way(self, to: StandIn) -> None:  # noqa: ARG002
        """Let another connection have its turn, if the open unit has nothing to lose."""
        if self._is_nested or self.traits & ~(WRITES | UNSURE) or self._would_lose():
            self.refuse(
                "two sessions or connections of the view have uncommitted work at the same time:"
                " commit one before using the other"
            )
        self._undo(at_once=False)

    def _would_lose(self) -> bool:
        """Return True if a rollback of the open unit would undo anything: the server knows."""
        return self.traits != READS

    def _did_more_than_read(self) -> bool:
        """Return True if the open unit has changed or locked a row: the server knows, texts do not."""
        return True

    def leave(self) -> None:
        """From now on a rollback travels with the operation's last message."""
        self._leaving = True

    def close(self) -> None:
        """The transaction has ended. Waits for what another thread is sending."""
        with self.lock:
            self.is_closed = True
            self._open = None

    def leave_to_parent(self) -> None:
        """In a child that was forked in the view: refuse what would go on in the transaction."""
        self.lock = RLock()  # another thread of the parent may have had the old one
        self.is_parents = self.is_closed = True
        self._open = None
        self.broken = NotAtomic(INHERITED)

    def refuse(self, what: str) -> NoReturn:
        """Break the operation for good: what the view did would split it from its record.

        ``what`` may say after a colon what to do in its place.
        """
        if ": " not in what:
            what += "; inside an atomic operation use db.session.commit(), rollback() or begin_nested()"
        self.broken = NotAtomic(what)
        raise self.broken

    def door(self, owner: StandIn) -> Any:
        """The driver's own connection, past the statements that are watched."""
        self._take_turn(owner, UNSURE)
        return self.fairy.driver_connection

    def invalidate(self, error: BaseException | None) -> None:
        """Throw a lost connection away. Refused while it is not lost."""
        if not self.is_lost():
            self.refuse("the view invalidated the operation's connection")
        if self.fairy.dbapi_connection is not None:
            self.fairy.invalidate(error)

    # What each database does in its own way:

    def is_lost(self) -> bool:
        """Return True if the connection is gone."""
        return self.fairy.dbapi_connection is None or bool(
            getattr(self.fairy.driver_connection, "closed", False)
        )

    def state(self) -> int | None:
        """That of the transaction: FAILED, so that it refuses all statements, or IDLE if it was ended.

        On SQLite a trigger may end it. A driver of PostgreSQL begins it with the first statement.
        """
        driver = self.fairy.driver_connection
        if getattr(driver, "in_transaction", True) is False:
            return IDLE
        status = getattr(getattr(driver, "info", None), "transaction_status", None)  # libpq's
        return FAILED if status == FAILED else None

    def _before_units(self) -> None:
        """Something is about to be sent that is part of no unit, and none has begun yet."""

    def _carry(self, settings: Carried | None) -> None:
        """What was set before the operation survives an empty unit's commit."""

    def _begin(self, owner: StandIn) -> None:  # noqa: ARG002
        self._send(f"SAVEPOINT {NAME}{self.begun}")

    def _release(self) -> None:
        self._send(f"RELEASE SAVEPOINT {NAME}{self.begun}")

    def _undo(self, *, at_once: bool = True) -> None:  # noqa: ARG002
        self._send(f"ROLLBACK TO SAVEPOINT {NAME}{self.begun}")
        self._release()

    def _send(self, statement: str) -> None:
        cursor = self.fairy.cursor()
        try:
            cursor.execute(statement)
        finally:
            cursor.close()


class WatchedCursor:
    """Any driver's cursor; its statements pass through the units first."""

    def __init__(self, cursor: Any, units: Units, owner: StandIn) -> None:
        self.__dict__.update(_cursor=cursor, _units=units, _owner=owner)

    def execute(self, statement: Any, *args: Any) -> Any:
        """See the driver's."""
        with self._units.lock:
            self._enter(statement)
            try:
                return self._cursor.execute(statement, *args)
            except sqlite3.DatabaseError as error:
                if "not authorized" in str(error):  # by the store, which lets nobody end it
                    self._units.refuse("the view sent a statement that begins or ends a transaction")
                raise

    def executemany(self, statement: Any, *args: Any) -> Any:
        """See the driver's."""
        with self._units.lock:
            self._enter(statement)
            return self._cursor.executemany(statement, *args)

    def _enter(self, statement: Any) -> None:
        text = statement.decode("latin-1") if isinstance(statement, bytes) else str(statement)
        self._units.enter(self._owner, text)
        self._units.note_savepoint(self._owner, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._cursor, name, value)

    def __iter__(self) -> Any:
        return iter(self._cursor)


def _last(names: list[str], name: str) -> int | None:
    """The place of the last savepoint of this name."""
    known = (name, _EMPTY + name)
    return next((place for place in reversed(range(len(names))) if names[place] in known), None)


def units_of(hold: Any) -> Units:
    """The units of a hold's transaction. A custom store need not have them."""
    units: Units | None = getattr(hold, "units", None)
    if units is not None:
        return units
    connection: Connection = hold.connection
    return Units(connection.engine, connection.connection)


def operation_engine(engine: Engine, connect: Callable[[], StandIn]) -> Engine:
    """An engine with the events and options of ``engine``, whose connections stand on ``connect``."""
    engine.dispatch  # noqa: B018 -- made when first asked for, and then shared by the two
    base: Any = type(engine)
    bound: Any = object.__new__(_kind(base))
    bound.__dict__.update(engine.__dict__)
    bound.raw_connection, bound.source = connect, engine
    return bound  # type: ignore[no-any-return]


@lru_cache(KINDS)
def _kind(base: type[Engine]) -> type[Engine]:
    pool = property(lambda self: self.source.pool)  # not the one it had when it was made
    return type("OperationEngine", (base,), {"raw_connection": None, "pool": pool})
