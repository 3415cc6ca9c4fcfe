"""The connections of a request that runs alone: what they write in vain, and how they end if it hangs.

PostgreSQL lets a view write on a second connection, and the test finds the row that survives a crash.
SQLite has one writer: there the second one waits for seconds, and fails as if the machine were slow.
"""

from __future__ import annotations

import sqlite3
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from sqlalchemy import Engine, Pool, StaticPool, event
from sqlalchemy.engine import ExceptionContext

from flask_idempotency.core.errors import StoreUnavailable
from flask_idempotency.core.records import Claim
from flask_idempotency.web.setup.state import AppState

from .stacks import is_own, lines
from .watch import Watch

WAIT_MILLISECONDS = 200
"""How long a second connection waits for SQLite's lock. Its own request has it, so it waits in vain."""


class Connections(Watch):
    """Of all engines, also of those that the view makes itself."""

    def __init__(self, state: AppState) -> None:
        self.refused: list[str] = []  # where a second connection wanted to write, in lines
        self._state = state
        self._is_in_view = self._writes = False
        self._taken_now: dict[int, Any] = {}  # the driver's connections, by their identity
        self._usual: dict[int, int] = {}  # their milliseconds, as they were before

    def claiming(self, claim: Claim) -> None:
        """A request that the view itself makes would wait for the view. It is rejected at once."""
        records_write = getattr(self._state.records, "one_writer", False)
        if self._writes and (records_write or claim.lease_seconds is None):
            self._note()
            raise StoreUnavailable

    def claimed(self, claim: Claim, attempt: int) -> None:  # noqa: ARG002
        """The operation has its connection; whatever is taken from now on is a second one."""
        self._is_in_view = True
        self._writes = claim.lease_seconds is None and self._state.database.dialect.name == "sqlite"

    def completing(self, claim: Claim) -> None:  # noqa: ARG002
        """The view has returned."""
        self._is_in_view = self._writes = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Watch them."""
        listeners: tuple[tuple[Any, str, Any], ...] = (
            (Pool, "checkout", self._taken),
            (Pool, "checkin", self._given_back),
            (Engine, "handle_error", self._failed),
        )
        for listener in listeners:
            event.listen(*listener)
        try:
            yield
        finally:
            for listener in listeners:
                event.remove(*listener)

    def end(self) -> None:
        """Let PostgreSQL roll back what hangs: its locks would stop whoever empties the tables next."""
        for connection in list(self._taken_now.values()):
            if hasattr(connection, "cancel"):
                connection.cancel()
                connection.close()

    def _taken(self, connection: Any, *_record: object) -> None:
        self._taken_now[id(connection)] = connection
        if self._is_in_view and isinstance(connection, sqlite3.Connection):
            (self._usual[id(connection)],) = connection.execute("PRAGMA busy_timeout").fetchone()
            connection.execute(f"PRAGMA busy_timeout = {WAIT_MILLISECONDS}")

    def _given_back(self, connection: Any, _record: object) -> None:
        self._taken_now.pop(id(connection), None)
        if (usual := self._usual.pop(id(connection), None)) is not None:
            connection.execute(f"PRAGMA busy_timeout = {usual}")

    def _failed(self, context: ExceptionContext) -> None:
        if self._is_in_view and "database is locked" in str(context.original_exception):
            self._note()

    def _note(self) -> None:
        self.refused += lines([frame for frame in traceback.extract_stack() if is_own(frame)][-1:])


def is_locked(database: Engine) -> bool:
    """Return True if somebody still writes in a SQLite file, and should have committed before."""
    if database.dialect.name != "sqlite" or isinstance(database.pool, StaticPool):
        return False
    with closing(database.raw_connection()) as connection:
        driver: Any = connection.driver_connection
        (usual,) = driver.execute("PRAGMA busy_timeout").fetchone()
        driver.execute(f"PRAGMA busy_timeout = {WAIT_MILLISECONDS}")
        try:
            driver.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            return "database is locked" in str(error)
        finally:
            driver.rollback()
            driver.execute(f"PRAGMA busy_timeout = {usual}")
    return False
