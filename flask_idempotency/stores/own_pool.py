"""An engine beside the application's, to the same database, with a pool of our own."""

from __future__ import annotations

import socket
from weakref import WeakSet, finalize, ref

from sqlalchemy import Engine, QueuePool

from flask_idempotency.core.errors import StoreUnavailable

BRIEF_SECONDS = 0.1
"""How long a connection and a statement may take that a request could do without: a hundred times as
long as they usually do, and no delay that a client would take for an outage."""

engines: WeakSet[Engine] = WeakSet()


def apart(engine: Engine) -> Engine:
    """An engine that connects as ``engine`` does, with the same listeners and limits.

    So whoever waits for a connection of the application's never waits for one of ours, and a request
    that has one needs no second. It opens nothing before it is used, and closes what is idle when
    ``engine`` is disposed: whoever does that may want to drop the database.
    """
    own = Engine(engine.pool.recreate(), engine.dialect, engine.url)
    engines.add(own)
    _dispose_with(ref(engine), ref(own))
    return own


def _dispose_with(engine: ref[Engine], own: ref[Engine]) -> None:
    """Close what is idle in ``own``, and again whenever disposing of ``engine`` ends its pool.

    Holds neither: the listeners that the pools share know the application's engine, which would keep
    its connections for as long as there is ours. Test suites make hundreds of applications.
    """
    if (ours := own()) is not None:
        ours.dispose()
        if (there := engine()) is not None:
            finalize(there.pool, _dispose_with, engine, own).atexit = False


def let_go() -> None:
    """In a forked child, leave the connections of all of them to the parent."""
    for own in list(engines):
        own.dispose(close=False)


def reach(own: Engine) -> None:
    """Raise ``StoreUnavailable`` if a connection would have to be made to a host that does not reply.

    libpq knows only whole seconds, two at least. It makes the connection, as the application does.
    """
    url, pool = own.url, own.pool
    is_idle = isinstance(pool, QueuePool) and pool.checkedin()
    if url.host and "," not in url.host and not is_idle:
        try:
            socket.create_connection((url.host, url.port or 5432), BRIEF_SECONDS).close()
        except OSError as error:
            raise StoreUnavailable from error
