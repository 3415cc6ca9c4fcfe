"""Any other driver of SQLAlchemy's for PostgreSQL that does not need asyncio, such as pg8000.

One statement after the other, by DB-API alone: correct, and slower. The driver begins each transaction
itself, and ends it by ``commit()`` and ``rollback()``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from .port import Values

SEES_TEXTS = True
LEVELS: dict[Any, str] = {}

_PARTS = re.compile(r"'[^']*'|(?P<tag>\$\w*\$).*?(?P=tag)|--[^\n]*|(?P<end>;)", re.DOTALL)
_VALUE = re.compile(r"%\((\w+)\)s")


def is_idle(connection: Any) -> bool:  # noqa: ARG001
    """See :class:`.port.Driver`: DB-API does not tell, so :func:`give_back` sees to it."""
    return True


def has_ended(connection: Any) -> bool:  # noqa: ARG001
    """See :class:`.port.Driver`: DB-API does not tell."""
    return False


def is_failed(connection: Any) -> bool:  # noqa: ARG001
    """See :class:`.port.Driver`: the server says so when it is asked."""
    return False


def take(connection: Any) -> Any:
    """See :class:`.port.Driver`."""


def give_back(connection: Any, found: Any) -> None:  # noqa: ARG001
    """See :class:`.port.Driver`."""
    connection.rollback()


def show(connection: Any) -> None:
    """See :class:`.port.Driver`: it sees the transaction, and would end it."""


def statements(text: str) -> list[str]:
    """The statements of one of our texts."""
    found, begin = [], 0
    for part in _PARTS.finditer(text + ";"):
        if part["end"]:
            found.append((text + ";")[begin : part.start()].strip())
            begin = part.end()
    return [each for each in found if each]


def send(
    connection: Any,
    text: str,
    values: Values | None = None,
    first: Sequence[str] = (),
    *,
    inside: bool = False,
    prepared: bool = False,  # noqa: ARG001
) -> Rows:
    """See :class:`.port.Driver`."""
    ends: dict[str, Callable[[], None]] = {"COMMIT": connection.commit, "ROLLBACK": connection.rollback}
    answer, is_open = Rows(), inside
    with closing(connection.cursor()) as cursor:
        for statement in [*first, *statements(text)]:
            if statement in ends:
                ends[statement]()
                is_open = False
                continue
            sent = statement
            is_open = is_open or statement.startswith("BEGIN")
            if statement.startswith("BEGIN"):  # as the driver does, before the next statement
                sent = statement.replace("BEGIN", "SET TRANSACTION", 1)
                if sent == "SET TRANSACTION":
                    continue
            given = [(values or {})[name] for name in _VALUE.findall(sent)]
            sent = _VALUE.sub("%s", sent)
            cursor.execute(sent, given)
            answer.rowcount = cursor.rowcount
            if cursor.description:
                answer.rows = [tuple(row) for row in cursor.fetchall()]
    if not is_open:
        connection.commit()
    return answer


class Rows:
    """See :class:`.port.Answer`."""

    def __init__(self) -> None:
        self.rowcount = -1
        self.rows: list[tuple[Any, ...]] = []

    def fetchall(self) -> list[tuple[Any, ...]]:
        """See :class:`.port.Answer`."""
        return self.rows
