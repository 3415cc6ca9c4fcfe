"""Prometheus' numbers under gunicorn: those of all workers together, dead ones included."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from laboratory import running
from tests.integration.shops import HELD, Shop, new_keys
from tests.waiting import wait_until

KEYS, DUPLICATES = 30, 3
KINDS = {"sync": (), "gthread": ("--worker-class", "gthread", "--threads", "4")}


@pytest.fixture
def open_metered(open_shop: Callable[..., Shop], tmp_path: Path) -> Callable[..., Shop]:
    folder = tmp_path / "metrics"
    folder.mkdir()
    return lambda *arguments: open_shop(*arguments, PROMETHEUS_MULTIPROC_DIR=str(folder))


def scrape(shop: Shop, name: str, *labels: str) -> dict[Any, float]:
    """A series' values by these labels; the others are added up."""
    found: Counter[Any] = Counter()
    text = running.send(shop.url, "GET", "/metrics", {}).body
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"idempotency_{name}":
                found[tuple(sample.labels[label] for label in labels)] += sample.value
    return dict(found)


@pytest.mark.parametrize("kind", KINDS)
def test_the_requests_of_all_workers_are_counted_once(
    open_metered: Callable[..., Shop], clients: ThreadPoolExecutor, kind: str
) -> None:
    shop = open_metered(*KINDS[kind])
    keys = [key for key in new_keys(KEYS) for _ in range(DUPLICATES)]
    statuses = Counter(reply.status for reply in clients.map(shop.pay, keys))
    outcomes = scrape(shop, "requests_total", "operation", "outcome")
    assert outcomes["pay", "executed"] == KEYS
    assert outcomes["pay", "replayed"] == statuses[201] - KEYS
    assert outcomes.get(("pay", "rejected"), 0) == statuses[409]
    assert sum(outcomes.values()) == len(keys)
    assert scrape(shop, "execution_seconds_count") == {(): KEYS}
    assert scrape(shop, "in_progress") == {(): 0}
    assert scrape(shop, "lock_paused") == {(): 0}


def test_the_records_are_told_once_and_not_by_each_worker(open_metered: Callable[..., Shop]) -> None:
    shop = open_metered()
    shop.pay("key-1")
    shop.pay("key-2")
    assert scrape(shop, "records", "operation", "state") == {("pay", "completed"): 2}
    assert scrape(shop, "records_up") == {(): 1}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_killed_worker_ran_is_not_in_progress_any_more(
    open_metered: Callable[..., Shop], clients: ThreadPoolExecutor, kind: str
) -> None:
    shop = open_metered(*KINDS[kind])
    shop.pay("key-1")
    first = clients.submit(shop.pay, "key-2", HELD)
    worker = int(shop.arrived.read_text())
    held = ("pay_when_told",)
    assert scrape(shop, "in_progress", "operation")[held] == 1
    os.kill(worker, signal.SIGKILL)
    assert first.exception() is not None
    wait_until(lambda: not scrape(shop, "in_progress", "operation").get(held), "nothing is in progress")
    assert shop.pay_for_sure("key-2", HELD)[-1].status == 201
    outcomes = scrape(shop, "requests_total", "operation", "outcome")
    assert outcomes["pay", "executed"] == 1, "what a dead worker has counted stays"
    assert outcomes["pay_when_told", "executed"] == 1
    assert scrape(shop, "takeovers_total", "operation")[held] == 1
    assert not any(scrape(shop, "in_progress").values())
