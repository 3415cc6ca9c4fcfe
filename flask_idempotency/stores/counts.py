"""The table ``idempotency_record_count``: outcomes of requests in each minute, for the console.

It is written by a thread of each process and read by the console. No request waits for it but that for
the console's overview, a moment; nothing depends on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, Table, exc, text

from flask_idempotency.core.errors import IdempotencyError

from .admin import TRIAL, reason

_SECONDS = {
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) AS bigint)",
    "sqlite": "CAST(strftime('%s', 'now') AS integer)",
}
"""The database's clock, in seconds since 1970."""

_LIMITS = {
    "postgresql": "SET LOCAL lock_timeout = '1s'; SET LOCAL statement_timeout = '2s'",
    "sqlite": "SELECT 1",  # its driver waits for some seconds
}
"""How long each statement waits for others at most. A migration may hold the table for much longer."""

_NOW = "SELECT {seconds}"

_ADD = """INSERT INTO {table} AS known (minute, operation, outcome, count)
VALUES (:minute, :operation, :outcome, :count)
ON CONFLICT (minute, operation, outcome) DO UPDATE SET count = known.count + excluded.count"""

_DELETE = "DELETE FROM {table} WHERE minute < {seconds} / 60 - 1440"  # a day; the key leads to them

_LAST = """SELECT {seconds} / 60 - minute, operation, outcome, count FROM {table}
 WHERE minute > {seconds} / 60 - 60"""


@dataclass(frozen=True, order=True, slots=True)
class Count:
    """How many requests to an operation had an outcome, ``age`` ago: in seconds, or in minutes."""

    age: int
    operation: str
    outcome: str
    count: int


class CountsUnavailable(IdempotencyError):
    """The counts cannot be read or written. The message has the driver's words."""


class Counts:
    """The counts of all processes of an application."""

    def __init__(self, engine: Engine, table: Table) -> None:
        self._engine = engine
        names = {
            "table": engine.dialect.identifier_preparer.format_table(table),
            "seconds": _SECONDS[engine.dialect.name],
        }
        self._now, self._add, self._delete, self._last = (
            text(template.format(**names)) for template in (_NOW, _ADD, _DELETE, _LAST)
        )
        self._limits = text(_LIMITS[engine.dialect.name])

    def add(self, counts: Iterable[Count]) -> None:
        """Add counts, whose ages are in seconds, and delete those of the day before.

        Raises :class:`CountsUnavailable`; then nothing was added.
        """
        with self._open() as connection:
            now = connection.execute(self._now).scalar_one()
            connection.execute(self._add, _rows(counts, now))
            connection.execute(self._delete)
            connection.commit()

    def attempt(self) -> None:
        """Do all that the console does, and roll it back. Raises :class:`CountsUnavailable`."""
        with self._open() as connection:
            connection.execute(self._add, _rows([Count(0, TRIAL, "check", 1)], 0))
            connection.execute(self._delete)
            connection.execute(self._last)

    def last_hour(self) -> list[Count]:
        """The counts of the last hour, whose ages are in minutes. Raises :class:`CountsUnavailable`."""
        with self._open() as connection:
            return [Count(*row) for row in connection.execute(self._last)]

    @contextmanager
    def _open(self) -> Iterator[Connection]:
        """Yield a transaction that waits for others a moment at most."""
        try:
            with self._engine.connect() as connection:
                connection.execute(self._limits)
                yield connection
        except exc.SQLAlchemyError as error:
            raise CountsUnavailable(reason(error)) from error


def _rows(counts: Iterable[Count], now: int) -> list[dict[str, Any]]:
    """The rows to add, in one order for all processes: two that meet wait, and never for each other."""
    sums: Counter[tuple[int, str, str]] = Counter()
    for each in counts:
        sums[(now - each.age) // 60, each.operation, each.outcome] += each.count
    return [
        {"minute": minute, "operation": operation, "outcome": outcome, "count": count}
        for (minute, operation, outcome), count in sorted(sums.items())
    ]
