"""Python's own driver for SQLite, in the place of one for PostgreSQL.

It begins transactions by itself, late, and not at all before a SAVEPOINT: so that is turned off, and
BEGIN is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from .any import statements
from .raw_connection import IDLE, OPEN, Answer, RawConnection, Values


class Connection(RawConnection):
    """See :class:`RawConnection`."""

    switched = "isolation_level", None

    def status(self) -> int:
        """See :class:`RawConnection`."""
        return OPEN if self.driver.in_transaction else IDLE

    def send(self, text: str, values: Values | None = None, first: Sequence[str] = ()) -> Answer:
        """See :class:`RawConnection`."""
        cursor = self.driver.cursor()
        for sql in [*first, *(sql for sql, _ in statements(text, ":{1}"))]:
            cursor.execute(sql, values or {})
        return cursor.fetchall(), cursor.rowcount
