"""What a run is made of: the shop's servers, and the faults that can happen to them."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg2
import sqlalchemy as sa

from laboratory.running import gunicorn, make_tables
from scale.judge import Books
from servers import plain_dsn

LOGS = Path("build/scale/logs").absolute()
MASTERS = 2
WORKERS = 2  # of each master


@dataclass
class Topology:
    """A shop on its servers.

    :param database: what the shop is given as ``DATABASE_URL``.
    :param redis: what it is given as ``REDIS_URL``; empty for none.
    :param truth: the URL of the database that leads at the moment, without anything between.
    :param faults: by name; each returns when everything is whole again.
    :param environment: more of the shop's environment.
    :param application: what gunicorn runs.
    :param urls: where clients send their requests; filled by :func:`shop`.
    """

    database: str
    redis: str
    truth: Callable[[], str]
    faults: Mapping[str, Callable[[], None]]
    environment: Mapping[str, str] = field(default_factory=dict)
    application: str = "example:create_app()"
    urls: list[str] = field(default_factory=list)

    def books(self) -> Books:
        """What the leading database holds."""
        payments = self.ask("SELECT description, count(*) FROM payment GROUP BY 1")
        [(records,)] = self.ask("SELECT count(*) FROM idempotency_record WHERE state = 'completed'")
        return Books(Counter(dict(payments)), records)

    def ask(self, statement: str) -> list[tuple[Any, ...]]:
        """What a statement gives on the leading database."""
        return ask(plain_dsn(self.truth()), statement)


def ask(dsn: str, statement: str) -> list[tuple[Any, ...]]:
    """What a statement gives, on a connection of its own."""
    with (
        contextlib.closing(psycopg2.connect(dsn, connect_timeout=3)) as connection,
        connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(statement)
        return cursor.fetchall() if cursor.description else []


@contextlib.contextmanager
def shop(topology: Topology, masters: int = MASTERS) -> Iterator[Topology]:
    """Run the shop under several gunicorn masters until the block ends."""
    truth = sa.make_url(topology.truth())
    make_tables(truth.render_as_string(hide_password=False))
    topology.ask("UPDATE account SET balance = 1000000000")
    environment = {
        "DATABASE_URL": topology.database,
        "REDIS_URL": topology.redis,
        "SECRET_KEY": secrets.token_hex(),
        "WEB_CONCURRENCY": str(WORKERS),
        **topology.environment,
    }
    LOGS.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        for number in range(masters):
            log = LOGS / f"{os.getpid()}-{number}.log"
            quiet = ("--error-logfile", str(log), "--capture-output")
            url, _process = stack.enter_context(gunicorn(topology.application, environment, *quiet))
            topology.urls.append(url)
        yield topology
