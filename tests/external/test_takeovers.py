"""Two workers: the lease of the first is over, and it is still alive."""

import uuid

import pytest

from tests.external.conftest import ONCE
from tests.waiting import wait_until

EVERYTHING = "SELECT * FROM idempotency_record ORDER BY key"


def test_a_slow_call_is_taken_over(shop, clients):
    """Before the charge or after it; the third at a provider that does not deduplicate."""
    runs = [("hold-before", "on", 0, 1), ("hold-after", "on", 1, 1), ("hold-after", "off", 1, 2)]
    orders = [str(uuid.uuid4()) for _ in runs]
    firsts = [
        clients.submit(shop.buy, order, x_provider_trouble=held, x_provider_dedupe=dedupe)
        for order, (held, dedupe, _, _) in zip(orders, runs, strict=True)
    ]
    wait_until(lambda: set(orders) <= set(shop.provider.gates), "all are held")
    shop.wait_for_leases_to_end()
    for order, first, (_, dedupe, before, charges) in zip(orders, firsts, runs, strict=True):
        assert shop.provider.ledger(order) == (before, 0)
        second = shop.buy(order, x_provider_dedupe=dedupe)
        assert second.told == "201"
        assert '"attempt":2' in second.body
        shop.provider.gates[order].set()
        assert (first.result().told, first.result().retry_after) == ("409 request-in-progress", "1")
        again = shop.buy(order)
        assert (again.body, again.replayed) == (second.body, True)
        assert shop.counts(order) == (charges, 1, 1)


@pytest.mark.parametrize(
    ("where", "trouble"),
    [
        ("charge made", "none"),
        ("charge made", "hold-after"),  # its successor still runs when it goes on
        ("charge recorded", "none"),
        ("mail recorded", "none"),
    ],
)
def test_a_stopped_worker_is_taken_over_and_writes_nothing(shop, clients, order, where, trouble):
    first = clients.submit(shop.buy, order, x_stop=where)
    with shop.worker_stopped():
        second = clients.submit(shop.buy, order, x_provider_trouble=trouble)
        wait_until(lambda: second.done() or order in shop.provider.gates, "the second is there")
        stored = shop.sql(EVERYTHING)
    assert first.result().told == "409 request-in-progress"
    assert shop.sql(EVERYTHING) == stored
    shop.provider.gates[order].set()
    assert second.result().told == "201"
    assert shop.buy(order).body == second.result().body
    assert shop.counts(order) == ONCE


def test_a_worker_stopped_in_an_atomic_step_is_waited_for(shop, clients, order):
    """Its transaction holds the record: a lease that is over takes nothing from it."""
    first = clients.submit(shop.buy, order, x_stop="order written")
    with shop.worker_stopped():
        assert shop.buy(order).told == "409 request-in-progress"
    assert first.result().told == "201"
    assert shop.buy(order).body == first.result().body
    assert shop.counts(order) == ONCE
