"""Units of work in PostgreSQL: savepoints held back, and a transaction's end imitated.

Each unit of the view (see :mod:`.units`) is a savepoint. SAVEPOINT and RELEASE
return nothing, so they wait here and travel in front of the next statement: a view needs no more round
trips than without us. Two things make that safe:

* A message of several statements is parsed as a whole before the first one runs. So nothing travels in
  front of a statement that was never parsed: what waits is sent on its own before it, once for each
  text.
* What waits is dropped only once the server has it: values that cannot be bound lose nothing.

ROLLBACK TO frees locks that somebody may be waiting for, so it is sent at once.

All statements of the connection pass here, so this is also where a view's own ``COMMIT``,
``ROLLBACK`` or ``BEGIN``, sent as text, is refused: it would end the transaction that holds the
record's row. A view that reaches for the driver's connection gets a door to it (:class:`DriverDoor`),
whose ``commit()`` and ``rollback()`` are the unit's.

The hooks are public: psycopg2's ``connection.cursor_factory``, with a subclass of whatever cursor the
application has chosen, and the methods of SQLAlchemy's dialect that set an isolation level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

import psycopg2
from psycopg2 import extensions
from sqlalchemy import Connection as SQLAlchemyConnection
from sqlalchemy import Dialect

from flask_idempotency.core import session_statements as sql
from flask_idempotency.core import sqltext
from flask_idempotency.core.errors import NotAtomic, TransactionConflict
from flask_idempotency.core.sqltext import (
    CONSTRAINTS,
    CURSOR,
    ON_COMMIT,
    READS,
    SAVEPOINT,
    SETS,
    UNSURE,
    WRITES,
)
from flask_idempotency.stores.postgres.failures import NO_SAVEPOINT, SERIALIZATION_FAILURE, UNREAD
from flask_idempotency.stores.postgres.wire import RawConnection

from .units import NAME, StandIn, Units

Connection = extensions.connection
Cursor = extensions.cursor

_BEGIN = f"SAVEPOINT {NAME}"
_RELEASE = f"RELEASE SAVEPOINT {NAME}"
_UNDO = (f"ROLLBACK TO SAVEPOINT {NAME}", _RELEASE)

_ENDED = extensions.TRANSACTION_STATUS_IDLE
_FAILED = extensions.TRANSACTION_STATUS_INERROR

_AT_ONCE = {"idle_in_transaction_session_timeout", "idle_session_timeout", "transaction_timeout"}
"""Settings that work while nothing is sent."""

_parsed: dict[str, None] = {}
_PARSED = 4096
"""How many texts we remember as parsed by the server. When there are more, we forget them all."""

_ON_COMMIT = "idempotency_on_commit"
"""Where a pooled connection notes which temporary tables a COMMIT empties or drops."""


@dataclass(frozen=True)
class Facts:
    """What was asked once of an engine's database.

    ``settings`` are statements that a transaction of ours begins with; for the others see
    :data:`~flask_idempotency.core.session_statements.FACTS`.
    """

    settings: str = ""
    deferred: tuple[str, ...] = ()
    has_deferrable: bool = False
    set_in_functions: frozenset[str] = frozenset()


class PostgresUnits(Units):
    """The units of one operation. ``isolation`` is its transaction's, as the server names it."""

    def __init__(self, wire: RawConnection, facts: Facts, isolation: str) -> None:
        super().__init__(wire.engine, wire.fairy)
        self.driver: Connection = wire.driver
        self.top = StandIn(self, is_top=True)
        self._facts, self._isolation = facts, isolation
        self._held: list[str] = []
        self.carried: dict[StandIn, sql.Carried] = {}
        self._remembered: set[str] = set()
        self._kept: set[str] = set()
        self._checks_out = wire.has_listener
        self._checking_out = False
        self._on_commit: dict[str, bool] = self.fairy.info.setdefault(_ON_COMMIT, {})
        self._on_commit_before: dict[str, bool] | None = None  # the statement that is being sent
        self._ours: BaseException | None = None
        self.cursor_factory: Any = self.driver.cursor_factory
        self.driver.cursor_factory = self._make

    def close(self) -> None:
        """Give the connection its own cursors back; forget what is held."""
        super().close()
        self.driver.cursor_factory = self.cursor_factory
        self._held = []

    def adopt(self, connection: SQLAlchemyConnection, settings: sql.Carried | None) -> None:
        """See :class:`Units`."""
        stand_in = self._put_under(connection)
        if settings is not None:
            self.carried[stand_in] = settings

    def commit(self, owner: StandIn) -> None:
        """See :class:`Units`. What was set before the operation survives an empty unit's commit."""
        settings = self.carried.pop(owner, None) if self.carried else None
        if settings is not None and settings.lasting and not self.is_closed:
            self._held.append(settings.lasting)
        super().commit(owner)

    def rollback(self, owner: StandIn) -> None:
        """See :class:`Units`."""
        if self.carried:
            self.carried.pop(owner, None)
        constraints = self._open is owner and self.traits & CONSTRAINTS
        super().rollback(owner)
        if constraints:  # the server keeps what was set in a released savepoint
            self._held += self._constraints_back()

    def cursor(self, owner: StandIn, *args: Any, **kwargs: Any) -> Any:
        """A cursor of the application's class, whose statements pass here."""
        own = kwargs.pop("cursor_factory", None) if kwargs else None
        kind = _subclass(own) if own else self._factory()
        if args or (kwargs and kwargs.get("name") is not None):
            kind = _named(kind)
        cursor: Any = self.driver.cursor(*args, cursor_factory=kind, **kwargs)
        cursor.units, cursor.owner = self, owner
        return cursor

    def _factory(self) -> type[Cursor]:
        if self.cursor_factory is not None:
            return _subclass(self.cursor_factory)
        if type(self.driver) is Connection:
            return _subclass(Cursor)
        # A class of the application's may have cursors of its own, such as LoggingConnection.
        driver: Any = self.driver
        driver.cursor_factory = None
        try:
            return _subclass(type(driver.cursor()))
        finally:
            driver.cursor_factory = self._make

    def _make(self, *args: Any, **kwargs: Any) -> Cursor:
        """A cursor for a listener of the pool, which is given the driver's connection itself."""
        cursor: Any = self._factory()(*args, **kwargs)
        cursor.units, cursor.owner = self, self.top
        return cast("Cursor", cursor)

    def admit(self, owner: StandIn, text: str, message: bytes | None = None) -> None:
        """A statement is about to be sent; ``message`` is the text with its values bound."""
        if self.is_closed:
            raise NotAtomic("the operation has ended: this connection was part of it, and is no more")
        if sqltext.is_suspect(text) and sqltext.ends_transaction(text, backslashes=self._backslashes()):
            self.refuse("the view sent a statement that begins or ends a transaction")
        if self.has_ended():
            self.refuse("the view ended the operation's transaction through the driver's connection")
        traits = sqltext.traits_of(text)
        self._on_commit_before = None
        if not self._checking_out:
            self._take_turn(owner, traits)
        if traits & SAVEPOINT and self.note_savepoint(text) is None:
            self._nested.append(text)  # one of several statements: it lasts as long as the unit
        if self._checking_out or not owner.is_top:
            if traits & UNSURE and self._facts.set_in_functions:
                self._remember(self._facts.set_in_functions)
            if traits & (SETS | ON_COMMIT) or (traits & WRITES and self._on_commit):
                self._expect(traits, text if message is None else message.decode("latin-1"))

    def _expect(self, traits: int, text: str) -> None:
        """Note what the end of the unit has to put right."""
        if traits & SETS:
            if sqltext.chooses_isolation(text):
                self.refuse("the view chose the isolation of its transaction, which has begun already")
            for_connection, for_transaction = sqltext.settings_of(text)
            if both := for_connection & for_transaction:
                self.refuse(
                    f"the view set {min(both)} in two ways in one message, which cannot be told apart"
                )
            if not for_connection | for_transaction and not traits & UNSURE:
                self.refuse(
                    "the view sent a statement that changes a setting whose name cannot be read"
                )
            self._kept |= for_connection
            # What was set for the connection just before comes back: so it is remembered anew.
            self._remembered -= for_transaction & self._kept
            self._kept -= for_transaction
            self._remember(for_transaction)
        self._on_commit_before = dict(self._on_commit)
        if text.lstrip()[:4].lower() in ("crea", "drop"):
            for name in [name for name in self._on_commit if name in text]:
                del self._on_commit[name]
        if traits & ON_COMMIT:
            tables = sqltext.on_commit_tables(text)
            if not tables:
                self.refuse("the view made a temporary table with ON COMMIT in a way that is not known")
            self._on_commit.update(tables)

    def _remember(self, names: Iterable[str]) -> None:
        # Those of the transaction itself come back with the savepoint.
        new = {name for name in names if not name.startswith("transaction_")} - self._remembered
        if new:
            self._remembered |= new
            self._held.append(sql.remember(new))

    def _begin(self, owner: StandIn) -> None:
        self._remembered, self._kept = set(), set()
        self._held.append(_BEGIN)
        if self._checks_out:
            self._check_out()
        settings = self.carried.pop(owner, None) if self.carried else None
        if settings is not None:
            self._kept |= settings.for_connection
            self._remember(settings.for_transaction)
            self._held.append(settings.everything)
            self.traits |= SETS

    def _check_out(self) -> None:
        """Let the pool's listeners do what they do for each transaction: it begins with a check-out."""
        self._checking_out = True
        try:
            record = self.fairy._connection_record  # noqa: SLF001
            self.engine.pool.dispatch.checkout(self.driver, record, self.fairy)
        finally:
            self._checking_out = False

    def _release(self) -> None:
        if _BEGIN in self._held and not self.traits & SETS:  # nothing was sent in it
            del self._held[self._held.index(_BEGIN) :]
            return
        facts = self._facts
        checks = facts.deferred and self.traits & (WRITES | UNSURE)
        if checks or self.traits & CONSTRAINTS:
            self._check_constraints()
            self._held += self._constraints_back()
        if back := self._remembered - self._kept:
            self._held.append(sql.settings_back(back))
        self._held.append(_RELEASE)
        if self.traits & CURSOR:
            self._held.append("CLOSE ALL")
        if self.traits & CURSOR or back & _AT_ONCE:
            self.flush()  # what reads on asks the server itself, and a time-out does not wait
        if self._on_commit:
            self._held += [_after_commit(name, drops) for name, drops in self._on_commit.items()]

    def _constraints_back(self) -> list[str]:
        return sql.constraints_back(self._facts.deferred, others=self._facts.has_deferrable)

    def _check_constraints(self) -> None:
        """Raise what a COMMIT would, and undo the unit as a COMMIT that fails does."""
        try:
            self._send(sql.CHECK)
        except psycopg2.Error as error:
            self.note(error)
            self._open, self.traits = None, READS
            if not self.is_lost():
                self._undo()
            raise

    def _undo(self, *, at_once: bool = True) -> None:
        if _BEGIN in self._held:
            del self._held[self._held.index(_BEGIN) :]
            return
        self._held[:] = _UNDO
        if at_once and not self._leaving:
            self.flush()

    def _give_way(self) -> None:
        if self.is_failed():
            self.refuse("a session of the view had failed, without rollback(), when another was used")
        if self._isolation in sql.STRICT:
            self.refuse(
                f"two sessions or connections of the view at {self._isolation.upper()}, which would see"
                " what the other one commits"
            )
        super()._give_way()

    def _did_more_than_read(self) -> bool:
        self.flush()
        with Cursor(self.driver) as cursor:
            cursor.execute(sql.DID_MORE_THAN_READ)
            return cursor.fetchone() != (False,)

    def savepoint(self, owner: StandIn, text: str) -> bool:
        """Hold back a statement about a savepoint, or drop what it ends; False if it must be sent."""
        failed = self.is_failed()
        if not failed:
            self.admit(owner, "")
        found = sqltext.savepoint_of(text)
        if found is None or failed:
            return False
        verb, name = found
        if verb == "RELEASE" and name not in self._nested:
            return False  # for the server to refuse, now
        made = f"SAVEPOINT {name}"
        if verb == "ROLLBACK" and made not in self._held:
            return False  # it frees locks: at once
        self.note_savepoint(text)
        if verb == "SAVEPOINT" or made not in self._held:
            self._held.append(text)
            return True
        place = len(self._held) - 1 - self._held[::-1].index(made)  # nothing was sent in it
        del self._held[place if verb == "RELEASE" else place + 1 :]
        return True

    def prefix(self, text: str, message: bytes) -> bytes:
        """What waits, if it may travel in front of ``message``; otherwise it is sent now."""
        if not self._held:
            return b""
        if text not in _parsed or not (message.isascii() or self._speaks_utf8()):
            self.flush()
            return b""
        return self.waiting()

    def waiting(self) -> bytes:
        """What waits, as a prefix. It is forgotten with :meth:`sent`."""
        return ";".join([*self._held, ""]).encode(self._encoding())

    def sent(self, text: str | None = None) -> None:
        """The server has what was waiting, and the statement with the text was parsed."""
        self._held = []
        if text is not None and text not in _parsed and len(text) < 10_000:
            if len(_parsed) >= _PARSED:
                _parsed.clear()
            _parsed[text] = None

    def flush(self) -> None:
        """Send what waits on its own."""
        if self._held:
            try:
                with Cursor(self.driver) as cursor:
                    cursor.execute(self.waiting())
            except psycopg2.Error as error:
                self.note(error)
                raise
            finally:
                self.sent()

    def _send(self, statement: str) -> None:
        self._held.append(statement)
        self.flush()

    def note(self, error: psycopg2.Error) -> None:
        """A statement on the operation's connection has failed."""
        self._ours = error
        if self._on_commit_before is not None:
            self._on_commit.clear()
            self._on_commit.update(self._on_commit_before)
        if error.pgcode == NO_SAVEPOINT and NAME in str(error):
            self.broken = NotAtomic(
                "a savepoint of the operation is gone: a statement of the view ended it, or the server"
                " could not read the message that it travelled in"
            )
        if error.pgcode == SERIALIZATION_FAILURE and self._isolation in sql.STRICT:
            # The snapshot is the operation's: no retry in the view can succeed on it.
            self.broken = TransactionConflict()

    def is_ours(self, error: BaseException | None) -> bool:
        """Whether the driver's error came from the operation's connection."""
        return error is not None and error is self._ours

    def is_lost(self) -> bool:
        """Whether the connection is gone."""
        return bool(self.driver.closed) or self.fairy.dbapi_connection is None

    def has_ended(self) -> bool:
        """Whether the driver's own doors have ended the transaction."""
        return self.driver.get_transaction_status() == _ENDED

    def is_failed(self) -> bool:
        """Whether a statement has failed and nobody has rolled back."""
        return self.driver.get_transaction_status() == _FAILED

    def door(self, owner: StandIn) -> DriverDoor:
        """The driver's own connection."""
        return DriverDoor(self, owner)

    def reach(self, owner: StandIn) -> None:
        """Somebody uses the driver in a way that does not pass here: a large object, for example."""
        self._take_turn(owner, WRITES)
        self.flush()
        self.show()

    def show(self) -> None:
        """Let psycopg2 see the transaction, as one of two phases, of which it commits no part itself.

        In autocommit mode it refuses named cursors and large objects. It sends a BEGIN of its own,
        which changes nothing (the server warns); in a transaction that has failed the server would
        refuse that.
        """
        if self.driver.autocommit and not self.is_failed():
            self.driver.autocommit = False
            try:
                self.driver.tpc_begin(self.driver.xid(0, "flask-idempotency", ""))
            except BaseException:
                self.driver.autocommit = True
                raise

    def check_isolation(self, what: str, value: Any) -> None:
        """Refuse an isolation level, or read only, for a connection inside the operation.

        The operation's transaction has begun already, on what the engine is set to.
        """
        level = str(value).replace("_", " ").lower() if what == "isolation level" else value
        if level in (self._isolation, False, None):
            return
        self.refuse(
            f"the view chose another {what} for its connection ({value}), and the operation's"
            f" transaction has begun already ({self._isolation}): set it on the engine"
            " (SQLALCHEMY_ENGINE_OPTIONS)"
        )

    def _backslashes(self) -> bool:
        return self._parameter("standard_conforming_strings") == "off"

    def _speaks_utf8(self) -> bool:
        return self._parameter("server_encoding") == self._parameter("client_encoding") == "UTF8"

    def _encoding(self) -> str:
        return extensions.encodings.get(self.driver.encoding, "utf-8")

    def _parameter(self, name: str) -> str | None:
        return self.driver.info.parameter_status(name)


