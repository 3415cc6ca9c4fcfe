"""Any other driver of SQLAlchemy's for PostgreSQL that does not need asyncio, such as pg8000.

One statement after the other, by DB-API alone: correct, and slower. The driver begins each transaction
itself, and ends it by ``commit()`` and ``rollback()``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from functools import lru_cache

from flask_idempotency.core.errors import sqlstate

from .raw_connection import IDLE, OPEN, Answer, RawConnection, Values

_PARTS = re.compile(
    r"""'[^']*'|"[^"]*"|\$(?P<tag>\w*)\$.*?\$(?P=tag)\$|--[^\n]*|%\((?P<name>\w+)\)s|;""", re.DOTALL
)

Statement = tuple[str, tuple[str, ...]]
"""One of a text, and the names of its values."""


@lru_cache(128)
def statements(text: str, mark: str = "%({1})s", percent: str = "%%") -> tuple[Statement, ...]:
    """The statements of one of our texts; ``mark`` stands for a value, by its number or its name.

    A value that is named twice is sent twice: the server finds a type for each place.
    """
    found: list[Statement] = []
    names: list[str] = []
    sql, place = "", 0
    for part in _PARTS.finditer(text + ";"):
        sql += text[place : part.start()]
        place = part.end()
        if part["name"]:
            names.append(part["name"])
            sql += mark.format(len(names), part["name"])
        elif part.group() != ";":
            sql += part.group()
        elif sql := sql.strip():
            found.append((sql.replace("%%", percent), tuple(names)))
            sql, names = "", []
    return tuple(found)


class Connection(RawConnection):
    """See :class:`RawConnection`.

    DB-API has nothing that tells whether a connection is gone: it is lost after an error in one of our
    messages that the server has no code for.
    """

    def status(self) -> int:
        """See :class:`RawConnection`: DB-API does not tell, so it is what we have done."""
        return OPEN if self.continues or self.operation() else IDLE

    def send(self, text: str, values: Values | None = None, first: Sequence[str] = ()) -> Answer:
        """See :class:`RawConnection`."""
        message = [*((each, ()) for each in first), *statements(text, "%s")]
        if self.status() == IDLE and not message[0][0].startswith("BEGIN"):
            message.append(("COMMIT", ()))
        count, rows = -1, []
        try:
            with closing(self.driver.cursor()) as cursor:
                for sql, names in message:
                    if sql in ("COMMIT", "ROLLBACK"):
                        getattr(self.driver, sql.lower())()
                    elif sql != "BEGIN":  # the driver begins, with the next statement
                        sent = re.sub("^BEGIN", "SET TRANSACTION", sql)
                        cursor.execute(sent, [(values or {})[name] for name in names])
                        count = cursor.rowcount
                        if cursor.description:
                            rows = [tuple(row) for row in cursor.fetchall()]
        except self.Error as error:
            self.is_gone = self.is_gone or sqlstate(error) is None
            raise
        return rows, count
