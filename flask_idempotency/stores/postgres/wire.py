"""A connection out of the application's pool, on which we send BEGIN and COMMIT ourselves.

psycopg2 sends BEGIN as a message of its own. In the driver's autocommit mode it sends only what it is
given, so a whole transaction fits into one message. Switching the mode leaves nothing
behind on the server, and costs no round trip (one, if the engine names an isolation level). The
drawback: the driver's ``commit()`` and ``rollback()`` and the pool's reset do nothing then, so
:meth:`RawConnection.close` itself sees to it that no transaction and no setting goes back to the pool.
"""

from __future__ import annotations

from typing import Any

import psycopg2
from psycopg2.extensions import (
    ISOLATION_LEVEL_READ_COMMITTED,
    ISOLATION_LEVEL_READ_UNCOMMITTED,
    ISOLATION_LEVEL_REPEATABLE_READ,
    ISOLATION_LEVEL_SERIALIZABLE,
    STATUS_BEGIN,
    STATUS_READY,
    TRANSACTION_STATUS_IDLE,
)
from sqlalchemy import Engine, PoolProxiedConnection

from flask_idempotency.core.errors import NotAtomic

from .failures import is_lost

Connection = psycopg2.extensions.connection
Cursor = psycopg2.extensions.cursor

_LEVELS = {
    None: "",
    ISOLATION_LEVEL_READ_UNCOMMITTED: "READ UNCOMMITTED",
    ISOLATION_LEVEL_READ_COMMITTED: "READ COMMITTED",
    ISOLATION_LEVEL_REPEATABLE_READ: "REPEATABLE READ",
    ISOLATION_LEVEL_SERIALIZABLE: "SERIALIZABLE",
}


class RawConnection:
    """One checked-out connection. Whoever makes one closes it, whatever happens.

    ``has_listener`` says that a listener of the pool has begun a transaction on it, to set something.
    """

    closed = True  # until there is something to close

    def __init__(self, engine: Engine) -> None:
        """Check a connection out; raises the driver's and SQLAlchemy's own errors."""
        self.is_spoiled = False  # used past us: nobody knows what is left on it
        self.engine = engine
        self.fairy: PoolProxiedConnection = engine.raw_connection()
        try:
            driver: Any = self.fairy.dbapi_connection  # psycopg2's own, with nothing around it
            assert isinstance(driver, Connection)  # noqa: S101 -- init_app refuses other drivers
            self.driver = driver
            self.has_listener = driver.status == STATUS_BEGIN
            if self.has_listener:  # of the pool's; what it set for the connection is kept
                driver.commit()
            self._autocommit: bool = driver.autocommit
            self.closed = False
            driver.autocommit = True
        except BaseException:
            self._throw_away()
            raise

    @property
    def isolation(self) -> str:
        """What follows BEGIN so that the transaction is as isolated as the application asked."""
        chosen = self.engine.get_execution_options().get("isolation_level")
        if self._autocommit or chosen == "AUTOCOMMIT":
            raise NotAtomic(
                "the engine's isolation_level is AUTOCOMMIT, so a view's writes cannot commit together"
                " with the record: give the idempotent routes' engine a transactional level"
            )
        level = chosen or _LEVELS[self.driver.isolation_level]
        words = f"ISOLATION LEVEL {level}" if level else ""
        return f"{words} DEFERRABLE".strip() if self.driver.deferrable else words

    @property
    def lost(self) -> bool:
        """Whether the connection is gone."""
        is_invalid = not self.closed and self.fairy.dbapi_connection is None
        return bool(self.driver.closed) or is_invalid

    @property
    def in_transaction(self) -> bool:
        """Whether the server has a transaction open on it, failed or not."""
        return self.driver.get_transaction_status() != TRANSACTION_STATUS_IDLE

    def send(self, sql: str | bytes, values: dict[str, Any] | None = None) -> Cursor:
        """One message to the server, past the units. Raises the driver's errors."""
        cursor = Cursor(self.driver)
        cursor.execute(sql, values)
        return cursor

    def mogrify(self, sql: str, values: dict[str, Any]) -> bytes:
        """The message with its values bound, as it would be sent."""
        return bytes(Cursor(self.driver).mogrify(sql, values))

    def __del__(self) -> None:
        # An exception from a signal handler can strike between two lines. The pool's own reset would
        # then put a connection back with its transaction, and the row's lock, still open.
        if not self.closed:
            self._throw_away()

    def close(self) -> None:
        """Roll back what is open and give the connection back as it was taken, or throw it away."""
        if self.closed:
            return
        clean = False
        try:
            if not self.lost and not self.is_spoiled:
                was_idle = not self.in_transaction
                if not was_idle:
                    self.send("ROLLBACK")
                self.restore()
                self.driver.autocommit = self._autocommit
                clean = was_idle or not self.in_transaction
        except psycopg2.Error as error:
            clean = False
            if not is_lost(error, self.driver):
                raise
        finally:
            self.closed = True
            if clean:
                self.fairy.close()
            else:
                self._throw_away()

    def _throw_away(self) -> None:
        if self.fairy.dbapi_connection is not None:
            self.fairy.invalidate()

    def restore(self) -> None:
        """Undo what psycopg2 was shown of the transaction, once that is over."""
        if self.driver.status != STATUS_READY:
            self.driver.tpc_rollback()
