"""A driver's connection on which we send BEGIN and COMMIT ourselves.

A whole transaction then fits into one message. The driver's ``rollback()`` and the pool's reset may do
nothing then, so whatever gives the connection back to its pool finds it in :data:`taken` and puts it
right, also after an exit that struck between two lines.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, ClassVar, cast

from sqlalchemy import Dialect, Engine, exc

from flask_idempotency.core.errors import AUTOCOMMIT, NotAtomic, StoreUnavailable, sqlstate

Values = Mapping[str, Any]

IDLE, OPEN, IN_ERROR = 0, 2, 3
"""States of a connection, by libpq's numbers: in no transaction, in one, in one that has failed."""

_GONE = "26000"
_NOT_AS_PREPARED = {_GONE, "0A000"}
"""A statement is not there, or returns something else since a migration."""

_UNPREPARED = 5
"""How many messages with one text are sent on a connection before what is in them is prepared there:
psycopg 3 waits as long. A connection that serves but one request prepares nothing, which behind a
pooler nobody would ever forget."""

_INFO = "flask_idempotency"
"""Where a pooled connection keeps what is prepared on it, by the text that begins a transaction. It is
None if nothing may be."""

NAMES = ("sqlite", "psycopg2", "psycopg")
"""SQLAlchemy's names of the dialect and the drivers that there is a file for. The others share one."""

taken: dict[Any, RawConnection] = {}
"""By the driver's connection, those with a message or a transaction of ours, until they are given back,
in the process that took them. None keeps its pool's."""


def let_go() -> None:
    """In a forked child, put a closed socket in the place of each connection that the parent uses.

    Otherwise a child that lives on keeps a dead worker's row locked, as the server sees an open socket.
    And under gevent, where a fork copies the greenlets of all requests, the copies would read what is
    the parent's to read.
    """
    closed, other = socket.socketpair()
    other.close()
    with closed:
        for driver in taken:
            if not getattr(driver, "closed", True):
                with suppress(OSError):  # it has lost its socket
                    os.dup2(closed.fileno(), driver.fileno(), inheritable=False)
    taken.clear()


def innermost(connection: Any) -> Any:
    """The driver's own connection, without what an agent for tracing has put around it.

    Agents follow wrapt: what a proxy is around is its ``__wrapped__``.
    """
    while (inner := getattr(connection, "__wrapped__", None)) is not None:
        connection = inner
    return connection


@cache
def class_of(dialect: str, driver: str) -> type[RawConnection]:
    """The class for a driver, by its names. Raises ``ModuleNotFoundError`` if it is not installed."""
    name = next((name for name in (dialect, driver) if name in NAMES), "any")
    return cast("type[RawConnection]", importlib.import_module(f".{name}", __package__).Connection)


def raw_of(pooled: Any, dialect: Dialect) -> RawConnection:
    """What is under a pool's connection. Nothing is done to it yet."""
    raw = class_of(dialect.name, dialect.driver)
    return raw(innermost(pooled.dbapi_connection), dialect, pooled.info)


class Prepared(dict[str, Any]):
    """What is prepared on a connection for the transactions that begin with one text, by its SQL.

    They are kept apart, as a pooler may take another server for each transaction: if the first message
    finds what is prepared, the next ones do.
    """

    begun = 0


Answer = tuple[list[tuple[Any, ...]], int]
"""The rows of a message's last statement that returned some, and how many its last statement changed or
returned."""


