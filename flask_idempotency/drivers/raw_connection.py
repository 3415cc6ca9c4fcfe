"""A connection out of the application's pool, on which we send BEGIN and COMMIT ourselves.

A whole transaction then fits into one message. The driver's ``commit()`` and ``rollback()`` and the
pool's reset may do nothing then, so :meth:`RawConnection.close` itself sees to it that no transaction
and no setting goes back to the pool.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import Engine, PoolProxiedConnection

from flask_idempotency.core.errors import NotAtomic
from flask_idempotency.core.process import FORKED, this_process

from . import driver_of
from .port import IDLE, Answer, Driver, innermost
from .sqlstates import is_lost

_taken: dict[Any, None] = {}
"""Drivers' connections with a message of ours on its way, or an operation's transaction open."""


def let_go() -> None:
    """In a forked child, put a closed socket in the place of each connection that the parent uses.

    Otherwise a child that lives on keeps a dead worker's row locked, as the server sees an open socket.
    And under gevent, where a fork copies the greenlets of all requests, the copies would read what is
    the parent's to read.
    """
    closed, other = socket.socketpair()
    other.close()
    with closed:
        for driver in _taken:
            if not driver.closed:
                with suppress(OSError):  # it has lost its socket
                    os.dup2(closed.fileno(), driver.fileno(), inheritable=False)
    _taken.clear()


class RawConnection:
    """One checked-out connection. Whoever makes one closes it, whatever happens.

    ``has_listener`` says that a listener of the pool has begun a transaction on it, to set something.
    """

    closed = True  # until there is something to close

    def __init__(self, engine: Engine, port: Driver | None = None) -> None:
        """Check a connection out; raises the driver's and SQLAlchemy's own errors."""
        self.is_spoiled = False  # used past us: nobody knows what is left on it
        self.engine = engine
        self.port = port or driver_of(engine.dialect)
        self._pid = this_process()
        self.fairy: PoolProxiedConnection = engine.raw_connection()
        try:
            driver = innermost(self.fairy.dbapi_connection)
            self.driver = driver
            if self._pid != this_process():  # forked while this waited: it may be the parent's
                raise self.port.Error(FORKED)
            self._autocommit: bool = driver.autocommit
            # What a listener of the pool set for the connection is kept.
            self.status, self.has_listener = self.port.take(driver)
            _taken[driver] = None
            self.closed = False
        except BaseException:
            self._throw_away()
            raise

    @property
    def isolation(self) -> str:
        """The words behind BEGIN that isolate a transaction as the application asked."""
        chosen = self.engine.get_execution_options().get("isolation_level")
        if self._autocommit or chosen == "AUTOCOMMIT":
            raise NotAtomic(
                "the engine's connections are in autocommit mode (isolation_level AUTOCOMMIT,"
                " connect_args, or a listener), so a view's writes cannot commit together"
                " with the record: give the idempotent routes' engine a transactional level"
            )
        level = chosen or self.port.LEVELS[self.driver.isolation_level]
        words = f"ISOLATION LEVEL {level}" if level else ""
        return f"{words} DEFERRABLE".strip() if self.driver.deferrable else words

    @property
    def lost(self) -> bool:
        """True if the connection is gone."""
        is_invalid = not self.closed and self.fairy.dbapi_connection is None
        return bool(self.driver.closed) or is_invalid

    def send(
        self, text: str, values: dict[str, Any] | None = None, first: Sequence[str] = ()
    ) -> Answer:
        """See :meth:`~.port.Driver.send`."""
        return self.port.send(self.driver, text, values, first)

    def has_committed(self, answer: Answer) -> bool:
        """Return True if the COMMIT at its end did so: that of a failed transaction says ROLLBACK."""
        return answer.statusmessage == "COMMIT"

    def __del__(self) -> None:
        # An exception from a signal handler can strike between two lines. The pool's own reset would
        # then put a connection back with its transaction, and the row's lock, still open.
        if not self.closed:
            _taken.pop(self.driver, None)
            self._throw_away()

    def close(self) -> None:
        """Roll back what is open and give the connection back as it was taken, or throw it away."""
        if self.closed:
            return
        if self._pid != this_process():
            self.closed = True
            self._throw_away()
            return
        clean = False
        try:
            if not self.lost and not self.is_spoiled:
                was_idle = self.status() == IDLE
                if not was_idle:
                    self.send("ROLLBACK")
                self.port.give_back(self.driver, self._autocommit)
                clean = was_idle or self.status() == IDLE
        except self.port.Error as error:
            clean = False
            if not is_lost(error, self.driver):
                raise
        finally:
            self.closed = True
            _taken.pop(self.driver, None)
            if clean:
                self.fairy.close()
            else:
                self._throw_away()

    def _throw_away(self) -> None:
        if self.fairy.dbapi_connection is None:
            return
        if self._pid != this_process():  # which goes on: nothing may be sent, not even that this ends
            self.fairy.detach()
        else:
            self.fairy.invalidate()
