"""psycopg2.

It sends BEGIN as a message of its own. In its autocommit mode it sends only what it is given, so a
whole transaction fits into one message. Switching the mode leaves nothing behind on the server, and
costs no round trip (one, if the engine names an isolation level). The drawback: its ``commit()`` and
``rollback()`` and the pool's reset do nothing then, see :mod:`.raw_connection`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import psycopg2
from psycopg2 import extensions

from .port import Values

SEES_TEXTS = False
LEVELS = {
    None: "",
    extensions.ISOLATION_LEVEL_READ_UNCOMMITTED: "READ UNCOMMITTED",
    extensions.ISOLATION_LEVEL_READ_COMMITTED: "READ COMMITTED",
    extensions.ISOLATION_LEVEL_REPEATABLE_READ: "REPEATABLE READ",
    extensions.ISOLATION_LEVEL_SERIALIZABLE: "SERIALIZABLE",
}


def is_idle(connection: Any) -> bool:
    """See :class:`.port.Driver`."""
    status = connection.get_transaction_status()
    return bool(status == extensions.TRANSACTION_STATUS_IDLE) and (
        connection.status == extensions.STATUS_READY
    )


def has_ended(connection: Any) -> bool:
    """See :class:`.port.Driver`."""
    return bool(connection.get_transaction_status() == extensions.TRANSACTION_STATUS_IDLE)


def is_failed(connection: Any) -> bool:
    """See :class:`.port.Driver`."""
    return bool(connection.get_transaction_status() == extensions.TRANSACTION_STATUS_INERROR)


def take(connection: Any) -> Any:
    """See :class:`.port.Driver`."""
    connection.autocommit = True


def give_back(connection: Any, found: Any) -> None:  # noqa: ARG001
    """See :class:`.port.Driver`."""
    if connection.status != extensions.STATUS_READY:
        connection.tpc_rollback()
    elif connection in _shown:  # and ended by what psycopg2 does not refuse
        raise psycopg2.InterfaceError("the connection is not as it was")
    _shown.discard(connection)
    connection.autocommit = False


_shown: WeakSet[Any] = WeakSet()
"""Those that psycopg2 was shown a transaction on."""


def show(connection: Any) -> None:
    """See :class:`.port.Driver`.

    In autocommit mode psycopg2 refuses named cursors and large objects. In a transaction of two phases,
    which it begins by a BEGIN that changes nothing, it refuses ``commit()`` and ``rollback()``.
    """
    if connection.autocommit:
        _shown.add(connection)
        connection.autocommit = False
        connection.tpc_begin(connection.xid(0, "flask-idempotency", ""))


def send(
    connection: Any,
    text: str,
    values: Values | None = None,
    first: Sequence[str] = (),
    *,
    inside: bool = False,  # noqa: ARG001
    prepared: bool = False,  # noqa: ARG001
) -> _Cursor:
    """See :class:`.port.Driver`."""
    cursor = _Cursor(connection)
    message = cursor.mogrify(text, values) if text else b""
    if first:
        encoding = extensions.encodings.get(connection.encoding, "utf-8")
        message = ";".join([*first, ""]).encode(encoding) + message
    cursor.execute(message)
    return cursor


class _Cursor(extensions.cursor):
    def fetchall(self) -> list[tuple[Any, ...]]:
        """See :class:`.port.Answer`. Only the last statement's rows are to be had."""
        return super().fetchall() if self.description else []
