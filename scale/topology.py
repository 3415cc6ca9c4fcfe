"""What a run is made of: the shop's servers, and the faults that can happen to them."""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg2

from laboratory.running import make_tables
from scale.judge import Books
from scale.masters import Master
from servers import plain_dsn


@dataclass
class Topology:
    """A shop on its servers.

    :param database: what the shop is given as ``DATABASE_URL``.
    :param redis: what it is given as ``REDIS_URL``; empty for none.
    :param truth: the URL of the database that leads at the moment, without anything between.
    :param faults: by name; each returns when everything is whole again.
    :param urls: where clients send their requests; to the masters, if left out.
    :param masters: :func:`shop` starts them.
    :param counts: what else a run has to tell, such as how often a fault has met something.
    """

    database: str
    redis: str
    truth: Callable[[], str]
    faults: Mapping[str, Callable[[], None]]
    environment: Mapping[str, str] = field(default_factory=dict)
    urls: list[str] = field(default_factory=list)
    masters: list[Master] = field(default_factory=lambda: [Master(), Master()])
    counts: Callable[[], Mapping[str, int]] = dict

    def books(self) -> Books:
        """What the leading database holds."""
        url = self.truth()
        return Books(*(Counter(dict(ask(url, each))) for each in (_PAYMENTS, _RECORDS)))


_PAYMENTS = "SELECT description, count(*) FROM payment GROUP BY 1"
_RECORDS = """SELECT convert_from(body, 'UTF8')::json ->> 'description', count(*)
    FROM idempotency_record WHERE state = 'completed' GROUP BY 1"""


def ask(url: str, statement: str) -> list[tuple[Any, ...]]:
    """What a statement gives on a database."""
    with (
        contextlib.closing(psycopg2.connect(plain_dsn(url))) as connection,
        connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(statement)
        return cursor.fetchall() if cursor.description else []


@contextlib.contextmanager
def shop(topology: Topology) -> Iterator[Topology]:
    """Run the shop under its gunicorn masters until the block ends."""
    url = topology.truth()
    make_tables(url)
    ask(url, "UPDATE account SET balance = 1000000000")
    environment = {
        "DATABASE_URL": topology.database,
        "REDIS_URL": topology.redis,
        "SECRET_KEY": secrets.token_hex(),
        **topology.environment,
    }
    with contextlib.ExitStack() as stack:
        for master in topology.masters:
            master.environment = environment
            stack.callback(master.stop)
            master.start()
        topology.urls = topology.urls or [master.url for master in topology.masters]
        yield topology
