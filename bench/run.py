"""One run of the bench: its servers, what is measured on them, and the figures.

Each public method of :class:`Run` measures one thing and stands alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import redis

import servers

from . import footprint, throughput
from .budgets import (
    BASE,
    BUDGETS,
    BYTES,
    CALLS,
    IMPORTS,
    MEMORY,
    NETWORK,
    NO_DISK,
    P99,
    POSTGRES,
    PROCESSOR,
    RECORD,
    REDIS,
    SERVER,
    THROUGHPUT,
    TIME,
    WAITED,
    WORKER,
)
from .calls import count_calls
from .network import Network, count_round_trips
from .paths import Send, Shops
from .places import places, table
from .processors import Queue, backends, serving, wanted, worked
from .report import Figure, Figures
from .sizes import bytes_of_a_record
from .times import Turns, in_turns, spent

T = TypeVar("T")

STORES = ("unprotected", "hybrid", "postgres")

FAR_SECONDS = 0.05
"""A round trip so long that a request takes a whole number of them, and nothing else counts."""

FAR_ROUNDS = 3

AT_ONCE = 20
"""Requests of a path, and then of its base, between two looks at what PostgreSQL has worked."""

PINGS = 200


class Run:
    """Measurements on a PostgreSQL, on one with ``fsync`` off (``hasty``), and on a Redis.

    Attributes:
        figures: what was measured so far.
        notes: what a reader needs to know beside the figures.
    """

    def __init__(
        self, postgres: servers.Postgres, hasty: servers.Postgres, redis_server: servers.Redis
    ) -> None:
        self._database_urls = {name: postgres.database(name) for name in STORES}
        self._hasty_urls = {name: hasty.database(name) for name in STORES}
        self._redis_url = redis_server.url
        self._serving = partial(serving, redis_server, postgres, hasty)
        self._backends = partial(backends, postgres)
        self.figures: Figures = {path: {} for path in BUDGETS}
        self.notes: list[str] = []

    def calls(self, _rounds: int) -> None:
        """Function calls that each path adds to those of its base."""
        with self._shops() as shops:
            counted = _of_each_path(shops, count_calls)
        for name, base in BASE.items():
            self.figures[name][CALLS] = Figure(counted[name] - counted[base])
        self.notes.append(f"function calls: bare {counted['bare']}, empty {counted['empty']}")

    def trips(self, _rounds: int) -> None:
        """Round trips: all, counted on their way; and those that a request waits for."""
        with self._network(0) as (network, shops):
            counted = _of_each_path(shops, lambda send: count_round_trips(network, send))
        for name, base in BASE.items():
            self.figures[name][REDIS] = Figure(counted[name][1])
            self.figures[name][POSTGRES] = Figure(counted[name][0] - counted[base][0])
        self.notes.append(f"round trips to PostgreSQL: bare {counted['bare'][0]:g}, empty 0")
        with self._network(FAR_SECONDS) as (_, shops):
            for name in BASE:
                elapsed, _ = self._in_turns(shops, name, FAR_ROUNDS, warm_up=1)
                self.figures[name][WAITED] = Figure(round(elapsed.added / FAR_SECONDS))

    def time(self, rounds: int) -> None:
        """Time in turns with the base, each commit on the disk; and without waiting for that."""
        medians = {}
        with self._shops() as shops:
            for name, base in BASE.items():
                elapsed, processor = self._in_turns(shops, name, rounds)
                self.figures[name][PROCESSOR] = processor.ratio
                self.figures[name][TIME] = elapsed.ratio
                if P99 in BUDGETS[name]:
                    self.figures[name][P99] = elapsed.p99_ratio
                medians[base] = statistics.median(elapsed.base) * 1e6
        self.notes.append(f"time: bare {medians['bare']:,.0f} µs, empty {medians['empty']:,.0f} µs")
        with self._shops(urls=self._hasty_urls) as shops:
            for name in (path for path, base in BASE.items() if base == "bare"):
                elapsed, _ = self._in_turns(shops, name, rounds)
                self.figures[name][NO_DISK] = elapsed.ratio
        self.notes.append(f"time: {wanted()}")

    def server(self, rounds: int) -> None:
        """What PostgreSQL itself works for a path, and for its base."""
        with self._shops() as shops:
            for name, base in BASE.items():
                if SERVER in BUDGETS[name]:
                    with shops.path(name) as send, shops.path(base) as send_base:
                        self._work(send, AT_ONCE)
                        self._work(send_base, AT_ONCE)
                        turns = Turns()
                        for _ in range(max(rounds // AT_ONCE, 1)):
                            turns.path.append(self._work(send, AT_ONCE))
                            turns.base.append(self._work(send_base, AT_ONCE))
                    self.figures[name][SERVER] = turns.ratio

    def _work(self, send: Send, times: int) -> float:
        """Seconds that PostgreSQL works for so many requests."""
        pids = self._backends()
        before = worked(pids)
        for _ in range(times):
            send()
        return worked(pids) - before

    def network(self, rounds: int) -> None:
        """Time in turns where each round trip takes longer; a tenth of the rounds."""
        for delay, what in NETWORK.items():
            with self._network(delay) as (network, shops):
                ping = self._ping(network) * 1000
                self.notes.append(f"{what}: a PING took {ping:.2f} ms")
                for name in BASE:
                    if what in BUDGETS[name]:
                        elapsed, _ = self._in_turns(shops, name, max(rounds // 10, 1), network)
                        self.figures[name][what] = elapsed.ratio
        self.notes.append(f"network: {wanted()}")

    def throughput(self, _rounds: int) -> None:
        """Time for each request where eight clients send them to gunicorn."""
        urls = self._database_urls["hybrid"], self._database_urls["unprotected"]
        for name, figure in throughput.measure(*urls, self._redis_url).items():
            self.figures[name][THROUGHPUT] = figure
        self.notes.append(f"throughput: {wanted()}")

    def bytes(self, _rounds: int) -> None:
        """What a record takes on disk."""
        with self._shops() as shops:
            size = bytes_of_a_record(shops.clients["postgres"], self._database_urls["postgres"])
        self.figures[RECORD][BYTES] = Figure(size)

    def footprint(self, _rounds: int) -> None:
        """Memory of a worker, and time to import."""
        urls = self._database_urls["hybrid"], self._redis_url
        added, base = footprint.imports(*urls)
        self.figures[WORKER] = {MEMORY: footprint.memory(*urls), IMPORTS: added}
        self.notes.append(f"footprint: Python started with the others in {base:.0f} ms; {wanted()}")

    def places(self, name: str) -> str:
        """Where the function calls of a path go, as Markdown."""
        with self._shops() as shops, shops.path(name) as send, shops.path(BASE[name]) as send_base:
            return table(places(send), places(send_base))

    def _in_turns(
        self, shops: Shops, name: str, rounds: int, network: Network | None = None, **options: int
    ) -> tuple[Turns, Turns]:
        def pids() -> list[int]:
            return [*self._serving(), *([network.pid] if network else [])]

        with shops.path(name) as send, shops.path(BASE[name]) as send_base:
            return in_turns(send, send_base, rounds, pids, **options)

    def _ping(self, network: Network) -> float:
        with redis.Redis.from_url(network.through(self._redis_url)) as client:
            client.ping()
            with Queue([*self._serving(), network.pid]) as queue:
                return statistics.median(spent(client.ping, queue)[0] for _ in range(PINGS))

    @contextmanager
    def _shops(
        self, through: Callable[[str], str] = str, urls: Mapping[str, str] | None = None
    ) -> Iterator[Shops]:
        urls = {name: through(url) for name, url in (urls or self._database_urls).items()}
        shops = Shops(urls, through(self._redis_url))
        try:
            yield shops
        finally:
            shops.close()

    @contextmanager
    def _network(self, delay: float) -> Iterator[tuple[Network, Shops]]:
        with (
            Network(self._database_urls["unprotected"], self._redis_url, delay=delay) as network,
            self._shops(network.through) as shops,
        ):
            yield network, shops


def _of_each_path(shops: Shops, measure: Callable[[Send], T]) -> dict[str, T]:
    """What ``measure`` says of each path, and of the bases."""
    measured = {}
    for name in (*BASE, *BASE.values()):
        if name not in measured:
            with shops.path(name) as send:
                measured[name] = measure(send)
    return measured
