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


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=2000)
    times = measure(parser.parse_args().rounds)
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
