"""A driver's connection on which we send BEGIN and COMMIT ourselves.

A whole transaction then fits into one message. The driver's ``rollback()`` and the pool's reset may do
nothing then, so whatever gives the connection back to its pool finds it in :data:`taken` and puts it
right, also after an exit that struck between two lines.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from sqlalchemy import Connection, Dialect, Engine, exc

from flask_idempotency.core.errors import AUTOCOMMIT, NotAtomic
from flask_idempotency.core.process import this_process

from . import driver_of
from .port import Answer, Values, innermost

taken: dict[Any, RawConnection] = {}
"""By the driver's connection, those with a message or a transaction of ours. None keeps its pool's."""


def let_go() -> None:
    """In a forked child, put a closed socket in the place of each connection that the parent uses.

    Otherwise a child that lives on keeps a dead worker's row locked, as the server sees an open socket.
    And under gevent, where a fork copies the greenlets of all requests, the copies would read what is
    the parent's to read.
    """
    closed, other = socket.socketpair()
    other.close()
    with closed:
        for driver in taken:
            if not getattr(driver, "closed", True):
                with suppress(OSError):  # it has lost its socket
                    os.dup2(closed.fileno(), driver.fileno(), inheritable=False)
    taken.clear()


class RawConnection:
    """A driver's connection. Whoever makes one ends it by :meth:`put_right` or :meth:`leave`.

    ``continues``: a transaction is open on it, begun by the driver, which is also to end it.
    ``operation`` refers to the operation's transaction that is open on it, if there is one.
    """

    operation: Callable[[], Any] = bool
    is_unsure: bool  # something was sent that may have ended what is prepared
    _found: Any = None
    _hide: Callable[[bool], object] | None = None

    def __init__(self, driver: Any, dialect: Dialect, *, continues: bool = False) -> None:
        self.driver, self.port, self.continues = driver, driver_of(dialect), continues
        self.pid, self.is_unsure = this_process(), continues
        self.Error: type[Exception] = dialect.loaded_dbapi.Error
        if getattr(driver, "autocommit", False) is True:
            raise NotAtomic(AUTOCOMMIT)
        taken[driver] = self  # what undoes is there before what is done
        if not continues:
            self._found = self.port.take(driver)

    @property
    def level(self) -> str:
        """The words behind BEGIN that isolate a transaction as the engine's connections are."""
        level = self.port.LEVELS.get(getattr(self.driver, "isolation_level", None), "")
        words = f"ISOLATION LEVEL {level}" if level else ""
        is_deferrable = getattr(self.driver, "deferrable", None) is True
        return f"{words} DEFERRABLE".strip() if is_deferrable else words

    def send(self, text: str, values: Values | None = None, first: Sequence[str] = ()) -> Answer:
        """See :meth:`.port.Driver.send`."""
        is_inside = self.continues or bool(self.operation())
        return self.port.send(
            self.driver, text, values, first, inside=is_inside, prepared=not self.is_unsure
        )

    def commit(self, text: str, values: Values, first: Sequence[str]) -> None:
        """Send a message and commit, in one round trip if the driver notices that."""
        if self.continues and not self.port.SEES_TEXTS:
            self.send(text, values, first)
            self.driver.commit()
        else:
            self.send(f"{text};\nCOMMIT", values, first)

    def roll_back(self) -> None:
        """Roll back what was continued: from now on BEGIN and COMMIT are ours."""
        self.driver.rollback()
        self.continues, self._found = False, self.port.take(self.driver)

    def is_lost(self) -> bool:
        """Return True if the connection is gone."""
        return bool(getattr(self.driver, "closed", False))

    def is_taken(self) -> bool:
        """Return True until it is given back, in the process that took it."""
        return taken.get(self.driver) is self

    @property
    def is_shown(self) -> bool:
        """True between :meth:`show` and :meth:`hide`, where the driver needs that."""
        return self._hide is not None

    def show(self) -> None:
        """See :meth:`.port.Driver.show`."""
        if self._hide is None:
            self._hide = self.port.show(self.driver)

    def hide(self, *, failed: bool = False) -> bool:
        """Undo :meth:`show`, before a savepoint ends that is around. Return True if it was shown."""
        hide, self._hide = self._hide, None
        if hide is not None:
            hide(failed)
        return hide is not None

    def leave(self) -> None:
        """Leave a transaction that was to be continued to whoever has begun it."""
        taken.pop(self.driver, None)

    def put_right(self) -> None:
        """Roll back what is open, and leave the driver's connection as it was found.

        Raises the driver's errors: then the connection is not to be used again.
        """
        if self._hide is not None:
            self.hide(failed=True)
        if self.continues or (self.port.SEES_TEXTS and not self.port.is_idle(self.driver)):
            self.driver.rollback()  # which also forgets what the driver has prepared
        if not self.continues:
            if not self.port.is_idle(self.driver):
                self.send("ROLLBACK")
            self.port.give_back(self.driver, self._found)
        taken.pop(self.driver, None)


@contextmanager
def borrowed(engine: Engine) -> Iterator[RawConnection]:
    """A connection from an engine's pool, for messages of ours. It goes back as it was found.

    Raises the driver's and SQLAlchemy's errors.
    """
    pooled: Any = engine.raw_connection()
    try:
        driver = innermost(pooled.dbapi_connection)
        if not driver_of(engine.dialect).is_idle(driver):  # a listener has set something
            driver.commit()
        yield RawConnection(driver, engine.dialect)
    finally:
        give_back_pooled(pooled)


def give_back_pooled(pooled: Any) -> None:
    """Give back what came from a pool, as it was found; it is thrown away if that fails."""
    if pooled.dbapi_connection is None:
        return
    raw = taken.get(innermost(pooled.dbapi_connection))
    try:
        if raw is not None:
            if raw.pid != this_process():  # which goes on with it
                pooled.detach()
                return
            raw.put_right()
    except BaseException as error:
        pooled.invalidate(error)
        if not isinstance(error, raw.Error):  # type: ignore[union-attr]
            raise
    else:
        pooled.close()
    finally:
        if raw is not None:
            raw.leave()


def give_back(connection: Connection) -> None:
    """The same with a connection of SQLAlchemy's, which it closes."""
    if not (connection.closed or connection.invalidated):
        raw = taken.get(innermost(connection.connection.dbapi_connection))
        try:
            if raw is not None:
                raw.operation = bool
                raw.put_right()
        except BaseException as error:
            connection.invalidate(error)
            if not isinstance(error, raw.Error):  # type: ignore[union-attr]
                raise
        finally:
            if raw is not None:
                raw.leave()
    with suppress(exc.SQLAlchemyError):
        connection.close()
