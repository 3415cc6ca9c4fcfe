"""Cursors outside of operations, of which somebody hears what they are about to send.

They are an operation's cursors, with a listener in the place of its units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Pool, event

from .port import Cursors, Hear, innermost


class Listener:
    """What the cursors ask of units, where there are none."""

    waiting: Sequence[str] = ()
    is_parents = False
    traits = begun = 0
    ends: Sequence[str] = ()
    present = None

    def __init__(self, connection: Any, hear: Hear) -> None:
        self.driver, self.hear, self.lock = connection, hear, RLock()
        self.fairy, self.dbapi_connection = self, connection

    def admit(self, _owner: Any, text: str, sent: tuple[Any, Any, Any]) -> None:
        """A cursor is about to send a text with values."""
        self.hear(sent[0], text, sent[2])

    def savepoint(self, _owner: Any, _text: str) -> bool:
        """Nothing is held back."""
        return False

    def door(self, _owner: Any) -> Any:
        """The connection itself."""
        return self.driver

    def is_current(self, _owner: Any, _number: int) -> bool:
        """A cursor lasts as long as it does for the application."""
        return True

    def is_failed(self) -> bool:
        """Return False: what has failed is the application's matter."""
        return False

    def flush(self, *_what: object) -> None:
        """Nothing waits."""

    sent = show = note = flush


_heard: WeakKeyDictionary[Any, tuple[Listener, Cursors]] = WeakKeyDictionary()


def listen(cursors: Callable[[Listener], Cursors], pool: Pool, connection: Any, hear: Hear) -> None:
    """Tell ``hear`` of all that a driver's own connection sends, until it is back in its pool."""
    if connection in _heard:
        _heard[connection][0].hear = hear
        return
    if _unhook not in pool.dispatch.checkin:  # event.contains would go by the address of the pool
        event.listen(pool, "checkin", _unhook)
    listener = Listener(connection, hear)
    _heard[connection] = listener, cursors(listener)


def _unhook(connection: Any, _record: Any) -> None:
    connection = innermost(connection)
    if connection is not None and connection in _heard:  # None: it was invalidated
        _heard.pop(connection)[1].close()
