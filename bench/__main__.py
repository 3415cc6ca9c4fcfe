"""``python -m bench [rounds]``: measure in turns on throwaway servers and print ratios.

Absolute times mean little on a shared machine. In each round every path runs once, one after the
other, so that what slows the machine slows them all; the figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections import defaultdict
from tempfile import TemporaryDirectory

from flask.testing import FlaskClient

import servers

from .app import make_client

# path -> (what it is compared with, the most it should cost)
BUDGETS = {
    "first request, hybrid": ("bare view", 1.40),
    "first request, postgres": ("bare view", 1.30),
    "replay, hybrid": ("empty view", 3.5),
    "replay, postgres": ("empty view", 3.5),
    "unprotected view in a protected app": ("bare view", 1.03),
}

_keys = itertools.count()


def seconds(client: FlaskClient, path: str, key: str) -> float:
    """How long one request takes."""
    started = time.perf_counter()
    answer = client.post(path, json={"amount": 5}, headers={"Idempotency-Key": key})
    took = time.perf_counter() - started
    if answer.status_code != 201:
        raise RuntimeError(f"{path} answered {answer.status}")
    return took


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of each path in each round."""
    times: dict[str, list[float]] = defaultdict(list)
    with servers.Postgres() as postgres, servers.Redis() as redis:
        bare = make_client(postgres.database("bare"), protect=False)
        stores = {
            "hybrid": make_client(postgres.database("hybrid"), redis_url=redis.url),
            "postgres": make_client(postgres.database("postgres")),
        }
        for number in range(-200, rounds):  # the first ones warm up
            if number == 0:
                times.clear()
                gc.collect()
                gc.disable()
            key = f"key-{next(_keys)}"
            times["bare view"].append(seconds(bare, "/bare", key))
            for name, client in stores.items():
                times[f"first request, {name}"].append(seconds(client, "/payments", key))
                times[f"replay, {name}"].append(seconds(client, "/payments", key))
            times["empty view"].append(seconds(bare, "/empty", key))
            plain = seconds(stores["hybrid"], "/bare", key)
            times["unprotected view in a protected app"].append(plain)
        gc.enable()
    return times


def compare_stores(rounds: int) -> None:
    """Print what each store costs, against the bare view on the same database."""
    with servers.Postgres() as postgres, servers.Redis() as redis, TemporaryDirectory() as folder:
        names = ("hybrid", "postgres", "postgres, atomic=False", "memory", "redis", "sql on SQLite")
        times: dict[str, list[float]] = defaultdict(list)
        bare = make_client(postgres.database("bare"), protect=False)
        clients = {}
        for number, name in enumerate(names):
            store, is_sqlite = name.partition(",")[0].partition(" ")[0], "SQLite" in name
            url = f"sqlite:///{folder}/shop.db" if is_sqlite else postgres.database(f"store_{number}")
            atomic = name not in ("redis", "postgres, atomic=False")
            client = make_client(url, redis_url=redis.url, store=store, atomic=atomic)
            clients[name] = client, client if is_sqlite else bare
        for number in range(-50, rounds):
            if number == 0:
                times.clear()
            key = f"key-{next(_keys)}"
            empty = seconds(bare, "/empty", key)
            for name, (client, unprotected) in clients.items():
                base = seconds(unprotected, "/bare", key)
                times[f"{name}: first"].append(seconds(client, "/payments", key) / base)
                times[f"{name}: replay"].append(seconds(client, "/payments", key) / empty)
    print("first request (of the bare view on this database), replay (of the empty view)")
    for name in names:
        first, replay = (statistics.median(times[f"{name}: {what}"]) for what in ("first", "replay"))
        print(f"{name:24} {first:6.2f} {replay:6.2f}")


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=2000)
    parser.add_argument("--stores", action="store_true", help="compare the stores with each other")
    given = parser.parse_args()
    if given.stores:
        compare_stores(given.rounds)
        return
    times = measure(given.rounds)
    for name in ("bare view", "empty view"):
        print(f"{name:38} {statistics.median(times[name]) * 1e6:7.0f} µs")
    print(f"\n{'':38} {'ratio':>6} {'p99':>6} {'budget':>7}  to")
    for name, (base, budget) in BUDGETS.items():
        ratio = statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))
        p99 = (
            statistics.quantiles(times[name], n=100)[98] / statistics.quantiles(times[base], n=100)[98]
        )
        print(f"{name:38} {ratio:6.2f} {p99:6.2f} {budget:7.2f}  {base}")


if __name__ == "__main__":
    main()
