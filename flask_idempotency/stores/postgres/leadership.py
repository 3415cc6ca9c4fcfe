"""Whether the server that answered still leads, where a connection's URL names several hosts.

A leader whose processes were frozen for longer than its lease has been replaced when they go on. Until
its agent stops it, within a second or so, it commits what waits in its sockets, and nobody but the new
leader can tell. So an answer is trusted as it comes only if this server gave another within the last
seconds: fewer than are left of its lease, so nobody can have replaced it. After a longer silence, the
other hosts are asked first. Under load that is never, and an application that was idle asks once.

Behind a proxy, whose URL names one host, the proxy has to end such connections.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Engine, event

from flask_idempotency.core.errors import StoreUnavailable
from flask_idempotency.drivers.raw_connection import RawConnection

SILENCE_SECONDS: Final = 10.0
"""Less than is left of a lease that was about to be renewed: ``ttl - loop_wait``, by default 20 s."""

CONNECT_SECONDS: Final = 2
"""For each of the other hosts; the shortest that libpq takes."""

WHICH: Final = "SELECT pg_postmaster_start_time()::text"
"""Tells servers from each other, and two ways to one server not."""


class Deposed(StoreUnavailable):
    """Another host takes writes, too, so what this server has committed may not last."""

    may_go_on = False  # the view would write there, too

    def __init__(self, host: str, port: int) -> None:
        super().__init__(
            "After a fail-over, two servers took writes, and it is not known whether the operation was"
            " committed on the one that stays; a retry with the same key finds out."
        )
        self.__cause__ = RuntimeError(f"beside {host}:{port}, another host of the URL takes writes")


class Leadership:
    """What the servers that an engine's URL names have proved, by host and port."""

    def __init__(self, hosts: Sequence[tuple[str, int]]) -> None:
        self._hosts = hosts
        self._proved: dict[tuple[str, int], float] = {}

    @classmethod
    def of(cls, engine: Engine) -> Leadership | None:
        """That of an engine; None if its URL names one host."""
        _, given = engine.dialect.create_connect_args(engine.url)
        hosts, ports = (str(given.get(name) or "").split(",") for name in ("host", "port"))
        if len(hosts) == 1:
            return None
        ports = ports * len(hosts) if len(ports) == 1 else ports
        return cls([(host, int(port or 5432)) for host, port in zip(hosts, ports, strict=False)])

    def confirm(self, wire: RawConnection) -> None:
        """Trust the answer that has just come on a connection. Raises :class:`Deposed`."""
        info: Any = wire.driver.info
        server, now = (info.host, info.port), time.monotonic()
        proved = self._proved.get(server, now - SILENCE_SECONDS)
        if now - proved >= SILENCE_SECONDS and self._another_leads(wire, server):
            _close_all(wire.engine)
            raise Deposed(*server)
        self._proved[server] = now

    def _another_leads(self, wire: RawConnection, server: tuple[str, int]) -> bool:
        """Ask all other hosts at once; who refuses, or is silent, does not lead."""
        info: Any = wire.driver.info
        given = info.dsn_parameters if hasattr(info, "dsn_parameters") else info.get_parameters()
        given |= {
            "password": info.password,
            "target_session_attrs": "read-write",
            "connect_timeout": CONNECT_SECONDS,
        }
        given.pop("hostaddr", None)
        driver: Any = wire.engine.dialect.loaded_dbapi
        said: dict[tuple[str, int], Any] = {}

        def ask(place: tuple[str, int]) -> None:
            to = given | {"host": place[0], "port": place[1]}
            with contextlib.suppress(driver.Error), contextlib.closing(driver.connect(**to)) as other:
                said[place] = None  # it takes writes: until it says which it is, it is another
                cursor = other.cursor()
                cursor.execute(WHICH)
                said[place] = cursor.fetchone()

        # In threads, as libpq's time-out has no effect where psycopg2 has a wait callback.
        threads = [
            threading.Thread(target=ask, args=[each], name="leadership", daemon=True)
            for each in self._hosts
            if each != server
        ]
        for thread in threads:
            thread.start()
        ends = time.monotonic() + CONNECT_SECONDS + 1
        for thread in threads:
            thread.join(max(ends - time.monotonic(), 0))
        found = list(said.values())
        return bool(found) and {*found} != {wire.send(WHICH).fetchone()}


def _close_all(engine: Engine) -> None:
    """Close the connections of a pool: idle ones now, those in use when they are given back.

    ``dispose()`` alone leaves the latter open in the old pool, until Python's collector finds it.
    """
    pool = engine.pool
    engine.dispose()
    event.listen(pool, "checkin", lambda _connection, entry: entry.invalidate())
    pool.dispose()  # what was given back meanwhile