def _after_commit(name: str, drops: bool) -> str:
    """What a COMMIT does to a temporary table, if it is there, whatever the role is by now."""
    table = sql.literal(name.strip('"') if name.startswith('"') else name.lower())
    what = f"DROP TABLE pg_temp.{name}" if drops else f"DELETE FROM pg_temp.{name}"
    return f"""DO $idempotency$ DECLARE role text := current_setting('role'); owner text; BEGIN
SELECT pg_get_userbyid(relowner) INTO owner FROM pg_class
 WHERE relnamespace = pg_my_temp_schema() AND relname = {table};
IF FOUND THEN
  PERFORM set_config('role', owner, true); {what}; PERFORM set_config('role', role, true);
END IF; END $idempotency$"""


def guard_isolation(dialect: Dialect) -> None:
    """Let the dialect refuse another isolation level for a connection inside an operation."""
    for method, what in (
        ("set_isolation_level", "isolation level"),
        ("set_readonly", "read only"),
        ("set_deferrable", "deferrable"),
    ):
        before = getattr(dialect, method)
        if not hasattr(before, "__wrapped__"):
            setattr(dialect, method, _checking(before, what))


def _checking(change: Callable[[Any, Any], None], what: str) -> Callable[[Any, Any], None]:
    @wraps(change)
    def change_or_refuse(driver: Any, value: Any) -> None:
        if isinstance(driver, DriverDoor):
            driver.__dict__["_units"].check_isolation(what, value)
        else:
            change(driver, value)

    return change_or_refuse


