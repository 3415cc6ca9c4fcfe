"""Protected applications under gunicorn, against one without the extension.

Clients send at rising rates, an open loop, until one reply of a hundred takes longer than 100 ms, or
one is wrong. The highest rate before that is held against the unprotected view's, in turns. Each commit
reaches the disk.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import servers

from .budgets import RATES
from .climb import BURST, Climber, climb
from .load import Clients, arrivals
from .paths import new_keys
from .processors import wanted
from .report import write_both
from .run import STORES
from .served import KINDS, WORKERS, Machines, Served
from .trivial import trivial_server
from .workers_report import Connections, Measured, Pool, Storm

PARTS = (*KINDS, "pools")

PATHS = {("unprotected", "first"): "/bare", ("unprotected", "replay"): "/empty"}

PROTECTED = "/payments"

REPLAYED_KEYS = 50

ROOM = (50, 0)
"""A pool that no thread waits for."""

POOL_TURNS = 3

STEPS = 6
"""Of one turn, on average."""

STARTS_SECONDS = 20.0
"""Of one part: its applications start and end."""


@dataclass(frozen=True)
class Plan:
    """What to measure, in how many turns, with steps of how many seconds."""

    parts: Sequence[str] = PARTS
    turns: int = 5
    seconds: float = 1.0

    @property
    def minutes(self) -> float:
        """How long that takes, about."""
        pools = sum(len(kind.pools) for kind in KINDS.values() if len(kind.pools) > 1)
        turns = {name: 2 * len(STORES) * self.turns for name in KINDS} | {"pools": pools * POOL_TURNS}
        steps = STEPS * sum(turns[part] for part in self.parts)
        return (steps * (self.seconds + 0.05) + STARTS_SECONDS * len(self.parts)) / 60


class Run:
    """Measurements by ``clients`` of what ``machines`` serve."""

    def __init__(self, machines: Machines, clients: Clients, plan: Plan) -> None:
        self._machines, self._clients, self._plan = machines, clients, plan
        self.measured = Measured()

    def part(self, name: str) -> None:
        """Measure one of ``PARTS``."""
        if name in KINDS:
            self._kind(name)
        else:
            self._pools()
        self._note(f"{name}: {wanted()}")

    def _kind(self, workers: str) -> None:
        """First requests, replays and storms with one kind of workers."""
        kind = KINDS[workers]
        with ExitStack() as stack:
            shops = {
                server: stack.enter_context(self._machines.serve(kind, server, kind.pools[0]))
                for server in STORES
            }
            for request in RATES:
                climbers = [self._climber(workers, request, *shop) for shop in shops.items()]
                climb(climbers, self._clients, self._plan.turns, self._plan.seconds)
                self.measured.climbers += climbers
            for _ in range(self._plan.turns):
                self.measured.storms += [self._storm(workers, *shop) for shop in shops.items()]

    def _pools(self) -> None:
        """First requests with pools of several sizes; and how many connections they need."""
        for workers, kind in KINDS.items():
            if len(kind.pools) > 1:
                self._compare(workers)
            if kind.slots <= ROOM[0]:
                self.measured.connections += [self._connections(workers, server) for server in STORES]

    def clients(self) -> None:
        """How late the clients were, and how many requests they can send."""
        climbers = [*self.measured.climbers, *(each.climber for each in self.measured.pools)]
        late = max(step["late"] for each in climbers for step in each.steps)
        highest = max(rate for each in climbers for rate in each.highest)
        with trivial_server() as port:
            replies = self._clients.send(port, "/", arrivals(4 * highest, 1, seed=0))
        self._note(f"of each step's requests 99 % were sent within {late:.1f} ms of being due")
        self._note(
            f"a server that only answers got {replies.per_second:,.0f} requests a second from the same"
            f" clients, p99 {replies.percentile(99):.1f} ms; the highest rate here is {highest:,.0f}"
        )

    def _climber(self, workers: str, request: str, server: str, shop: Served) -> Climber:
        path, keys, reply = PATHS.get((server, request), PROTECTED), None, "201"
        if path == PROTECTED and request == "replay":
            keys, reply = list(islice(new_keys(), REPLAYED_KEYS)), "201 replayed"
        name = {"workers": workers, "request": request, "server": server}
        climber = Climber(name, shop.port, path, keys, reply, KINDS[workers].keep_alive)
        climber.send(self._clients, [0.0] * REPLAYED_KEYS)  # the first requests
        return climber

    def _storm(self, workers: str, server: str, shop: Served) -> Storm:
        path, keys = PATHS.get((server, "first"), PROTECTED), [next(new_keys())]
        alive, before = KINDS[workers].keep_alive, shop.payments()
        replies = self._clients.send(shop.port, path, [0.0] * BURST, keys=keys, keep_alive=alive)
        made = shop.payments() - before
        if path == PROTECTED and max(made, replies.kinds.get("201", 0)) > 1:
            raise RuntimeError(f"{workers}, {server}: {made} payments with one key, {replies.kinds}")
        return Storm(workers, server, replies.kinds, made, replies.seconds * 1000)

    def _compare(self, workers: str) -> None:
        kind, shops, climbers = KINDS[workers], [], []
        with ExitStack() as stack:
            for pool in kind.pools:
                shop = stack.enter_context(self._machines.serve(kind, "hybrid", pool))
                name = {"workers": workers, "pool": "{} + {}".format(*pool)}
                shops.append(shop)
                climbers.append(Climber(name, shop.port, PROTECTED, keep_alive=kind.keep_alive))
            climb(climbers, self._clients, POOL_TURNS, self._plan.seconds)
            for climber, shop in zip(climbers, shops, strict=True):
                connects = shop.connected() / shop.payments() * 1000
                self.measured.pools.append(Pool(climber, round(connects, 1)))

    def _connections(self, workers: str, server: str) -> Connections:
        kind = KINDS[workers]
        with self._machines.serve(kind, server, ROOM) as shop:
            climber = self._climber(workers, "first", server, shop)
            for _ in range(3):
                climber.send(self._clients, [0.0] * BURST)
            return Connections(workers, server, WORKERS * kind.slots, shop.connections())

    def _note(self, note: str) -> None:
        self.measured.notes.append(note)


def measure(plan: Plan, folder: Path) -> str:
    """Measure on servers of their own; write workers.md and workers.json; the tables."""
    print(f"This takes about {plan.minutes:.0f} minutes.", flush=True)
    began = time.monotonic()
    with (
        # A vacuum would strike at random.
        servers.Postgres(settings={"autovacuum": "off", "max_connections": 400}) as postgres,
        servers.Redis() as redis,
        Clients() as clients,
    ):
        run = Run(Machines(postgres, redis), clients, plan)
        for part in plan.parts:
            run.part(part)
            print(f"{part}: measured after {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
        run.clients()
    measured = run.measured
    measured.notes.append(f"{plan.turns} turns ({POOL_TURNS} of pools), steps of {plan.seconds:g} s")
    write_both(folder, "workers", measured.markdown(), measured.data())
    return measured.markdown()
