"""What goes wrong around the workers: one fault after the other, by a seeded schedule."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import psycopg2
from redis import Redis, RedisError

import servers
from tests.faults.history import Journal

VICTIM_SECONDS = 5.0
"""How long a fault waits for its victim: a transaction to end, a COMMIT to pass."""

COMPLETION = b'"json"'
"""In each message that completes a request, and in no other: the headers of its response (``rows.py``).

"COMMIT" would not do: a claim has one, too, and a driver that prepares statements sends their names.
"""


@dataclass
class World:
    """The servers of a run, from outside."""

    postgres: servers.Postgres
    redis: servers.Redis
    proxy: servers.FaultProxy
    dsn: str
    gunicorns: list[psutil.Process]

    def redis_client(self) -> contextlib.closing[Redis]:
        return contextlib.closing(Redis.from_url(self.redis.url, socket_timeout=1))

    def heal(self) -> None:
        """Undo whatever a fault left behind."""
        self.redis.resume()
        self.redis.start()
        self.postgres.start()
        self.proxy.lose_answer(b"\x00never sent\x00")
        with self.redis_client() as client:
            client.config_set("maxmemory", 0)


Fault = Callable[[World, random.Random], object]
"""It returns False if it found no victim."""


def kill_worker(world: World, rng: random.Random) -> bool:
    workers = [each for master in world.gunicorns for each in master.children()]
    if workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            rng.choice(workers).kill()
    return bool(workers)


def hang_up(world: World, rng: random.Random) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        rng.choice(world.gunicorns).send_signal(1)


def flush(world: World, _rng: random.Random | None = None) -> None:
    with world.redis_client() as client:
        client.flushall()


def down(begin: str, end: str) -> Fault:
    """Redis is away for a while, by two of its server's methods."""

    def fault(world: World, rng: random.Random) -> None:
        getattr(world.redis, begin)()
        time.sleep(rng.uniform(0.1, 0.8))
        getattr(world.redis, end)()

    return fault


def fill_redis(world: World, rng: random.Random) -> None:
    """Redis refuses every write that needs memory (its policy is noeviction)."""
    with world.redis_client() as client:
        client.config_set("maxmemory", 1)
        time.sleep(rng.uniform(0.1, 0.8))
        client.config_set("maxmemory", 0)


def terminate(world: World, rng: random.Random) -> bool:
    """End the backend of a transaction that is open: most likely one that holds a record."""
    with contextlib.closing(psycopg2.connect(world.dsn, connect_timeout=2)) as connection:
        connection.autocommit = True
        cursor = connection.cursor()
        deadline = time.monotonic() + VICTIM_SECONDS
        while time.monotonic() < deadline:
            cursor.execute(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
                " AND state LIKE 'idle in transaction%' ORDER BY pid"
            )
            if holders := cursor.fetchall():
                cursor.execute("SELECT pg_terminate_backend(%s)", rng.choice(holders))
                return True
            time.sleep(0.01)
    return False


def lose_commit(world: World, _rng: random.Random) -> bool:
    """The COMMIT of an operation arrives; its answer does not."""
    before = world.proxy.lost
    world.proxy.lose_answer(COMPLETION)
    deadline = time.monotonic() + VICTIM_SECONDS
    while world.proxy.lost == before and time.monotonic() < deadline:
        time.sleep(0.01)
    return world.proxy.lost > before


FLUSH, REDIS_DOWN, CRASH = "Redis: FLUSHALL", "Redis: kill -9 and start", "Postgres: crash and restart"
LOST, TERMINATED = "Postgres: COMMIT's reply lost", "Postgres: holder terminated"
FAULTS: dict[str, Fault] = {
    "worker: kill -9": kill_worker,
    "gunicorn: SIGHUP": hang_up,
    FLUSH: flush,
    REDIS_DOWN: down("kill", "start"),
    "Redis: paused": down("pause", "resume"),
    "Redis: full": fill_redis,
    TERMINATED: terminate,
    CRASH: lambda world, _: world.postgres.restart(crash=True),
    LOST: lose_commit,
    "Postgres: connections reset": lambda world, _: world.proxy.cut(),
}


def harass(
    world: World,
    journal: Journal,
    kinds: Sequence[str],
    rng: random.Random,
    pause_seconds: float,
    stop: threading.Event,
) -> None:
    """One fault after the other until told to stop, every kind at least once; then heal."""
    first_round = True
    while kinds and (first_round or not stop.is_set()):
        for kind in rng.sample(kinds, len(kinds)):
            if stop.wait(rng.uniform(0.2, 1.8) * pause_seconds) and not first_round:
                break
            began = time.monotonic()
            try:
                hit = FAULTS[kind](world, rng) is not False
            except (psycopg2.Error, RedisError):
                hit = False  # a server that is still recovering from the fault before
            if hit:
                journal.note("fault", kind=kind, at=began, ended=time.monotonic())
        first_round = False
    stop.wait()
    world.heal()
