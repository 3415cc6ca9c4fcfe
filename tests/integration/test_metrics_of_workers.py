"""Prometheus' numbers under gunicorn: those of all workers together, dead ones included."""

import os
import signal
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from laboratory import running
from tests.integration.shops import HELD, new_keys

KEYS, DUPLICATES = 30, 3


@pytest.fixture(params=[(), ("--worker-class", "gthread", "--threads", "4")], ids=["sync", "gthread"])
def shop(request, open_shop, tmp_path):
    folder = tmp_path / "metrics"
    folder.mkdir()
    return open_shop(*request.param, PROMETHEUS_MULTIPROC_DIR=str(folder))


def scrape(shop, name, *labels):
    """A series' values by these labels; the others are added up."""
    found = Counter()
    text = running.send(shop.url, "GET", "/metrics", {}).body
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"idempotency_{name}":
                found[tuple(sample.labels[label] for label in labels)] += sample.value
    return dict(found)


def test_the_numbers_are_those_of_all_workers_once_and_of_the_dead_too(shop, clients):
    keys = [key for key in new_keys(KEYS) for _ in range(DUPLICATES)]
    statuses = Counter(reply.status for reply in clients.map(shop.pay, keys))
    outcomes = scrape(shop, "requests_total", "operation", "outcome")
    assert outcomes["pay", "executed"] == KEYS
    assert outcomes["pay", "replayed"] == statuses[201] - KEYS
    assert outcomes.get(("pay", "rejected"), 0) == statuses[409]
    assert sum(outcomes.values()) == len(keys)
    assert scrape(shop, "execution_seconds_count") == {(): KEYS}
    assert scrape(shop, "records", "operation", "state") == {("pay", "completed"): KEYS}
    assert scrape(shop, "records_up") == {(): 1}

    first = clients.submit(shop.pay, "key-2", HELD)
    worker = int(shop.arrived.read_text())
    os.kill(worker, signal.SIGKILL)
    assert first.exception() is not None
    assert shop.pay_for_sure("key-2", HELD)[-1].status == 201
    outcomes = scrape(shop, "requests_total", "operation", "outcome")
    assert outcomes["pay", "executed"] == KEYS, "what a dead worker has counted stays"
    assert outcomes["pay_when_told", "executed"] == 1
    assert scrape(shop, "takeovers_total", "operation")["pay_when_told",] == 1
