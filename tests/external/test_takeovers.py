"""Two workers: the lease of the first is over, and it is still alive."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.external.conftest import Shop
from tests.waiting import wait_until

EVERYTHING = "SELECT * FROM idempotency_record ORDER BY key"


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


def test_a_slow_call_is_taken_over(shop: Shop, clients: ThreadPoolExecutor) -> None:
    """Before the charge or after it; the third at a provider that does not deduplicate."""
    runs = [("hold-before", "on", 0, 1), ("hold-after", "on", 1, 1), ("hold-after", "off", 1, 2)]
    orders = [str(uuid.uuid4()) for _ in runs]
    firsts = [
        clients.submit(shop.buy, order, x_provider_trouble=held, x_provider_dedupe=dedupe)
        for order, (held, dedupe, _, _) in zip(orders, runs, strict=True)
    ]
    wait_until(lambda: set(orders) <= set(shop.provider.call("GET", "/held")), "all are held")
    shop.wait_for_leases_to_end()
    for order, first, (_, dedupe, before, charges) in zip(orders, firsts, runs, strict=True):
        assert shop.provider.ledger(order) == (before, 0)
        second = shop.buy(order, x_provider_dedupe=dedupe)
        assert second.told == "201"
        assert '"attempt":2' in second.body
        shop.provider.go_on(order)
        assert first.result().told == "409 request-in-progress"
        assert first.result().retry_after == 1
        again = shop.buy(order)
        assert (again.body, again.replayed) == (second.body, True)
        assert shop.counts(order) == (charges, 1, 1)


@pytest.mark.parametrize("where", ["charge made", "charge recorded", "mail recorded"])
def test_a_stopped_worker_is_taken_over_and_writes_nothing(
    shop: Shop, clients: ThreadPoolExecutor, order: str, where: str
) -> None:
    first = clients.submit(shop.buy, order, x_stop=where)
    worker = shop.stopped_worker()
    try:
        shop.wait_for_leases_to_end()
        second = shop.buy(order)
        stored = shop.sql(EVERYTHING)
    finally:
        worker.resume()
    assert second.told == "201"
    assert first.result().told == "409 request-in-progress"
    assert shop.sql(EVERYTHING) == stored
    assert shop.buy(order).body == second.body
    assert shop.counts(order) == (1, 1, 1)


def test_a_stopped_worker_goes_on_while_its_successor_runs(
    shop: Shop, clients: ThreadPoolExecutor, order: str
) -> None:
    first = clients.submit(shop.buy, order, x_stop="charge made")
    worker = shop.stopped_worker()
    try:
        shop.wait_for_leases_to_end()
        second = clients.submit(shop.buy, order, x_provider_trouble="hold-after")
        wait_until(lambda: order in shop.provider.call("GET", "/held"), "the second is held")
        stored = shop.sql(EVERYTHING)
    finally:
        worker.resume()
    assert first.result().told == "409 request-in-progress"
    assert shop.sql(EVERYTHING) == stored
    shop.provider.go_on(order)
    assert second.result().told == "201"
    assert shop.buy(order).body == second.result().body
    assert shop.counts(order) == (1, 1, 1)


def test_a_worker_stopped_in_an_atomic_step_is_waited_for(
    shop: Shop, clients: ThreadPoolExecutor, order: str
) -> None:
    """Its transaction holds the record: a lease that is over takes nothing from it."""
    first = clients.submit(shop.buy, order, x_stop="order written")
    worker = shop.stopped_worker()
    try:
        shop.wait_for_leases_to_end()
        assert shop.buy(order).told == "409 request-in-progress"
    finally:
        worker.resume()
    assert first.result().told == "201"
    assert shop.buy(order).body == first.result().body
    assert shop.counts(order) == (1, 1, 1)
