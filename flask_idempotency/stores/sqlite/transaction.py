"""A transaction in SQLite that a view's session can join.

Python's driver begins transactions by itself, late, and not at all before a SAVEPOINT. So we turn that
off and send BEGIN ourselves. IMMEDIATE: whoever begins gets the only right to write, or waits for it.
"""

from __future__ import annotations

import sqlite3
import sys
import weakref
from typing import Any

from sqlalchemy import Connection, Engine, event, exc

from flask_idempotency.core.errors import ConfigurationError, NotAtomic, StoreUnavailable
from flask_idempotency.core.process import here
from flask_idempotency.session.units import Units

_TRANSACTION = 22  # SQLITE_TRANSACTION (Python names it from 3.11 on)

HURRY_MILLISECONDS = 50
"""How long a commit for which nobody asked waits for readers."""

# Python 3.10 cannot remove an authorizer, and denies everything if it is set to None.
_NO_AUTHORIZER: Any = None if sys.version_info >= (3, 11) else lambda *_what: sqlite3.SQLITE_OK


class BorrowedTransaction:
    """Begins at once. Whoever makes one ends it, by :meth:`commit` or :meth:`abandon`.

    ``waits`` says whether to wait for other writers, for as long as the driver is configured to.
    Raises ``StoreUnavailable`` if the transaction cannot be begun.
    """

    def __init__(self, engine: Engine, *, waits: bool = True) -> None:
        self._open, self._process = False, here.process
        try:
            self.connection: Connection = engine.connect()
        except exc.SQLAlchemyError as error:
            raise StoreUnavailable from error
        driver: Any = self.connection.connection.driver_connection
        self._driver, self._level = driver, driver.isolation_level
        self._patience: int | None = None
        try:
            self._driver.isolation_level = None
            self._begin(waits)
            self._root = self.connection.begin()
            self._open = True
            _all.add(self)
        except (exc.SQLAlchemyError, sqlite3.Error) as error:
            self._give_back()
            raise StoreUnavailable from error

    def _begin(self, waits: bool) -> None:
        if waits:
            self._driver.execute("BEGIN IMMEDIATE")
            return
        (timeout,) = self._driver.execute("PRAGMA busy_timeout").fetchone()
        self._driver.execute("PRAGMA busy_timeout = 0")
        try:
            self._driver.execute("BEGIN IMMEDIATE")
        finally:
            self._driver.execute(f"PRAGMA busy_timeout = {timeout}")

    def hurry(self) -> None:
        """Let the commit wait for whoever reads SQLite's database for a moment only."""
        (self._patience,) = self._driver.execute("PRAGMA busy_timeout").fetchone()
        self._driver.execute(f"PRAGMA busy_timeout = {HURRY_MILLISECONDS}")

    def execute(self, statement: str, values: dict[str, Any]) -> Any:
        """Run one SQL statement in the transaction; the driver's cursor."""
        return self._driver.execute(statement, values)

    def guard(self) -> None:
        """From now on others may use the transaction, and only we may end it."""
        # The units know statements and the driver's calls, not what triggers do.
        self._driver.set_authorizer(self._authorize)

    def raise_if_ended(self) -> None:
        """Raise ``NotAtomic`` if somebody has ended the transaction all the same.

        Raises ``StoreUnavailable`` if the connection is lost, and the transaction with it.
        """
        if self._is_lost():
            raise StoreUnavailable
        ended = self.connection.get_transaction() is not self._root or not self._root.is_active
        if ended or not self._driver.in_transaction:
            raise NotAtomic(
                "the view ended the operation's transaction: inside an atomic operation use"
                " db.session.commit() and rollback(), and roll back after an error"
            )

    def commit(self) -> None:
        """Commit, and give the connection back. Raises SQLAlchemy's or the driver's error.

        Raises ``StoreUnavailable`` if the connection is lost: then nobody knows the outcome.
        """
        try:
            self._driver.set_authorizer(_NO_AUTHORIZER)
            self._driver.execute("COMMIT")
            self._root.commit()
        except sqlite3.OperationalError as error:  # somebody reads for longer than we wait
            raise StoreUnavailable from error
        except exc.DBAPIError as error:
            if error.connection_invalidated:
                raise StoreUnavailable from error
            raise
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Roll back what is open, and give the connection back. Does nothing the second time."""
        if self._open and not self._process.is_parent:
            self._open = False
            self._give_back()

    def leave_to_parent(self) -> None:
        """In a forked child: refuse all use of the connection, and never close it.

        SQLite would roll back then, and delete the journal that the parent needs. It also believes that
        this process has the parent's locks, so no other connection to the file would be safe.
        """
        import ctypes  # only here: most processes have no use for it

        engine, pooled = self.connection.engine, self.connection.connection
        units = Units(engine, pooled)
        units.leave_to_parent()
        units.put_under(self.connection)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pooled))  # lasts longer than Python itself
        event.listen(engine, "do_connect", _refuse_connect)

    def _is_lost(self) -> bool:
        """Return True if the connection is closed, and what was open on it rolled back."""
        try:
            self._driver.total_changes  # noqa: B018 -- asks nothing but whether it is open
        except sqlite3.ProgrammingError:
            return True
        return False

    def _authorize(self, action: int, *_what: object) -> int:
        """Deny BEGIN, COMMIT and ROLLBACK; and all else once a statement's OR ROLLBACK has ended it."""
        denied = action == _TRANSACTION or not self._driver.in_transaction
        return sqlite3.SQLITE_DENY if denied else sqlite3.SQLITE_OK

    def _give_back(self) -> None:
        try:
            if self._is_lost():
                self.connection.invalidate()
            else:
                self._driver.set_authorizer(_NO_AUTHORIZER)
                if self._driver.in_transaction:
                    self._driver.execute("ROLLBACK")
                if self._patience is not None:
                    self._driver.execute(f"PRAGMA busy_timeout = {self._patience}")
                self._driver.isolation_level = self._level
        finally:
            self.connection.close()


_all: weakref.WeakSet[BorrowedTransaction] = weakref.WeakSet()


def let_go() -> None:
    """In a forked child: leave the transactions to the parent."""
    for transaction in list(_all):
        if transaction._open:  # noqa: SLF001
            transaction.leave_to_parent()


def _refuse_connect(*_how: object) -> None:
    raise ConfigurationError(
        "this process was forked while its parent wrote to this SQLite database, whose locks do not"
        ' survive that: begin it with multiprocessing.get_context("spawn"), or use PostgreSQL'
    )
