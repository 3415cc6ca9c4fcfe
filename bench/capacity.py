"""What a request takes of the application, PostgreSQL, Redis and the disk: for planning."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil
import psycopg2
import redis

import servers
from flask_idempotency.stores.redis.lock import MARKER_SECONDS

from .paths import Shops
from .run import STORES
from .sizes import bytes_of_a_record

REQUESTS = 2000
"""Enough that the clock's ticks of 10 ms change a figure by some µs."""

RATES = (100, 10_000, 1_000_000)
"""First requests a second that the plan is made for."""

DAY = RETENTION = 24 * 60 * 60
"""Seconds; the second is what ``IDEMPOTENCY_TTL`` is unless somebody sets it."""

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


def measure() -> tuple[dict[str, Taken], float]:
    """What one request takes, by path, and bytes of a record on disk; on servers of its own."""
    settings = {"autovacuum": "off"}  # it would strike at random
    with servers.Postgres(settings=settings) as postgres, servers.Redis() as redis_server:
        meter = Meter(postgres, redis_server)
        urls = {name: postgres.database(name) for name in STORES}
        shops = Shops(urls, redis_server.url)
        try:
            taken = {name: _of_one(shops, name, meter) for name in PATHS}
            size = bytes_of_a_record(shops.clients["postgres"], urls["postgres"])
            return taken, size
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


def plan(first: Taken, record_bytes: float) -> str:
    """What first requests at several rates take, as Markdown; ``record_bytes`` is a record on disk."""
    rows = {
        "Processors busy in PostgreSQL": [_shown(rate * first.postgres) for rate in RATES],
        "Processors busy in Redis": [_shown(rate * first.redis) for rate in RATES],
        "WAL a day": [_size(rate * DAY * first.wal) for rate in RATES],
        "Records kept": [f"{rate * RETENTION:,}" for rate in RATES],
        "The records on disk": [_size(rate * RETENTION * record_bytes) for rate in RATES],
        "Memory in Redis": [_size(rate * MARKER_SECONDS * first.memory) for rate in RATES],
    }
    head = ["First requests a second", *(f"{rate:,}" for rate in RATES)]
    lines = [head, ["---", *(["---:"] * len(RATES))], *([name, *row] for name, row in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(number: float) -> str:
    return f"{number:,.2f}" if number < 10 else f"{number:,.0f}"


def _size(number: float) -> str:
    for unit in ("kB", "MB", "GB"):
        number /= 1000
        if number < 1000:
            return f"{number:,.0f} {unit}"
    return f"{number / 1000:,.1f} TB"


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
