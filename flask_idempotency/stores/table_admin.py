"""What the commands do with a table of records, in PostgreSQL and in SQLite alike."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, TypeVar

from .admin import Group, Line, StepLine, Time, Waiting
from .admin_statements import AdminStatements
from .table import KEY_BYTES

T = TypeVar("T", Group, Line, StepLine)

_TIMES = ("oldest", "created", "completed", "expires", "finished")


class TableAdmin:
    """The half of an ``Admin`` that two dialects share."""

    sql: AdminStatements

    def stats(self) -> list[Group]:
        """The records counted."""
        return [_tidy(Group(*row)) for row in self._fetch(self.sql.stats, {})]

    def newest(self, name: str | None, state: str | None, limit: int) -> list[Line]:
        """The newest records."""
        values = {"name": name, "state": state, "limit": limit}
        return [_tidy(Line(*row)) for row in self._fetch(self.sql.newest, values)]

    def starting(self, start: bytes) -> list[Line]:
        """The records whose key's hash starts so."""
        return [_tidy(Line(*row)) for row in self._fetch(self.sql.starting, between(start))]

    def steps(self, start: bytes) -> list[StepLine]:
        """The finished steps."""
        rows = self._fetch(self.sql.steps, between(start))
        return [_tidy(StepLine(*row)) for row in rows]

    def waiting(self, max_attempts: int) -> Waiting:
        """The resumable operations counted."""
        return Waiting(*self._fetch(self.sql.waiting, {"max_attempts": max_attempts})[0])

    def _fetch(self, template: str, values: dict[str, Any]) -> list[Any]:
        """The rows of a statement that only reads."""
        raise NotImplementedError


def _tidy(found: T) -> T:
    """With aware times, which the database gives as text, and booleans, where it has none."""
    times = {name: getattr(found, name, None) for name in _TIMES}
    changed: dict[str, Any] = {name: _time(text) for name, text in times.items() if text is not None}
    if isinstance(found, Line):
        changed["expired"] = bool(found.expired)
    return replace(found, **changed)


def _time(text: Any) -> Time:
    """Falls back to the text: whoever writes to the table may write any time."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)
    except (TypeError, ValueError):
        return str(text)


def between(start: bytes) -> dict[str, bytes]:
    """The first and the last key that start so."""
    return {"low": start.ljust(KEY_BYTES, b"\0"), "high": start.ljust(KEY_BYTES, b"\xff")}