_subclasses: dict[type[Cursor], type[Cursor]] = {}


def _subclass(base: type[Cursor]) -> type[Cursor]:  # noqa: C901 -- a class, each method short
    """The application's cursor class, with its statements passing through the units."""
    if base in _subclasses:
        return _subclasses[base]
    takes_text = base is not Cursor  # a class of one's own may put a comment in front

    class OperationCursor(base):  # type: ignore[valid-type, misc]
        units: PostgresUnits
        owner: StandIn

        @property
        def connection(self) -> Any:
            """The driver's connection; notes when somebody uses more than its state."""
            return DriverDoor(self.units, self.owner)

        def execute(self, query: Any, vars: Any = None) -> Any:  # noqa: A002
            units = self.units
            text = query if type(query) is str else _text(query, units.driver)
            if "SAVEPOINT" in text and units.savepoint(self.owner, text):
                return None
            if self.name is not None:
                self._admit(text, READS if self.withhold else CURSOR)
                if units.is_failed():  # the server says so; psycopg2 would complain of something else
                    return _noting(units, Cursor(units.driver).execute, "SELECT 1")
                units.show()
                return _noting(units, super().execute, query, vars)
            message: bytes = self.mogrify(query, vars)  # bound first: this may fail
            units.admit(self.owner, text, message)
            message = units.prefix(text, message) + message
            given: Any = message.decode(units._encoding()) if takes_text else message  # noqa: SLF001
            return _noting(units, super().execute, given, text=text)

        def executemany(self, query: Any, vars_list: Any) -> Any:
            self._admit(_text(query, self.units.driver))
            return _noting(self.units, super().executemany, query, vars_list)

        def callproc(self, procname: Any, parameters: Any = None) -> Any:
            self._admit("call")
            return _noting(self.units, super().callproc, procname, parameters)

        def copy_expert(self, sql: Any, *args: Any, **kwargs: Any) -> Any:
            self._admit(_text(sql, self.units.driver))
            return _noting(self.units, super().copy_expert, sql, *args, **kwargs)

        def copy_from(self, *args: Any, **kwargs: Any) -> Any:
            self._admit("copy")
            return _noting(self.units, super().copy_from, *args, **kwargs)

        def copy_to(self, *args: Any, **kwargs: Any) -> Any:
            self._admit("select")
            return _noting(self.units, super().copy_to, *args, **kwargs)

        def _admit(self, text: str, traits: int = READS) -> None:
            """For calls that cannot carry a prefix."""
            self.units.admit(self.owner, text)
            self.units.traits |= traits
            self.units.flush()

    return _subclasses.setdefault(base, OperationCursor)


