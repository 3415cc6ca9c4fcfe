"""``run_many`` in processes that are killed, and that get the same items at the same time."""

from __future__ import annotations

import contextlib
import random
import signal
from collections import Counter
from collections.abc import Iterable
from typing import Any

import psycopg2
import pytest

import servers
from tests.drivers import EACH, with_driver
from tests.forked import PROCESSES
from tests.integration.apps import batches

pytestmark = EACH

AT_ONCE = 4


@pytest.fixture
def batch(postgres: Any, redis_server: Any, driver: str) -> Any:
    url = postgres.database("batches")
    with batches.make_app(url, "").app_context():
        batches.db.drop_all()
        batches.db.create_all()
        batches.db.engine.dispose()

    def run_at_once(calls: Iterable[tuple[object, ...]]) -> list[dict[str, str] | None]:
        """For each call its outcomes by key; None if its process died."""
        started = []
        for call in calls:
            reader, writer = PROCESSES.Pipe(duplex=False)
            arguments = (writer, with_driver(url, driver), redis_server.url, *map(str, call))
            process = PROCESSES.Process(target=batches.main, args=arguments)
            process.start()
            writer.close()
            started.append((process, reader))
        found = []
        for process, reader in started:
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL)
            found.append(None if process.exitcode else reader.recv())
            reader.close()
        return found

    def run(first: int, last: int, die_at: object = "") -> dict[str, str] | None:
        return run_at_once([(first, last, die_at)])[0]

    run.at_once, run.url = run_at_once, url  # type: ignore[attr-defined]
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
    found = []
    while calls:
        found += batch.at_once(calls[:AT_ONCE])
        del calls[:AT_ONCE]
    told = Counter(outcome for each in found if each for outcome in each.values())
    assert None in found
    assert told["executed"]
    assert told.keys() <= {"executed", "replayed", "in_progress", "failed"}
    assert {*batch(0, 23).values()} <= {"executed", "replayed"}
    assert stored(batch) == (Counter(range(24)), 24)
