"""What a request takes of the application, PostgreSQL, Redis and the disk: for planning."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil
import psycopg2
import redis

import servers

from .paths import Shops
from .run import STORES

REQUESTS = 2000
"""Enough that the clock's ticks of 10 ms change a figure by some µs."""

PATHS = ("bare", "first, hybrid", "first, postgres", "empty", "replay, hybrid", "replay, postgres")


@dataclass(frozen=True)
class Taken:
    """What was taken, so far or by one request.

    Attributes:
        application: seconds of processor time, client's part included.
        postgres: seconds of processor time of all its processes.
        redis: seconds of processor time.
        wal: bytes of PostgreSQL's write-ahead log.
        memory: bytes in Redis.
    """

    application: float
    postgres: float
    redis: float
    wal: float
    memory: float


class Meter:
    """Reads what has been taken so far."""

    def __init__(self, postgres: servers.Postgres, redis_server: servers.Redis) -> None:
        self._postgres, self._redis_server = psutil.Process(postgres.pid), redis_server
        self._connection = psycopg2.connect(postgres.dsn)
        self._connection.autocommit = True
        self._redis = redis.Redis.from_url(redis_server.url)

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()
        self._redis.close()

    def checkpoint(self) -> None:
        """The next change of each page writes it whole into the log."""
        self._ask("CHECKPOINT")

    def read(self) -> Taken:
        """What has been taken so far, by what still runs."""
        times = psutil.Process(self._redis_server.pid).cpu_times()
        return Taken(
            application=time.process_time(),
            postgres=sum(_spent(child) for child in self._postgres.children()),
            redis=times.user + times.system,
            wal=self._ask("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"),
            memory=self._redis.info("memory")["used_memory"],
        )

    def _ask(self, statement: str) -> float:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            return float(cursor.fetchone()[0]) if cursor.description else 0


def _spent(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def measure() -> dict[str, Taken]:
    """What one request takes, by path, on servers of its own."""
    settings = {"autovacuum": "off"}  # it would strike at random
    with servers.Postgres(settings=settings) as postgres, servers.Redis() as redis_server:
        meter = Meter(postgres, redis_server)
        shops = Shops({name: postgres.database(name) for name in STORES}, redis_server.url)
        try:
            return {name: _of_one(shops, name, meter) for name in PATHS}
        finally:
            shops.close()
            meter.close()


def _of_one(shops: Shops, name: str, meter: Meter) -> Taken:
    with shops.path(name) as send:
        for _ in range(REQUESTS // 10):
            send()
        meter.checkpoint()
        before = meter.read()
        for _ in range(REQUESTS):
            send()
        after = meter.read()
    each = {name: (value - getattr(before, name)) / REQUESTS for name, value in vars(after).items()}
    return Taken(**each)


def table(taken: Mapping[str, Taken]) -> str:
    """As Markdown."""
    rows = [
        "| Request | Application | PostgreSQL | Redis | WAL | Redis' memory |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, each in taken.items():
        seconds = [f"{value * 1e6:,.0f} µs" for value in (each.application, each.postgres, each.redis)]
        sizes = [f"{value:,.0f} bytes" for value in (each.wal, each.memory)]
        rows.append(f"| {' | '.join([name, *seconds, *sizes])} |")
    return "\n".join(rows)
