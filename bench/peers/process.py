"""A contender's process, seen from here, and the databases that it works on."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import psycopg2
import redis

import servers
from bench.network import Network

from .table import Contender

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).parents[2]


class Died(Exception):
    """The process ended; the last line of what it said."""


@dataclass(frozen=True)
class Place:
    """A database on each server that nobody else uses."""

    database: str
    database_url: str
    redis_url: str

    def payments(self, amount: int) -> int:
        """How many payments of this amount were made."""
        connection = psycopg2.connect(servers.plain_dsn(self.database_url))
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT count(*) FROM payment WHERE amount = %s", (amount,))
                (payments,) = cursor.fetchone() or (0,)
                return int(payments)
        finally:
            connection.close()

    def through(self, network: Network) -> Place:
        """The same place, by way of proxies that count round trips."""
        urls = network.through(self.database_url), network.through(self.redis_url)
        return Place(self.database, *urls)

    def empty_redis(self) -> None:
        """Lose what Redis has."""
        with redis.Redis.from_url(self.redis_url) as client:
            client.flushdb()

    def kept_in_redis(self) -> str:
        """How long the last of Redis' keys will live; empty if there is none."""
        with redis.Redis.from_url(self.redis_url) as client:
            left = [client.ttl(key) for key in client.scan_iter()]
        if -1 in left:
            return "kept for ever"
        return f"kept for {max(left):,} s more" if left else ""


class Places:
    """Makes them on the servers of one run."""

    def __init__(self, postgres: servers.Postgres, redis_server: servers.Redis) -> None:
        self._postgres, self._redis = postgres, redis_server
        self._numbers = count()

    def new(self) -> Place:
        number = next(self._numbers)
        url = self._redis.url.rpartition("/")[0]
        return Place(f"peer_{number}", self._postgres.database(f"peer_{number}"), f"{url}/{number}")

    def serving(self, place: Place) -> list[int]:
        """The servers' processes that work for whoever uses the place."""
        children = psutil.Process(self._postgres.pid).children()
        backends = [each.pid for each in children if f" {place.database} " in "".join(each.cmdline())]
        return [*backends, *filter(None, [self._redis.pid])]


class Running:
    """The worker of a contender, as a context manager; see ``worker.py`` for what it can be asked."""

    def __init__(
        self, python: Path, contender: Contender, place: Place, log: Path, *arguments: str
    ) -> None:
        self._log = log
        command = [str(python), "-m", "bench.peers.worker", contender.app, place.database_url]
        command += [place.redis_url, json.dumps(contender.options), *arguments]
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
            )
        self._hear()

    def ask(self, do: str, **what: Any) -> Any:
        """Have a command done.

        Raises ``Died`` if the process ends instead.
        """
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **what}), file=self._process.stdin, flush=True)
        return self._hear()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._process.wait()
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise Died(said[-1] if said else f"exit status {self._process.returncode}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
