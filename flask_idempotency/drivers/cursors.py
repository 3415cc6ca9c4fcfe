"""The one ear of a connection: its cursors tell somebody what they are about to send.

Each driver has subclasses of the application's cursors. In an operation they tell its units, elsewhere
a :class:`Listener`. What the two drivers' cursors have in common is here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Pool, event

from flask_idempotency.core.errors import NotAtomic
from flask_idempotency.core.process import INHERITED

from .port import Cursors, Hear, innermost
from .sqlstates import base_of


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

    note = flush


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


# What both drivers' cursors do.


def text_of(statement: Any, context: Any) -> str:
    """A statement as it was written, without the values, which are a client's.

    It is given to the driver as text, as bytes, or composed with the driver's help (``context``).
    """
    if isinstance(statement, bytes):
        return statement.decode("latin-1")
    return str(statement.as_string(context) if hasattr(statement, "as_string") else statement)


def sending(units: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Send something; what waited in front of it has then reached the server."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        if base_of(error) is not None:
            units.note(error)
        raise
    finally:
        units.waiting = []


def in_its_unit(fetch: Any, ended: Callable[[Any], Exception]) -> Callable[..., Any]:
    """The method of a cursor on the server, which raises what ``ended`` makes once its unit is over."""

    def fetch_or_refuse(cursor: Any, *args: Any, **kwargs: Any) -> Any:
        units = cursor.units
        with units.lock:
            if units.is_parents:
                raise NotAtomic(INHERITED)
            if not is_open(cursor):
                raise ended(cursor)
            try:
                return fetch(cursor, *args, **kwargs)
            except Exception as error:
                if base_of(error) is not None:
                    units.note(error)
                raise

    return fetch_or_refuse


def is_open(cursor: Any) -> bool:
    """Return True unless a cursor on the server has ended with its unit."""
    return bool(cursor.withhold or cursor.units.is_current(cursor.owner, cursor.unit))
