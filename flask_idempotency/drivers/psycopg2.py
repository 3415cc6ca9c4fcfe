"""psycopg2.

It sends BEGIN as a message of its own. In its autocommit mode it sends only what it is given, so a
whole transaction fits into one message. Switching the mode leaves nothing behind on the server, and
costs no round trip (one, if the engine names an isolation level). The drawback: its ``commit()`` and
``rollback()`` and the pool's reset do nothing then, see :mod:`.raw_connection`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from secrets import token_hex
from typing import Any, ClassVar

from psycopg2 import extensions

from .any import statements
from .raw_connection import IDLE, Answer, Prepared, RawConnection, Values

_PREPARED = ("SELECT", "INSERT", "UPDATE", "DELETE", "WITH")
"""How the statements begin that can be prepared. Of ours, no others have values."""


class Connection(RawConnection):
    """See :class:`RawConnection`."""

    levels: ClassVar = {
        extensions.ISOLATION_LEVEL_READ_UNCOMMITTED: "READ UNCOMMITTED",
        extensions.ISOLATION_LEVEL_READ_COMMITTED: "READ COMMITTED",
        extensions.ISOLATION_LEVEL_REPEATABLE_READ: "REPEATABLE READ",
        extensions.ISOLATION_LEVEL_SERIALIZABLE: "SERIALIZABLE",
    }
    plain_cursor = extensions.cursor
    sees_texts = False
    switched = "autocommit", True

    def status(self) -> int:
        """See :class:`RawConnection`."""
        return self.driver.get_transaction_status()  # type: ignore[no-any-return]

    def exchange(
        self, text: str, values: Values | None, first: Sequence[str], prepared: Prepared | None
    ) -> Answer:
        """See :class:`RawConnection`. Only the last statement's rows are to be had."""
        cursor = extensions.cursor(self.driver)
        if prepared is not None and values:
            if text not in prepared:
                ready, made = _with_names(text)
                if made:
                    cursor.execute(";".join([*first, *made]))
                    first = ()
                prepared[text] = ready
            text = prepared[text]
        if first:
            before = ";".join([*first, ""])
            text = (before.replace("%", "%%") if values else before) + text
        cursor.execute(text, values)
        return cursor.fetchall() if cursor.description else [], cursor.rowcount

    def execute_behind(self, first: list[str], cursor: Any, execute: Callable[[str], object]) -> None:
        """See :class:`RawConnection`."""
        try:
            execute(";".join([*first, ""]))
        except Exception:
            if cursor.query is None:  # psycopg2 has sent nothing
                self.send("", None, first)
            raise

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


def _with_names(text: str) -> tuple[str, list[str]]:
    """A text that names what is prepared, in SQL, and the statements that prepare that.

    No name is given twice, by any process: what is believed to be gone may be there still.
    """
    parts, made = [], []
    for sql, names in statements(text, "${0}"):
        if sql.startswith(_PREPARED):
            name = f"idempotency_{token_hex(12)}"
            made.append(f"PREPARE {name} AS {sql.replace('%%', '%')}")
            values = ", ".join(f"%({each})s" for each in names)
            parts.append(f"EXECUTE {name}({values})" if names else f"EXECUTE {name}")
        else:
            parts.append(sql)
            if sql.startswith("SET LOCAL"):  # as long as a statement waits for a table, so does this
                made.append(sql.replace("%%", "%"))
    return ";".join(parts), made
