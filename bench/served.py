"""The measured applications under gunicorn, with each kind of workers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import psycopg2

import servers
from laboratory import running

from .app import make_client
from .paths import PATIENCE_SECONDS

Pool = tuple[int, int]
"""``pool_size`` and ``max_overflow`` of each worker."""

DEFAULT_POOL = (5, 10)
"""SQLAlchemy's."""

WORKERS = 2

CONFIG = Path(__file__).parent.parent / "tests/integration/apps/gunicorn_conf.py"


@dataclass(frozen=True)
class Kind:
    """A kind of workers.

    Attributes:
        arguments: for gunicorn.
        slots: the requests that one worker serves at once.
        pools: the one that the documentation advises, and others to compare with it.
        keep_alive: whether a connection serves several requests.
        environment: for ``CONFIG``.
    """

    arguments: tuple[str, ...]
    slots: int
    pools: tuple[Pool, ...]
    keep_alive: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


KINDS = {
    "sync": Kind((), 1, ((1, 0),), keep_alive=False),
    "gthread": Kind(("--threads", "8"), 8, ((8, 0), DEFAULT_POOL, (4, 0))),
    "gevent": Kind(
        ("--worker-class", "gevent"),
        1000,
        ((10, 0), DEFAULT_POOL, (5, 0)),
        environment={"COOPERATIVE": "yes"},
    ),
}


@dataclass(frozen=True)
class Served:
    """An application that runs: its port and its database."""

    port: int
    database_url: str

    def payments(self) -> int:
        """How many have been made."""
        return self._ask("SELECT count(*) FROM payment")

    def connections(self) -> int:
        """How many it has open."""
        return self._ask(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    def connected(self) -> int:
        """How often its database was connected to, this question included."""
        return self._ask("SELECT sessions FROM pg_stat_database WHERE datname = current_database()")

    def _ask(self, statement: str) -> int:
        connection = psycopg2.connect(servers.plain_dsn(self.database_url))
        try:
            with connection.cursor() as cursor:
                cursor.execute(statement)
                (number,) = cursor.fetchone() or (0,)
                return int(number)
        finally:
            connection.close()


class Machines:
    """Starts applications on a PostgreSQL and a Redis, each on a database of its own."""

    def __init__(self, postgres: servers.Postgres, redis: servers.Redis) -> None:
        self._postgres, self._redis_url = postgres, redis.url
        self._numbers = count()

    @contextmanager
    def serve(self, kind: Kind, server: str, pool: Pool) -> Iterator[Served]:
        """The application ``unprotected``, ``hybrid`` or ``postgres``, until the block ends."""
        database_url = self._postgres.database(f"served_{next(self._numbers)}")
        _make_tables(database_url)
        patient = f"{self._redis_url}?socket_timeout={PATIENCE_SECONDS}"
        environment = {
            "DATABASE_URL": database_url,
            "REDIS_URL": patient if server == "hybrid" else "",
            "PROTECT": "no" if server == "unprotected" else "yes",
            "ENGINE_OPTIONS": json.dumps(dict(zip(("pool_size", "max_overflow"), pool, strict=True))),
            "PRELOAD": "no",  # gevent must patch first
            **kind.environment,
        }
        arguments = ("--config", str(CONFIG), "--workers", str(WORKERS), *kind.arguments)
        with running.gunicorn("bench.wsgi:create_app()", environment, *arguments) as (url, _):
            yield Served(urlsplit(url).port or 0, database_url)


def _make_tables(database_url: str) -> None:
    """Here, not in several workers at the same time."""
    application = make_client(database_url).application
    with application.app_context():
        application.extensions["sqlalchemy"].engine.dispose()
