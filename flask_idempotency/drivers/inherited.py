"""Connections that a forked child inherits: it lets go of them without a word to the server.

A socket that two processes have does harm in two ways. Each may read the other's replies. And the
server does not notice that one has died while the other lives, so a dead worker's row stays locked.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from weakref import ref

from sqlalchemy import Engine, event
from sqlalchemy.pool import ConnectionPoolEntry

held: dict[Any, None] = {}
"""Driver's connections with a message of ours on its way, or an operation's transaction open."""

_entries: set[ref[ConnectionPoolEntry]] = set()


def watch(engine: Engine) -> None:
    """Remember the connections that an engine's pool opens from now on, for as long as it has them."""
    if _note not in engine.pool.dispatch.connect:  # event.contains would go by its address
        event.listen(engine, "connect", _note)


def _note(_driver: Any, entry: ConnectionPoolEntry) -> None:
    _entries.add(ref(entry, _entries.discard))


def _entries_in_use(*, in_use: bool) -> list[ConnectionPoolEntry]:
    found = [each() for each in list(_entries)]
    return [entry for entry in found if entry is not None and entry.in_use is in_use]


def let_go() -> None:
    """In a forked child: leave to the parent what is held or idle.

    What the application itself uses is left alone: it may go on with that in the child.
    """
    sever([*held, *(entry.dbapi_connection for entry in _entries_in_use(in_use=False))])


def renew_shared() -> None:
    """In the parent: no row shall be held on what the application uses now, as the child has it, too.

    The pool opens these connections anew when they are next taken from it.
    """
    for entry in _entries_in_use(in_use=True):
        if entry.dbapi_connection not in held:
            entry.invalidate(soft=True)


def sever(drivers: Iterable[Any]) -> None:
    """Put a socket whose other end is closed in the place of each connection's, in this process.

    Whatever is sent or read there meets the end of the connection.
    """
    closed, other = socket.socketpair()
    other.close()
    with closed:
        for driver in drivers:
            if not getattr(driver, "closed", True):
                with suppress(OSError):  # it has lost its socket
                    os.dup2(closed.fileno(), driver.fileno(), inheritable=False)