_STATE = {
    *("notices", "notifies", "encoding", "info", "closed", "dsn", "server_version", "log", "filter"),
    *("get_transaction_status", "get_parameter_status", "get_backend_pid", "get_dsn_parameters"),
    *("isolation_level", "readonly", "deferrable", "cursor_factory", "protocol_version"),
}
"""What may be asked of the driver's connection at any time."""

_ENDINGS = {
    *("set_isolation_level", "set_session", "reset", "set_client_encoding"),
    *("tpc_begin", "tpc_prepare", "tpc_commit", "tpc_rollback", "tpc_recover"),
}
"""What would end the operation's transaction, or change what it is."""

_MODES = ("autocommit", "isolation_level", "readonly", "deferrable")


class DriverDoor:
    """The driver's connection, as a view reaches it: commit and rollback are the unit's.

    It is no psycopg2 connection to psycopg2's own functions (``register_type``, ``quote_ident``): those
    take a cursor as well.
    """

    def __init__(self, units: PostgresUnits, owner: StandIn) -> None:
        self.__dict__["_units"], self.__dict__["_owner"] = units, owner

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        """See psycopg2."""
        return self._owner.cursor(*args, **kwargs)

    def commit(self) -> None:
        """Commit the unit."""
        self._owner.commit()

    def rollback(self) -> None:
        """Roll the unit back."""
        self._owner.rollback()

    def close(self) -> None:
        """Close the connection, which ends the operation."""
        self._units.driver.close()

    def __enter__(self) -> DriverDoor:
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        self.commit() if kind is None else self.rollback()

    @property
    def autocommit(self) -> bool:
        """False: it is only our way of sending."""
        return False

    @property
    def status(self) -> int:
        """A transaction is open."""
        return extensions.STATUS_BEGIN

    def __getattr__(self, name: str) -> Any:
        units = self._units
        if name in _ENDINGS:
            units.refuse(f"the view called {name}() of the driver's connection")
        if name == "cursor_factory":
            return units.cursor_factory
        if name not in _STATE:
            units.reach(self._owner)
        return getattr(units.driver, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "cursor_factory":
            self._units.cursor_factory = value
            return
        if name in _MODES:
            if value != getattr(self, name):
                self._units.refuse(f"the view set {name} of the driver's connection")
            return
        setattr(self._units.driver, name, value)


def _in_its_unit(fetch: Any) -> Callable[..., Any]:
    def fetch_or_refuse(cursor: Any, *args: Any, **kwargs: Any) -> Any:
        if not cursor.withhold and not cursor.units.is_current(cursor.owner, cursor.unit):
            raise psycopg2.ProgrammingError("named cursor isn't valid anymore")
        return fetch(cursor, *args, **kwargs)

    return fetch_or_refuse


_named_kinds: dict[type[Cursor], type[Cursor]] = {}


def _named(base: type[Cursor]) -> type[Cursor]:
    """A cursor on the server, which ends with its unit as it would with a transaction."""
    if base in _named_kinds:
        return _named_kinds[base]

    class NamedCursor(base):  # type: ignore[valid-type, misc]
        unit = 0

        def execute(self, query: Any, vars: Any = None) -> Any:  # noqa: A002
            result = super().execute(query, vars)
            self.unit = self.units.begun
            return result

        fetchone, fetchmany, fetchall, __next__ = map(
            _in_its_unit, (base.fetchone, base.fetchmany, base.fetchall, base.__next__)
        )

        def close(self) -> None:
            if self.withhold or not self.unit or self.units.is_current(self.owner, self.unit):
                super().close()
            # Otherwise it ended with its unit, and psycopg2's CLOSE would fail the transaction.

    return _named_kinds.setdefault(base, NamedCursor)


def _noting(
    units: PostgresUnits, call: Callable[..., Any], *args: Any, text: str | None = None, **kwargs: Any
) -> Any:
    """Send something; what waited in front of it has then reached the server, if it was parsed."""
    try:
        result = call(*args, **kwargs)
    except psycopg2.Error as error:
        units.note(error)
        units.sent(None if error.pgcode in UNREAD else text)
        raise
    units.sent(text)
    return result


def _text(query: Any, driver: Connection) -> str:
    """The query as the view wrote it, without the values, which are a client's."""
    if isinstance(query, str):
        return query
    if isinstance(query, bytes):
        return query.decode("latin-1")
    return str(query.as_string(driver))  # psycopg2.sql
