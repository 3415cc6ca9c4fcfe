"""The servers of a run: PostgreSQL, Redis, the proxy, and gunicorn with each kind of workers."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import servers
import tests.sessions
from laboratory import running
from tests.faults import app
from tests.faults.nemesis import FAULTS, World, flush
from tests.faults.points import POINTS
from tests.integration.apps import gunicorn_conf

APPLICATION = "tests.faults.app:create_app()"
COOPERATIVE = {"COOPERATIVE": "yes", "PRELOAD": "no"}
"""Lets greenlets change places while psycopg2 waits; see ``gunicorn_conf``. The application is loaded
after gevent's patches: what a request asks for (``points.py``) is then its greenlet's own."""

KINDS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "sync": ((), {}),
    "gthread": (("--threads", "3"), {}),
    "gevent": (("--config", gunicorn_conf.__file__), COOPERATIVE),
}
"""Kinds of workers, their arguments and environment. All serve the same keys.

Flask-SQLAlchemy-Lite 0.2.1 closes its asynchronous sessions in an event loop at the end of a context,
and the loops of two greenlets are in one another's way: it runs without gevent.
"""

HEAL_SECONDS = 5.0


@dataclass(frozen=True)
class Plan:
    """What a run is made of. A share is one of the requests (``changed_share``: of the keys).

    ``kill_share`` asks to die at a point, ``trouble_share`` for a view that raises or declines,
    ``slow_share`` for one that takes longer than the probe age; ``event_share`` of the errands are
    deliveries of events, which a view handles side by side.
    ``wait`` is IDEMPOTENCY_WAIT: with it, duplicates wait in Postgres and not before it.
    """

    seconds: float = 60.0
    seed: int = 1
    workers: int = 6
    clients: int = 12
    design: str = "ours"
    sessions: str = field(default_factory=lambda: tests.sessions.usual)
    faults: tuple[str, ...] = tuple(FAULTS)
    points: tuple[str, ...] = tuple(POINTS)
    kill_share: float = 0.15
    slow_share: float = 0.03
    trouble_share: float = 0.03
    changed_share: float = 0.15
    event_share: float = 0.25
    pause_seconds: float = 0.7
    most_duplicates: int = 3
    wait: float = 0.0

    @property
    def calm_seconds(self) -> float:
        """How long a run goes on after the faults have stopped."""
        return min(HEAL_SECONDS, 0.3 * self.seconds)


class Machines:
    """A PostgreSQL and a Redis of our own, for one run or several, each on a database of its own."""

    def __init__(self) -> None:
        # A crash should lose what was not flushed: claims are committed asynchronously.
        lazy: dict[str, servers.process.Setting] = {"max_connections": 100, "wal_writer_delay": "10s"}
        self.postgres = servers.Postgres(fsync=False, settings=lazy)
        self.redis = servers.Redis()
        self._numbers = itertools.count(1)

    def __enter__(self) -> Machines:
        with ExitStack() as stack:
            stack.enter_context(self.postgres)
            stack.enter_context(self.redis)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def serve(self, plan: Plan, path: Path) -> Iterator[tuple[World, list[str]]]:
        """The application under gunicorn, once for each kind; what is left is killed in the end."""
        database = self.postgres.database(f"faults_{next(self._numbers)}")
        app.create_tables(database)
        with ExitStack() as stack:
            proxy = stack.enter_context(servers.FaultProxy(database))
            environment = {
                "DATABASE_URL": proxy.url,
                "REDIS_URL": self.redis.url,
                "FAULTS_DESIGN": plan.design,
                "FAULTS_SESSIONS": plan.sessions,
                "FAULTS_JOURNAL": str(path),
                "FAULTS_WAIT": str(plan.wait),
            }
            dsn = servers.plain_dsn(database)
            world, urls = World(self.postgres, self.redis, proxy, dsn, []), []
            kinds = {k: KINDS[k] for k in KINDS if (plan.sessions, k) != ("lite", "gevent")}
            for kind, (more, variables) in kinds.items():
                count = str(max(1, plan.workers // len(kinds)))
                arguments = ("--worker-class", kind, "--workers", count, *more)
                quiet = ("--log-level", "critical")
                given = {**environment, **variables}
                gunicorn = running.gunicorn(APPLICATION, given, *arguments, *quiet)
                url, process = stack.enter_context(gunicorn)
                urls.append(url)
                world.gunicorns.append(psutil.Process(process.pid))
            world.heal()
            flush(world, random.Random())
            try:
                yield world, urls
            finally:
                end(world.gunicorns)


def end(masters: list[psutil.Process]) -> None:
    """Kill gunicorns with their workers: a clean end would take seconds, and shows nothing."""
    for master in masters:
        with contextlib.suppress(psutil.NoSuchProcess):
            master.suspend()  # so that no new worker comes
            for each in (*master.children(), master):
                each.kill()
