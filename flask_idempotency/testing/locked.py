"""Names a write that SQLite refuses because the operation's own transaction is writing.

PostgreSQL lets a view write on a second connection, and the test finds the row that survives a crash.
SQLite has one writer: there the second one waits for seconds, and fails as if the machine were slow.
"""

from __future__ import annotations

import sqlite3
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, Pool, event
from sqlalchemy.engine import ExceptionContext

from flask_idempotency.core.records import Claim

from .stacks import is_own, lines
from .watch import Watch

WAIT_MILLISECONDS = 200
"""How long a second connection waits for the lock. It waits for its own request, so in vain."""


class SecondWriter(Watch):
    """Where a connection other than the operation's wanted to write while the view ran."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self._is_in_view = False
        self._usual: dict[int, int] = {}  # the milliseconds of a driver's connection, by its identity

    def claimed(self, claim: Claim, attempt: int) -> None:  # noqa: ARG002
        """The operation has its connection; whatever is taken from now on is a second one."""
        self._is_in_view = True

    def completing(self, claim: Claim) -> None:  # noqa: ARG002
        """The view has returned."""
        self._is_in_view = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Watch all engines, also those that the view makes itself."""
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

    def _taken(self, connection: Any, *_record: object) -> None:
        if self._is_in_view and isinstance(connection, sqlite3.Connection):
            (self._usual[id(connection)],) = connection.execute("PRAGMA busy_timeout").fetchone()
            connection.execute(f"PRAGMA busy_timeout = {WAIT_MILLISECONDS}")

    def _given_back(self, connection: Any, _record: object) -> None:
        if (usual := self._usual.pop(id(connection), None)) is not None:
            connection.execute(f"PRAGMA busy_timeout = {usual}")

    def _failed(self, context: ExceptionContext) -> None:
        if self._is_in_view and "database is locked" in str(context.original_exception):
            frames = traceback.extract_stack()[:-1]
            self.places += lines([frame for frame in frames if is_own(frame)][-1:])
