"""psycopg2.

It sends BEGIN as a message of its own. In its autocommit mode it sends only what it is given, so a
whole transaction fits into one message. Switching the mode leaves nothing behind on the server, and
costs no round trip (one, if the engine names an isolation level). The drawback: its ``commit()`` and
``rollback()`` and the pool's reset do nothing then, see :mod:`.raw_connection`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from psycopg2 import extensions

from .raw_connection import IDLE, Answer, RawConnection, Values


class Connection(RawConnection):
    """See :class:`RawConnection`."""

    levels: ClassVar = {
        extensions.ISOLATION_LEVEL_READ_UNCOMMITTED: "READ UNCOMMITTED",
        extensions.ISOLATION_LEVEL_READ_COMMITTED: "READ COMMITTED",
        extensions.ISOLATION_LEVEL_REPEATABLE_READ: "REPEATABLE READ",
        extensions.ISOLATION_LEVEL_SERIALIZABLE: "SERIALIZABLE",
    }
    sees_texts = False
    switched = "autocommit", True

    def status(self) -> int:
        """See :class:`RawConnection`."""
        return self.driver.get_transaction_status()  # type: ignore[no-any-return]

    def send(self, text: str, values: Values | None = None, first: Sequence[str] = ()) -> Answer:
        """See :class:`RawConnection`. Only the last statement's rows are to be had."""
        cursor = extensions.cursor(self.driver)
        if first:
            before = ";".join([*first, ""])
            text = (before.replace("%", "%%") if values else before) + text
        cursor.execute(text, values)
        return cursor.fetchall() if cursor.description else [], cursor.rowcount

    def show(self) -> None:
        """See :class:`RawConnection`: it can refuse only in a transaction that we have begun.

        In autocommit mode psycopg2 refuses named cursors and large objects. In a transaction of two
        phases, which it begins by a BEGIN that changes nothing, it refuses ``commit()`` and
        ``rollback()``.
        """
        if self.driver.autocommit:
            self.is_shown, self.driver.autocommit = True, False
            self.driver.tpc_begin(self.driver.xid(0, "flask-idempotency", ""))

    def undo(self) -> None:
        """See :class:`RawConnection`."""
        if self.is_shown:  # refused if the transaction was ended by what psycopg2 does not refuse
            self.driver.tpc_rollback()
        elif self.continues:
            self.driver.rollback()
        elif self.status() != IDLE:
            self.send("ROLLBACK")
