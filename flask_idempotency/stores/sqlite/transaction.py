"""The one transaction that writes in SQLite, begun at once.

IMMEDIATE: whoever begins gets the only right to write, or waits for it.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Engine, exc

from flask_idempotency.core.errors import StoreUnavailable
from flask_idempotency.drivers import sqlite
from flask_idempotency.drivers.raw_connection import Values, give_back

_TRANSACTION = 22  # SQLITE_TRANSACTION (Python names it from 3.11 on)

HURRY_MILLISECONDS = 50
"""How long a commit for which nobody asked waits for readers."""

# Python 3.10 cannot remove an authorizer, and denies everything if it is set to None.
_NO_AUTHORIZER: Any = None if sys.version_info >= (3, 11) else lambda *_what: sqlite3.SQLITE_OK


class SqliteConnection(sqlite.Connection):
    """A connection to SQLite whose transaction only we may end, once it is guarded."""

    def guard(self) -> None:
        """From now on others may use the transaction: what triggers do, no text tells."""
        self.driver.set_authorizer(self._authorize)

    def _authorize(self, action: int, *_what: object) -> int:
        """Deny BEGIN, COMMIT and ROLLBACK; and all else once a statement's OR ROLLBACK has ended it."""
        denied = action == _TRANSACTION or not self.driver.in_transaction
        return sqlite3.SQLITE_DENY if denied else sqlite3.SQLITE_OK

    def commit(self, text: str, values: Values, first: Sequence[str]) -> None:
        """See :class:`RawConnection`."""
        self.send(text, values, first)
        self.driver.set_authorizer(_NO_AUTHORIZER)
        self.send("COMMIT")

    def put_right(self) -> None:
        """See :class:`RawConnection`."""
        self.driver.set_authorizer(_NO_AUTHORIZER)
        super().put_right()

    def is_lost(self) -> bool:
        """See :class:`RawConnection`."""
        try:
            self.driver.total_changes  # noqa: B018 -- asks nothing but whether it is open
        except sqlite3.ProgrammingError:
            return True
        return False


class Writing:
    """A transaction that writes, on a connection of the engine's, or on that of a session.

    Whoever makes one ends it, by :meth:`commit` or :meth:`abandon`. ``waits`` says whether to wait for
    other writers, for as long as the driver is configured to. Raises ``StoreUnavailable``.
    """

    def __init__(
        self, engine: Engine, connection: Connection | None = None, *, waits: bool = True
    ) -> None:
        self._is_sessions = connection is not None
        try:
            self.connection = connection or engine.connect()
        except exc.SQLAlchemyError as error:
            raise StoreUnavailable from error
        self._patience: int | None = None
        driver = self.connection.connection.driver_connection
        self.raw = SqliteConnection(driver, engine.dialect)
        try:
            self.raw.take()
            self._begin(waits)
        except BaseException as error:
            self.abandon()
            if isinstance(error, (exc.SQLAlchemyError, sqlite3.Error)):
                raise StoreUnavailable from error
            raise

    def _begin(self, waits: bool) -> None:
        driver = self.raw.driver
        (timeout,) = driver.execute("PRAGMA busy_timeout").fetchone()
        if not waits:
            driver.execute("PRAGMA busy_timeout = 0")
        try:
            driver.execute("BEGIN IMMEDIATE")
        finally:
            if not waits:
                driver.execute(f"PRAGMA busy_timeout = {timeout}")

    def hurry(self) -> None:
        """Let the commit wait for whoever reads SQLite's database for a moment only."""
        (self._patience,) = self.raw.driver.execute("PRAGMA busy_timeout").fetchone()
        self.raw.driver.execute(f"PRAGMA busy_timeout = {HURRY_MILLISECONDS}")

    def execute(self, statement: str, values: dict[str, Any]) -> Any:
        """Run one SQL statement in the transaction; the driver's cursor."""
        return self.raw.driver.execute(statement, values)

    def commit(self) -> None:
        """Commit, and give the connection back. ``StoreUnavailable`` if somebody reads for long."""
        try:
            self.raw.driver.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise StoreUnavailable from error
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Roll back what is open, and give the connection back. Does nothing the second time."""
        if self.connection.closed or self.raw.operation():
            return
        if self._patience is not None:
            self.raw.driver.execute(f"PRAGMA busy_timeout = {self._patience}")
        if not self._is_sessions:
            give_back(self.connection, self.raw)
        elif self.raw.is_taken():
            self.raw.put_right()
