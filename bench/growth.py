"""What a growing table costs: first requests, replays and the purge, at several sizes in one run."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import servers

from . import report
from .processors import Queue
from .records import NAME, Database, Table
from .report import Figure
from .times import in_turns, spent

SIZES = (10_000, 1_000_000)

SETTINGS: dict[str, str | int] = {
    "shared_buffers": "1GB",
    "max_wal_size": "4GB",
    "wal_level": "minimal",  # so that the load is not written twice
    "max_wal_senders": 0,
    "autovacuum_naptime": 1,
}

EXPIRED = 400_000
"""Records that expire together: their purge takes some seconds."""

PURGES = 3
RATE = 40
"""First requests a second: so few that one client sends them in time on a slow disk, too."""

SECONDS = 8.0
"""How long they are sent where no purge runs; beside a purge until that ends."""


@dataclass(frozen=True)
class Size:
    """The figures of a table with so many records; times are those of the same on the smallest.

    ``purge`` and ``purge_beside`` are records a second, alone and beside first requests: the medians.
    ``p99`` are milliseconds of first requests from when they were due, without a purge and beside one;
    ``p99_served`` from when they were sent, without the time that they waited for a processor.
    """

    records: int
    bytes: int
    first: Figure
    replay: Figure
    purge: float
    purge_beside: float
    p99: tuple[float, ...]
    p99_served: tuple[float, ...]
    requests: tuple[int, ...]


def measure(sizes: Iterable[int], rounds: int, folder: Path) -> str:
    """Write the figures by size to ``growth.*``; as Markdown."""
    with ExitStack() as stack:
        postgres = stack.enter_context(servers.Postgres(settings=SETTINGS))
        pool = stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
        tables = [
            stack.enter_context(closing(Table(postgres.database(f"records_{size}"), size)))
            for size in sorted(sizes)
        ]
        times = [_times(table, tables[0], rounds) for table in tables]
        found = [Size(*each, *_purging(table, pool)) for table, each in zip(tables, times, strict=True)]
    text = _as_markdown(found)
    report.write_both(folder, "growth", text, {"sizes": [asdict(size) for size in found]})
    return text


def _times(table: Table, base: Table, rounds: int) -> tuple[int, int, Figure, Figure]:
    """The smallest is compared with itself, too: what differs there is chance."""

    def backends() -> list[int]:
        return [table.backend(), base.backend()]

    size = table.ask(f"SELECT pg_total_relation_size('{NAME}')")
    first, _ = in_turns(table.first(), base.first(), rounds, backends)
    replay, _ = in_turns(table.replay(), base.replay(), rounds, backends)
    return table.records, size, first.ratio, replay.ratio


def _purging(table: Table, pool: ProcessPoolExecutor) -> tuple[Any, ...]:
    """Purges alone and beside first requests, and those without a purge, in turns."""
    alone: list[float] = []
    beside: list[float] = []
    calm: list[tuple[float, float]] = []
    disturbed: list[tuple[float, float]] = []
    _start_purge(table, pool, 1).result()  # a process that is warm
    for _ in range(PURGES):
        alone.append(_start_purge(table, pool, EXPIRED).result())
        calm += _milliseconds(table, lambda: False)
        running = _start_purge(table, pool, EXPIRED)
        disturbed += _milliseconds(table, running.done)
        beside.append(running.result())
    both = [list(zip(*each, strict=True)) for each in (calm, disturbed)]
    return (
        statistics.median(alone),
        statistics.median(beside),
        *(tuple(_percentile(each[kind]) for each in both) for kind in (0, 1)),
        (len(calm), len(disturbed)),
    )


def _start_purge(table: Table, pool: ProcessPoolExecutor, records: int) -> Future[float]:
    table.add_expired(records)
    return pool.submit(purge, table.url)


def purge(database_url: str) -> float:
    """Purge as the command does; returns how many records it deletes in a second."""
    with closing(Database(database_url)) as database, Queue([database.backend()]) as queue:
        deleted: list[int] = []
        seconds, _ = spent(lambda: deleted.append(database.purge()), queue)
        return deleted[0] / seconds


def _milliseconds(table: Table, is_over: Callable[[], bool]) -> list[tuple[float, float]]:
    """First requests at times of their own, an open loop: what ``p99`` and ``p99_served`` are of."""
    send, taken = table.first(), []
    send()
    with Queue([table.backend()]) as queue:
        began = time.perf_counter()
        for due in _arrivals():
            time.sleep(max(began + due - time.perf_counter(), 0))
            if is_over():
                break
            served, _ = spent(send, queue)
            taken.append(((time.perf_counter() - began - due) * 1000, served * 1000))
    return taken


def _percentile(milliseconds: Iterable[float]) -> float:
    """The value that 99 percent are at most; of few, the greatest."""
    ordered = sorted(milliseconds)
    return ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)]


def _arrivals() -> list[float]:
    """When clients send who know nothing of each other."""
    rng = random.Random(0)  # noqa: S311 -- to be repeated
    return sorted(rng.uniform(0, SECONDS) for _ in range(round(RATE * SECONDS)))


def _as_markdown(sizes: list[Size]) -> str:
    titles = ("Records", "Table and indexes", "First request", "Replay", "Purge, records a second",
              "beside first requests", "their 99th percentile")  # fmt: skip
    rows = [_row(titles), _row(["---:"] * len(titles))]
    for size in sizes:
        calm, beside = size.p99
        rows.append(_row([
            f"{size.records:,}", f"{size.bytes / 1e6:,.0f} MB", f"{size.first} ×", f"{size.replay} ×",
            f"{size.purge:,.0f}", f"{size.purge_beside:,.0f}",
            f"{calm:.2f} → {beside:.2f} ms ({beside / calm:.2f} ×)",
        ]))  # fmt: skip
    return "\n".join(rows)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
