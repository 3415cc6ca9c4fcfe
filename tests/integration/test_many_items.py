"""``run_many`` in processes that are killed, and that get the same items at the same time."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg2
import pytest

import servers
from tests.drivers import EACH, with_driver
from tests.integration.apps import batches

pytestmark = EACH


@pytest.fixture
def batch(postgres: Any, redis_server: Any, driver: str) -> Any:
    url = postgres.database("batches")
    with batches.make_app(url, "").app_context():
        batches.db.drop_all()
        batches.db.create_all()
        batches.db.engine.dispose()

    def run(first: int, last: int, die_at: object = "") -> dict[str, str] | None:
        """The outcomes by key; None if it died."""
        command = [sys.executable, "-m", batches.__name__, with_driver(url, driver)]
        command += [redis_server.url, str(first), str(last), str(die_at)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode == -signal.SIGKILL:
            return None
        assert done.returncode == 0, done.stderr
        found: dict[str, str] = json.loads(done.stdout)
        return found

    run.url = url  # type: ignore[attr-defined]
    return run


def stored(batch: Any) -> tuple[Counter[int], int]:
    """How many payments each key has, and how many records of items are completed."""
    with contextlib.closing(psycopg2.connect(servers.plain_dsn(batch.url))) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT key FROM payment")
        paid = Counter(key for (key,) in cursor.fetchall())
        cursor.execute(
            "SELECT count(*) FROM idempotency_record WHERE name = 'pay' AND state = 'completed'"
        )
        return paid, cursor.fetchone()[0]


@pytest.mark.parametrize("die_at", [1, 3, "returned", "committed"])
def test_wherever_a_process_dies_all_items_are_there_or_none(batch: Any, die_at: object) -> None:
    assert batch(1, 4, die_at) is None
    paid, completed = stored(batch)
    number = 4 if die_at == "committed" else 0
    assert (len(paid), completed) == (number, number)
    outcome = "replayed" if die_at == "committed" else "executed"
    assert batch(1, 4) == dict.fromkeys("1234", outcome)
    assert stored(batch) == (Counter([1, 2, 3, 4]), 4)


def test_processes_that_share_items_and_die_pay_each_once(batch: Any) -> None:
    choose = random.Random(7)  # noqa: S311
    calls = []
    for _ in range(12):
        first = choose.randrange(12)
        calls.append((first, first + 12, choose.choice([1, 5, "returned", "committed", "none", ""])))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda call: batch(*call), calls))
    told = Counter(outcome for each in found if each for outcome in each.values())
    assert None in found
    assert told["executed"]
    assert told.keys() <= {"executed", "replayed", "in_progress", "failed"}
    assert {*batch(0, 23).values()} <= {"executed", "replayed"}
    assert stored(batch) == (Counter(range(24)), 24)
