"""Units of work in PostgreSQL: savepoints held back, and a transaction's end imitated.

Each unit of the view (see :mod:`.units`) is a savepoint. SAVEPOINT and RELEASE
return nothing, so they wait here and travel in front of the next statement: a view needs no more round
trips than without us. Two things make that safe:

* A message of several statements is parsed as a whole before the first one runs, and psycopg2 writes
  the values into it. So what waits travels only in front of a text that was parsed before, with values
  of the same shape; otherwise it is sent on its own first.
* What waits is dropped only once the server has it: values that cannot be bound lose nothing.

If a savepoint is lost all the same, the next statement about it fails, as each has a name of its own.

ROLLBACK TO frees locks that somebody may be waiting for, so it is sent at once.

All statements of the connection pass here, so this is also where a view's own ``COMMIT``,
``ROLLBACK`` or ``BEGIN``, sent as text, is refused: it would end the transaction that holds the
record's row. A view that reaches for the driver's connection gets a door to it (:class:`DriverDoor`),
whose ``commit()`` and ``rollback()`` are the unit's.

The hooks are public: the driver's (see :mod:`flask_idempotency.drivers`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import Connection as SQLAlchemyConnection

from flask_idempotency.core.errors import NotAtomic, TransactionConflict, sqlstate
from flask_idempotency.core.process import INHERITED
from flask_idempotency.drivers import sqltext
from flask_idempotency.drivers.port import IDLE
from flask_idempotency.drivers.raw_connection import RawConnection
from flask_idempotency.drivers.sqlalchemy_private import tell_of_check_out
from flask_idempotency.drivers.sqlstates import NO_SAVEPOINT, SERIALIZATION_FAILURE
from flask_idempotency.drivers.sqltext import (
    CONSTRAINTS,
    CURSOR,
    ON_COMMIT,
    READS,
    SAVEPOINT,
    SETS,
    SUSPECT,
    UNSURE,
    WRITES,
)

from . import questions as sql
from .units import ENDED, NAME, StandIn, Units

EARLY = f"SAVEPOINT {NAME}0"
"""Made behind the row's lock, in the same message, for the first unit. A driver that cannot have the
rows of a statement in front of another one (``ANSWERS_EACH``) has none."""

_AT_ONCE = {"idle_in_transaction_session_timeout", "idle_session_timeout"}
"""Settings that work while nothing is sent."""


@dataclass
class Facts:
    """What was asked once of an engine's database.

    ``settings`` are statements that a transaction of ours begins with; for the others see
    :data:`~flask_idempotency.session.questions.FACTS`. ``is_stale`` once something has proved
    wrong: then the next operation asks again.
    """

    settings: str = ""
    deferred: bool = False
    deferrable: bool = False
    set_in_functions: frozenset[str] = frozenset()
    set_for_connection: frozenset[str] = frozenset()
    reads_may_write: bool = False
    ended_in_functions: tuple[str, ...] = ()
    functions_defer: bool = False
    is_stale: bool = False


class PostgresUnits(Units):
    """The units of one operation. ``isolation`` is its transaction's, as the server names it."""

    def __init__(self, wire: RawConnection, facts: Facts, isolation: str) -> None:
        super().__init__(wire.engine, wire.fairy)
        self.port, self.driver = wire.port, wire.driver
        self.state = wire.status  # type: ignore[method-assign]
        self.facts, self._isolation = facts, isolation
        self.waiting: list[str] = []  # what travels in front of the next statement
        self._savepoint = ""  # the statement that makes the open unit's
        self._early = EARLY if self.port.ANSWERS_EACH else ""
        self._remembered: set[str] = set()
        self._kept: set[str] = set()
        self._checks_out = wire.has_listener
        self._checking_out = False
        self._temporary: list[str] = []  # what each commit does to temporary tables
        self._ending: list[str] = []  # the same to those of the open unit
        self._constraints_are_set = False
        self._every = UNSURE if facts.reads_may_write else READS  # what every statement may do
        may_defer = facts.functions_defer and (facts.deferred or facts.deferrable)
        self._unsure = CONSTRAINTS if may_defer else READS
        self._ours: BaseException | None = None
        self.cursors = self.port.cursors(self)
        self.cursor = self.cursors.new  # type: ignore[method-assign]
        self.door = partial(DriverDoor, self)  # type: ignore[method-assign]

    def close(self) -> None:
        """Give the connection its own cursors back; forget what is held."""
        super().close()
        self.cursors.close()
        self.waiting = []

    def adopt(self, connection: SQLAlchemyConnection, settings: sql.Carried | None) -> None:
        """See :class:`Units`."""
        stand_in = self.put_under(connection)
        if settings is not None:
            self.carried[stand_in] = settings

    def _carry(self, settings: sql.Carried | None) -> None:
        if settings is not None and settings.lasting and not self.is_closed:
            self.waiting.append(settings.lasting)

    def admit(self, owner: StandIn, text: str, sent: tuple[Any, Any, Any] | None = None) -> None:
        """A statement is about to be ``sent``: by a cursor, as it was written, with values."""
        if self.is_closed:
            raise NotAtomic(INHERITED if self.is_parents else ENDED)
        traits = sqltext.TRAITS[text]
        if traits & SUSPECT and sqltext.ends_transaction(text, backslashes=self._backslashes()):
            self.refuse("the view sent a statement that begins or ends a transaction")
        if self.state() == IDLE:
            self.refuse("the view ended the operation's transaction through the driver's connection")
        traits = traits & ~SUSPECT | self._every
        if traits & UNSURE:
            traits |= self._unsure
        if not self._checking_out:
            self._take_turn(owner, traits)
        if traits & SAVEPOINT:
            self.note_savepoint(owner, text)
        if self._checking_out or not owner.is_top:
            if traits & UNSURE and self.facts.set_in_functions:
                self._set_locally(self.facts.set_in_functions)
            if traits & (SETS | ON_COMMIT | CONSTRAINTS) or self._constraints_are_set:
                self._expect(traits, text if sent is None else self.port.bound(*sent))

    def _expect(self, traits: int, text: str) -> None:
        """Note what the end of the unit has to put right."""
        if traits & SETS:
            if sqltext.chooses_isolation(text):
                self.refuse(
                    "the view chose the isolation of its transaction, or that it only reads, and it has"
                    " begun already: choose it on the engine (SQLALCHEMY_ENGINE_OPTIONS)"
                )
            for_connection, for_transaction = sqltext.settings_of(text)
            if both := for_connection & for_transaction:
                self.refuse(
                    f"the view set {min(both)} in two ways in one message, which cannot be told apart:"
                    " send two statements"
                )
            unclear = not for_connection | for_transaction and not traits & UNSURE
            if unclear or "*" in for_transaction:
                self.refuse(
                    "the view sent a statement that changes a setting whose name cannot be read:"
                    " write the name into it"
                )
            if "transaction_timeout" in for_connection | for_transaction:
                self.refuse(
                    "the view set transaction_timeout, which would count from the operation's"
                    " beginning: use statement_timeout"
                )
            self._kept |= for_connection
            self._set_locally(for_transaction)
        if traits & ON_COMMIT:
            endings = sqltext.temporary_endings(text)
            if not endings:
                self.refuse(
                    "the view made a temporary table ON COMMIT in a way that cannot be read:"
                    " make it in a statement of its own"
                )
            self._ending += endings
        if traits & (CONSTRAINTS | ON_COMMIT) and self._is_nested:
            self.refuse(
                "the view sent SET CONSTRAINTS, or made a deferrable one, or a temporary table"
                " ON COMMIT, in begin_nested(): do so outside of it"
            )
        if self._constraints_are_set and traits & (WRITES | UNSURE):
            self.refuse(
                "the view wrote again after it had sent SET CONSTRAINTS and committed, in a database"
                " that has constraints INITIALLY DEFERRED and others INITIALLY IMMEDIATE"
            )

    def _set_locally(self, names: frozenset[str]) -> None:
        # What was set for the connection just before comes back: so it is remembered anew.
        self._remembered -= names & self._kept
        self._kept -= names
        self._remember(names)

    def _remember(self, names: Iterable[str]) -> None:
        # Those of the transaction itself come back with the savepoint.
        new = {name for name in names if not name.startswith("transaction_")} - self._remembered
        if new and not self.is_failed():  # then nothing can be set, and the server says why
            self._remembered |= new
            self.waiting.append(sql.remember(new))

    def _begin(self, owner: StandIn) -> None:
        self._remembered, self._kept = set(), set()
        self._ending = []
        if self.waiting:
            self._before_units()  # what waits is part of no unit
        self._savepoint = self._early or f"SAVEPOINT {NAME}{self.begun}"
        if not self._early:
            self.waiting.append(self._savepoint)
        self._early = ""
        if self._checks_out:
            self._check_out()
        if (settings := self.carried.pop(owner, None)) is not None:
            self._kept |= settings.for_connection
            self._remember(settings.for_transaction)
            self.waiting.append(settings.everything)
            self.traits |= SETS

    def _before_units(self) -> None:
        if self._early:
            self.waiting.append(f"RELEASE {self._early}")
            self._early = ""

    def _check_out(self) -> None:
        """Let the pool's listeners do what they do for each transaction: it begins with a check-out."""
        self._checking_out = True
        try:
            tell_of_check_out(self.engine.pool, self.fairy)
        finally:
            self._checking_out = False

    def _release(self) -> None:
        begin = self._savepoint
        if begin in self.waiting and not self.traits & SETS:  # nothing was sent in it
            del self.waiting[self.waiting.index(begin) :]
            return
        if self.traits & CONSTRAINTS or (self.facts.deferred and self.traits & (WRITES | UNSURE)):
            self._check_constraints()
        unclear = self.facts.set_for_connection & self.facts.set_in_functions & self._remembered
        if unclear and self.traits & UNSURE and self._says(sql.have_changed(unclear)):
            self.refuse(
                f"the view called a function that sets {min(unclear)}, which functions of this"
                " database set both for the transaction and for the connection:"
                " let all do it in one way"
            )
        if back := self._remembered - self._kept:
            self.waiting.append(sql.settings_back(back))
        self.waiting.append(f"RELEASE {begin}")
        if self.traits & CURSOR:
            self.waiting.append(sql.CLOSE_CURSORS)
        if self.traits & CURSOR or back & _AT_ONCE:
            self.flush()  # what reads on asks the server itself, and a time-out does not wait
        endings = [*self._temporary, *self._ending]
        if endings:
            self._temporary = [each for each in endings if each.startswith("TRUNCATE")]
        if self.traits & (WRITES | UNSURE):
            endings += self.facts.ended_in_functions
        if endings:
            self.waiting.append(sql.end_temporary(endings))

    def _check_constraints(self) -> None:
        """Raise what a COMMIT would, and undo the unit as a COMMIT that fails does."""
        has_both = self.facts.deferred and self.facts.deferrable
        if not self.facts.deferred:
            self.waiting += sql.CHECK
        else:
            self.waiting += sql.CHECK_ALONE if has_both else sql.CHECK_ALL_DEFERRED
        if has_both and self.traits & CONSTRAINTS:
            self._constraints_are_set = True
        try:
            self.flush()
        except self.port.Error:
            self._open, self.traits = None, READS
            if not self.is_lost():
                self._undo()
            raise

    def _undo(self, *, at_once: bool = True) -> None:
        begin = self._savepoint
        if begin in self.waiting:
            del self.waiting[self.waiting.index(begin) :]
            return
        self.waiting[:] = f"ROLLBACK TO {begin}", f"RELEASE {begin}"
        if at_once and not self._leaving:
            self.flush()

    def _give_way(self, to: StandIn) -> None:
        if self.is_failed():
            self.refuse("a session of the view had failed, without rollback(), when another was used")
        if self._isolation in sql.STRICT and not to.is_top:
            self.refuse(
                f"two sessions or connections of the view at {self._isolation.upper()}, which would see"
                " what the other one commits"
            )
        super()._give_way(to)

    def _would_lose(self) -> bool:
        if self._savepoint in self.waiting:
            return False  # nothing was sent in it
        unsure = self.traits & UNSURE
        remembered = self._remembered if unsure else ()
        return self._says(sql.would_lose(remembered, locks=bool(unsure), above=self._above()))

    def _did_more_than_read(self) -> bool:
        return self._says(sql.did_more_than_read(above=self._above()))

    def _above(self) -> int:
        return 1 + len(self._around)

    def _says(self, question: str) -> bool:
        """Ask the server a question about the open unit."""
        self.flush()
        return bool(self._tell([question]).fetchone() != (False,))

    def savepoint(self, owner: StandIn, text: str) -> bool:
        """Hold back a statement about a savepoint, or drop what it ends; False if it must be sent."""
        failed = self.is_failed()
        if not failed:
            self.admit(owner, "")
        found = sqltext.savepoint_of(text)
        if found is None or failed:
            return False
        if owner.is_top and not self._checking_out:
            self._take_turn(owner, SAVEPOINT)
        verb, name = found
        if verb == "RELEASE" and name not in (self._around if owner.is_top else self._nested):
            return False  # for the server to refuse, now
        made = f"SAVEPOINT {name}"
        if verb == "ROLLBACK" and made not in self.waiting:
            return False  # it frees locks: at once
        self.note_savepoint(owner, text)
        if verb == "SAVEPOINT" or made not in self.waiting:
            self.waiting.append(made if verb == "SAVEPOINT" else text)
            return True
        place = len(self.waiting) - 1 - self.waiting[::-1].index(made)  # nothing was sent in it
        del self.waiting[place if verb == "RELEASE" else place + 1 :]
        return True

    def flush(self) -> None:
        """Send what waits on its own."""
        if self.waiting:
            try:
                self._tell(self.waiting)
            except self.port.Error as error:
                self.note(error)
                raise
            finally:
                self.waiting = []

    def _send(self, statement: str) -> None:
        self.waiting.append(statement)

    def _tell(self, statements: list[str]) -> Any:
        """Send statements of ours in one message, past what watches the view's."""
        return self.port.send(self.driver, "", first=statements)

    def note(self, error: Exception) -> None:
        """A statement on the operation's connection has failed."""
        self._ours = error
        code = sqlstate(error)
        if code == NO_SAVEPOINT and NAME in str(error):
            self.broken = NotAtomic(
                "a savepoint of the operation is gone: a statement of the view ended it, or the server"
                " could not read the message that it travelled in"
            )
        if code == SERIALIZATION_FAILURE and self._isolation in sql.STRICT:
            # The snapshot is the operation's: no retry in the view can succeed on it.
            self.broken = TransactionConflict()

    def is_ours(self, error: BaseException | None) -> bool:
        """Return True if the driver's error came from the operation's connection."""
        return error is not None and error is self._ours

    def is_lost(self) -> bool:
        """Return True if the connection is gone."""
        return bool(self.driver.closed) or self.fairy.dbapi_connection is None

    def check_mode(self, name: str, value: Any) -> None:
        """Refuse what a transaction is to be like, if the operation's, which has begun, is not."""
        if name == "isolation_level":
            value = str(self.port.LEVELS.get(value, value)).lower()
            is_so = value in ("", self._isolation)
        else:
            is_so = bool(value) == bool(name != "autocommit" and getattr(self.driver, name))
        if not is_so:
            self.refuse(
                f"the view chose another {name} for its connection ({value}), and the operation's"
                f" transaction has begun already ({self._isolation}): set it on the engine"
                " (SQLALCHEMY_ENGINE_OPTIONS)"
            )

    def _backslashes(self) -> bool:
        return bool(self.driver.info.parameter_status("standard_conforming_strings") == "off")


