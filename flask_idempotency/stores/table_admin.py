"""What the commands do with a table of records, in PostgreSQL and in SQLite alike."""

from __future__ import annotations

from typing import Any, TypeVar

from .admin import Group, Line, StepLine, Waiting
from .admin_statements import AdminStatements
from .table import KEY_BYTES

T = TypeVar("T", Group, Line, StepLine)


class TableAdmin:
    """The half of an ``Admin`` that two dialects share."""

    sql: AdminStatements

    def stats(self) -> list[Group]:
        """The records counted."""
        return [self._tidy(Group(*row)) for row in self._fetch(self.sql.stats, {})]

    def newest(self, name: str | None, state: str | None, limit: int) -> list[Line]:
        """The newest records."""
        values = {"name": name, "state": state, "limit": limit}
        return [self._tidy(Line(*row)) for row in self._fetch(self.sql.newest, values)]

    def starting(self, start: bytes) -> list[Line]:
        """The records whose key's hash starts so."""
        return [self._tidy(Line(*row)) for row in self._fetch(self.sql.starting, between(start))]

    def steps(self, start: bytes) -> list[StepLine]:
        """The finished steps."""
        rows = self._fetch(self.sql.steps, between(start))
        return [self._tidy(StepLine(*row)) for row in rows]

    def waiting(self, max_attempts: int) -> Waiting:
        """The resumable operations counted."""
        return Waiting(*self._fetch(self.sql.waiting, {"max_attempts": max_attempts})[0])

    def _tidy(self, found: T) -> T:
        """With aware times and booleans, where the database has none."""
        return found

    def _fetch(self, template: str, values: dict[str, Any]) -> list[Any]:
        """The rows of a statement that only reads."""
        raise NotImplementedError


def between(start: bytes) -> dict[str, bytes]:
    """The first and the last key that start so."""
    return {"low": start.ljust(KEY_BYTES, b"\0"), "high": start.ljust(KEY_BYTES, b"\xff")}
