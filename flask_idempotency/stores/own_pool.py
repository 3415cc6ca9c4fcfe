"""An engine beside the application's, to the same database, with a few connections of its own."""

from __future__ import annotations

import socket
from typing import Any
from weakref import WeakSet

from sqlalchemy import Engine, QueuePool, event

from flask_idempotency.drivers.sqlalchemy_private import hear_disposed, pool_beside

OWN_CONNECTIONS = 6
"""The most that one process uses beside its requests' own: four for requests that are observed, and one
each for the purge after a response and the metrics."""

BRIEF_SECONDS = 0.1
"""How long a connection and a statement may take that a request could do without: a hundred times as
long as they usually do, and no delay that a client would take for an outage."""

_all: WeakSet[Engine] = WeakSet()


def apart(engine: Engine) -> Engine:
    """An engine that connects as ``engine`` does, and never more than :data:`OWN_CONNECTIONS` times.

    It has the same dialect, whose listeners may fetch a password, and tells those for new connections,
    which may set a search path. Those for check-outs serve requests, and are not told. It opens nothing
    before it is used, and closes what is idle when ``engine`` is disposed. If every connection stays in
    use for :data:`BRIEF_SECONDS`, it raises SQLAlchemy's ``TimeoutError``.
    """
    pool = pool_beside(engine, OWN_CONNECTIONS, BRIEF_SECONDS)

    def connected(driver: Any, record: Any) -> None:
        for listener in engine.pool.dispatch.connect.listeners:  # those on the class are told anyway
            listener(driver, record)

    event.listen(pool, "connect", connected)
    own = Engine(pool, engine.dialect, engine.url)
    _all.add(own)
    # Else whoever disposes the application's engine could not drop its database.
    hear_disposed(engine, lambda _engine: own.dispose())
    return own


def let_go() -> None:
    """In a forked child, leave the connections of all of them to the parent."""
    for own in list(_all):
        own.dispose(close=False)


def reach(own: Engine) -> None:
    """Raise ``OSError`` if a connection would have to be made to a host that does not reply.

    libpq knows only whole seconds, two at least. It makes the connection, as the application does.
    """
    url, pool = own.url, own.pool
    is_idle = isinstance(pool, QueuePool) and pool.checkedin()
    if url.host and "," not in url.host and not is_idle:
        socket.create_connection((url.host, url.port or 5432), BRIEF_SECONDS).close()
