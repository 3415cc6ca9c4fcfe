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

PATIENCE_SECONDS = 1.0
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

    def redis_client(self) -> Redis:
        return Redis.from_url(self.redis.url, socket_timeout=PATIENCE_SECONDS)

    def heal(self) -> None:
        """Undo whatever a fault left behind."""
        self.redis.resume()
        self.redis.start()
        self.postgres.start()
        self.proxy.lose_answer(b"\x00never sent\x00")
        with contextlib.closing(self.redis_client()) as client:
            client.config_set("maxmemory", 0)


Act = Callable[[World, random.Random], bool]
"""Returns whether it found a victim."""


def kill_worker(world: World, rng: random.Random) -> bool:
    workers = [each for master in world.gunicorns for each in master.children()]
    if not workers:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        rng.choice(workers).kill()
    return True


def hang_up(world: World, rng: random.Random) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        rng.choice(world.gunicorns).send_signal(1)
    return True


def flush(world: World, _rng: random.Random) -> bool:
    with contextlib.closing(world.redis_client()) as client:
        return bool(client.flushall())


def kill_redis(world: World, rng: random.Random) -> bool:
    world.redis.kill()
    time.sleep(rng.uniform(0.1, 0.8))
    world.redis.start()
    return True


def pause_redis(world: World, rng: random.Random) -> bool:
    world.redis.pause()
    time.sleep(rng.uniform(0.1, 0.8))
    world.redis.resume()
    return True


def fill_redis(world: World, rng: random.Random) -> bool:
    """Redis refuses every write that needs memory (its policy is noeviction)."""
    with contextlib.closing(world.redis_client()) as client:
        client.config_set("maxmemory", 1)
        time.sleep(rng.uniform(0.1, 0.8))
        client.config_set("maxmemory", 0)
    return True


def terminate(world: World, rng: random.Random) -> bool:
    """End the backend of a transaction that is open: most likely one that holds a record."""
    connection = psycopg2.connect(world.dsn, connect_timeout=2)
    connection.autocommit = True
    try:
        with connection.cursor() as cursor:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while time.monotonic() < deadline:
                cursor.execute(
                    "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
                    " AND state LIKE 'idle in transaction%' ORDER BY pid"
                )
                if holders := cursor.fetchall():
                    cursor.execute("SELECT pg_terminate_backend(%s)", rng.choice(holders))
                    return True
                time.sleep(0.01)
    finally:
        connection.close()
    return False


def crash_postgres(world: World, _rng: random.Random) -> bool:
    world.postgres.restart(crash=True)
    return True


def lose_commit(world: World, _rng: random.Random) -> bool:
    """The COMMIT of an operation arrives; its answer does not."""
    before = world.proxy.lost
    world.proxy.lose_answer(COMPLETION)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while world.proxy.lost == before and time.monotonic() < deadline:
        time.sleep(0.01)
    return world.proxy.lost > before


def cut(world: World, _rng: random.Random) -> bool:
    world.proxy.cut()
    return True


FAULTS: dict[str, Act] = {
    "worker: kill -9": kill_worker,
    "gunicorn: SIGHUP": hang_up,
    "Redis: FLUSHALL": flush,
    "Redis: kill -9 and start": kill_redis,
    "Redis: paused": pause_redis,
    "Redis: full": fill_redis,
    "Postgres: holder terminated": terminate,
    "Postgres: crash and restart": crash_postgres,
    "Postgres: COMMIT's reply lost": lose_commit,
    "Postgres: connections reset": cut,
}
CRASH, PAUSE, KILL = "Postgres: crash and restart", "Redis: paused", "worker: kill -9"
EMPTIES = ("Redis: FLUSHALL", "Redis: kill -9 and start")


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
                hit = FAULTS[kind](world, rng)
            except (psycopg2.Error, RedisError):
                hit = False  # a server that is still recovering from the fault before
            if hit:
                journal.note("fault", kind=kind, at=began, ended=time.monotonic())
        first_round = False
    stop.wait()
    world.heal()