class RawConnection:
    """A driver's connection. Whoever takes it ends that by :meth:`put_right` or :meth:`leave`.

    A subclass says what its driver does: at least :meth:`status`, and :meth:`exchange` or :meth:`send`.
    ``operation`` refers to the operation's transaction that is open on it, if there is one.
    """

    levels: ClassVar[Mapping[Any, str]] = {}
    """What a connection's ``isolation_level`` stands for, as after BEGIN; empty for none."""

    plain_cursor: ClassVar[type | None] = None
    """The driver's class of cursors, if a statement on one may go out together with ours.

    Others, such as a tracing agent's, may show what they send.
    """

    sees_texts = True
    """Whether the driver notices that a text has ended a transaction that it began itself."""

    switched: ClassVar[tuple[str, Any] | None] = None
    """The driver's attribute, and its value, that lets us send BEGIN and COMMIT ourselves."""

    operation: Callable[[], Any] = bool
    continues = False  # the transaction on it was begun by the driver, which is also to end it
    prepares = True  # unless the application has said no
    prepared: Prepared | None = None  # of this transaction
    is_unsure = False  # something was sent that may have ended what is prepared
    is_shown = False  # the driver refuses to end the transaction
    is_gone = False  # an error has shown that the connection is

    def __init__(self, driver: Any, dialect: Dialect, info: dict[str, Any]) -> None:
        self.driver, self._info = driver, info
        self.Error: type[Exception] = dialect.loaded_dbapi.Error

    def take(self, *, continues: bool = False) -> None:
        """Send on it from now on: in a transaction that is open, or in transactions of ours."""
        if getattr(self.driver, "autocommit", False) is True:
            raise NotAtomic(AUTOCOMMIT)
        self.continues = self.is_unsure = continues
        self._found = getattr(self.driver, self.switched[0]) if self.switched else None
        taken[self.driver] = self  # what undoes is there before what is done
        if not continues:
            self.switch()

    @property
    def level(self) -> str:
        """The words behind BEGIN that isolate a transaction as the engine's connections are."""
        level = self.levels.get(self.driver.isolation_level) if self.levels else None
        return f"ISOLATION LEVEL {level}" if level else ""

    def status(self) -> int:
        """Return the state the connection is in on the server, as far as the driver knows."""
        raise NotImplementedError

    def send(self, text: str, values: Values | None = None, first: Sequence[str] = ()) -> Answer:
        """Send statements of our own, in one message if the driver can: ``first``, then a text of some.

        In the text, ``%(name)s`` stands for a value, and ``%%`` for a per cent sign if there are
        values. Outside of a transaction the message is one.
        """
        begins = self.prepared is None and self.status() == IDLE
        if begins:
            self.prepared = self._prepared(text)
        prepared = None if self.is_unsure else self.prepared
        try:
            return self.exchange(text, values, first, prepared)
        except self.Error as error:
            may_repeat = begins or first == ["ROLLBACK"]
            if not (may_repeat and prepared) or sqlstate(error) not in _NOT_AS_PREPARED:
                raise
            prepared.clear()
            if sqlstate(error) == _GONE:  # and so will the next be, as behind a pooler
                self._info[_INFO] = None
            self.prepared = None
            self.undo()
            return self.exchange(text, values, first, None)

    def _prepared(self, text: str) -> Prepared | None:
        """What is prepared for a transaction that begins so. None if it is too early, or not to be."""
        found = self._info.setdefault(_INFO, {}) if self.prepares else None
        if found is None:
            return None
        prepared: Prepared = found.setdefault(text, Prepared())
        prepared.begun += 1
        return prepared if prepared.begun > _UNPREPARED else None

    def exchange(
        self, text: str, values: Values | None, first: Sequence[str], prepared: Prepared | None
    ) -> Answer:
        """Send a message, with what is ``prepared`` if that is not None: what is not yet is then."""
        raise NotImplementedError

    def execute_behind(self, first: list[str], cursor: Any, execute: Callable[[str], object]) -> None:
        """Send statements of ours, ``first``, and one of the view's in one message.

        ``execute`` sends that, behind a text, on its ``cursor``, of the class ``plain_cursor``. If it
        fails, ours were carried out all the same, unless the server could not read it.
        """
        raise NotImplementedError

    def switch(self) -> None:
        """Let us send BEGIN and COMMIT ourselves, on a connection without a transaction."""
        if self.switched:
            setattr(self.driver, *self.switched)

    def show(self) -> None:
        """Let the driver see that a transaction is open, and refuse to end it, if it can do that."""

    def commit(self, text: str, values: Values, first: Sequence[str]) -> None:
        """Send a message and commit, in one round trip if the driver notices that."""
        if self.continues and not self.sees_texts:
            self.send(text, values, first)
            self.driver.commit()
        else:
            self.send(f"{text};\nCOMMIT", values, first)

    def undo(self) -> None:
        """Roll back what is open, and undo :meth:`show`."""
        self.driver.rollback()

    def begin_again(self) -> None:
        """Roll back what was continued: from now on BEGIN and COMMIT are ours."""
        self.undo()
        self.continues = False
        self.switch()

    def is_lost(self) -> bool:
        """Return True if the connection is gone, as far as the driver or an error has told."""
        return self.is_gone or bool(getattr(self.driver, "closed", False))

    def leave(self) -> None:
        """Leave the connection to whoever goes on with it."""
        taken.pop(self.driver, None)

    def put_right(self) -> None:
        """Roll back what is open, and leave the driver's connection as it was found.

        Raises the driver's errors: then the connection is not to be used again.
        """
        if self.is_lost():  # where ``rollback()`` may do nothing
            raise self.Error("the connection is lost")
        self.undo()
        if self.switched:
            setattr(self.driver, self.switched[0], self._found)
        taken.pop(self.driver, None)


def checked_out(engine: Engine) -> Any:
    """A connection out of an engine's pool. Raises ``StoreUnavailable`` if none can be made."""
    try:
        return engine.raw_connection()
    except engine.dialect.loaded_dbapi.Error as error:
        raise StoreUnavailable from error


@contextmanager
def borrowed(engine: Engine) -> Iterator[RawConnection]:
    """A connection from an engine's pool, for messages of ours. It goes back as it was found.

    Raises the driver's and SQLAlchemy's errors, and ``StoreUnavailable``.
    """
    pooled, raw = checked_out(engine), None
    try:
        raw = raw_of(pooled, engine.dialect)
        if raw.status() != IDLE:  # a listener has set something
            raw.driver.commit()
        raw.take()
        yield raw
    finally:
        give_back(pooled, raw)


def give_back(held: Any, raw: RawConnection | None) -> None:
    """Give back a connection, SQLAlchemy's or its pool's, as it was found.

    It is thrown away if that fails.
    """
    if raw is not None and taken.get(raw.driver) is raw:
        raw.operation = bool
        try:
            raw.put_right()
        except BaseException as error:
            raw.leave()
            with suppress(exc.ResourceClosedError):  # the view has closed it: its pool threw it away
                held.invalidate(error)
            if not isinstance(error, raw.Error):
                raise
    try:  # noqa: SIM105 -- a context would take three calls more
        held.close()
    except exc.SQLAlchemyError:
        pass
