"""A transaction in SQLite that a view's session can join.

Python's driver begins transactions by itself, late, and not at all before a SAVEPOINT. So we turn that
off and send BEGIN ourselves. IMMEDIATE: whoever begins gets the only right to write, or waits for it.
"""

from __future__ import annotations

import sqlite3
import sys
from typing import Any

from sqlalchemy import Connection, Engine, exc

from flask_idempotency.core.errors import NotAtomic, StoreUnavailable
from flask_idempotency.core.process import this_process

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
        self._open, self._pid = False, this_process()
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
        if self._open:
            self._open = False
            if self._pid != this_process():
                _parents.append(self)
            else:
                self._give_back()

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


_parents: list[BorrowedTransaction] = []
"""In a forked child: those that must not be collected, as SQLite would roll back and delete the journal
that the parent needs."""
