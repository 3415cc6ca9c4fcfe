"""A connection out of the application's pool, on which we send BEGIN and COMMIT ourselves.

psycopg2 sends BEGIN as a message of its own. In the driver's autocommit mode it sends what it is
told and nothing else, so a whole transaction fits into one message. Switching the mode leaves nothing
behind on the server, and costs no round trip (one, if the engine names an isolation level). The other
side of it: the driver's ``commit()`` and ``rollback()`` and the pool's reset do nothing then, so
:meth:`Wire.close` itself sees to it that no transaction and no setting goes back to the pool.
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
    TRANSACTION_STATUS_IDLE,
)
from sqlalchemy import Engine

from ..errors import NotAtomic
from .failures import is_lost
from .savepoints import Cursor, Room, WatchedConnection

LEVELS = {
    None: "",
    ISOLATION_LEVEL_READ_UNCOMMITTED: "ISOLATION LEVEL READ UNCOMMITTED",
    ISOLATION_LEVEL_READ_COMMITTED: "ISOLATION LEVEL READ COMMITTED",
    ISOLATION_LEVEL_REPEATABLE_READ: "ISOLATION LEVEL REPEATABLE READ",
    ISOLATION_LEVEL_SERIALIZABLE: "ISOLATION LEVEL SERIALIZABLE",
}
"""The application's isolation level, named in our BEGIN, which would drop it otherwise."""


class Wire:
    """One checked-out connection. Whoever opens a wire closes it, whatever happens."""

    def __init__(self, engine: Engine) -> None:
        """Check a connection out; SQLAlchemy's errors come as they are."""
        self.closed = True
        self.connection = WatchedConnection(engine)
        try:
            self.room = Room(self.connection)
            self.driver = self.room.driver
            if self.driver.status == STATUS_BEGIN:  # a connect listener's SET: keep it
                self.driver.commit()
            self._autocommit: bool = self.driver.autocommit
            self.closed = False
            self.driver.autocommit = True
        except BaseException:
            self.connection.invalidate()
            self.connection.close()
            self.closed = True
            raise

    @property
    def begin(self) -> str:
        """What follows BEGIN so that the transaction is as isolated as the application asked."""
        if self._autocommit:
            raise NotAtomic(
                "the engine's isolation_level is AUTOCOMMIT, so a view's writes cannot commit together"
                " with the record: give the idempotent routes' engine a transactional level"
            )
        return LEVELS[self.driver.isolation_level]

    @property
    def lost(self) -> bool:
        """Whether the connection is gone."""
        return bool(self.driver.closed) or self.connection.invalidated

    @property
    def in_transaction(self) -> bool:
        """Whether the server has a transaction open on it, failed or not."""
        return self.driver.info.transaction_status != TRANSACTION_STATUS_IDLE

    def send(self, sql: str | bytes, values: dict[str, Any] | None = None) -> Cursor:
        """One message to the server, past the room. Raises the driver's errors."""
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
            self.connection.invalidate()

    def close(self) -> None:
        """Roll back what is open and give the connection back as it was taken, or throw it away."""
        clean = False
        try:
            self.room.close()
            if not self.lost:
                if self.in_transaction:
                    self.send("ROLLBACK")
                self.room.restore()
                self.driver.autocommit = self._autocommit
                clean = not self.in_transaction
        except psycopg2.Error as error:
            clean = False
            if not is_lost(error, self.driver):
                raise
        finally:
            if not clean:
                self.connection.invalidate()
            self.connection.close()
            self.closed = True