_MODES = ("autocommit", "isolation_level", "readonly", "read_only", "deferrable")


class DriverDoor:
    """The driver's connection, as a view reaches it: commit and rollback are the unit's.

    It is no psycopg2 connection to psycopg2's own functions (``register_type``, ``quote_ident``): those
    take a cursor as well.
    """

    def __init__(self, units: PostgresUnits, owner: StandIn) -> None:
        self.__dict__["_units"], self.__dict__["_owner"] = units, owner

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        """See the driver's."""
        return self._owner.cursor(*args, **kwargs)

    def commit(self) -> None:
        """Commit the unit."""
        self._owner.commit()

    def rollback(self) -> None:
        """Roll the unit back."""
        self._owner.rollback()

    def set_isolation_level(self, level: Any) -> None:
        """Nothing, if the operation's is the same."""
        self.isolation_level = level

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
        return 2  # psycopg2's STATUS_BEGIN

    def __getattr__(self, name: str) -> Any:
        units = self._units
        if name in units.port.FACTORIES:
            return getattr(units.cursors, name)
        if name in units.port.DOORS:
            return partial(getattr(units.cursors, name), self._owner)
        if name in units.port.REFUSED:
            units.refuse(f"the view used {name} of the driver's connection")
        return getattr(units.driver, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._units.port.FACTORIES:
            setattr(self._units.cursors, name, value)
            return
        if name in _MODES:
            self._units.check_mode(name, value)
            return
        setattr(self._units.driver, name, value)
