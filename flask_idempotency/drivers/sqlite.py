"""Python's own driver for SQLite, in the place of one for PostgreSQL.

It begins transactions by itself, late, and not at all before a SAVEPOINT: so that is turned off, and
BEGIN is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .any import Rows, statements
from .port import Values

SEES_TEXTS = True
LEVELS: dict[Any, str] = {}


def is_idle(connection: Any) -> bool:
    """See :class:`.port.Driver`."""
    return not connection.in_transaction


has_ended = is_idle


def is_failed(connection: Any) -> bool:  # noqa: ARG001
    """See :class:`.port.Driver`: the server says so when it is asked."""
    return False


def take(connection: Any) -> Any:
    """See :class:`.port.Driver`."""
    found, connection.isolation_level = connection.isolation_level, None
    return found


def give_back(connection: Any, found: Any) -> None:
    """See :class:`.port.Driver`."""
    connection.isolation_level = found


def show(connection: Any) -> None:
    """See :class:`.port.Driver`: whatever is sent on it, only we may end the transaction."""


def send(
    connection: Any,
    text: str,
    values: Values | None = None,
    first: Sequence[str] = (),
    *,
    inside: bool = False,  # noqa: ARG001
    prepared: bool = False,  # noqa: ARG001
) -> Rows:
    """See :class:`.port.Driver`. Values are named ``:name``."""
    answer = Rows()
    for statement in [*first, *statements(text)]:
        cursor = connection.execute(statement, values or {})
        answer.rowcount = cursor.rowcount
        if cursor.description:
            answer.rows = cursor.fetchall()
    return answer
