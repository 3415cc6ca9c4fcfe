"""kill -9 of a worker at each boundary between steps, under each policy."""

import uuid
from collections import defaultdict

import pytest

from tests.external.conftest import ONCE, Shop
from tests.waiting import wait_until

LEFT = {
    "begun": (0, 0, 0),
    "charge begun": (0, 0, 0),
    "charges sent": (1, 0, 0),
    "charge made": (1, 0, 0),
    "charge recorded": (1, 0, 0),
    "order written": (1, 0, 0),
    "order committed": (1, 1, 0),
    "mails sent": (1, 1, 1),
    "mail made": (1, 1, 1),
    "mail recorded": (1, 1, 1),
}
"""Where the worker dies, in the order of the view; what it leaves: charges, rows and mails."""

ALL_ONCE = dict.fromkeys(LEFT, ONCE)
CHARGED_TWICE = dict.fromkeys(["charges sent", "charge made"], (2, 1, 1))
MAILED_TWICE = dict.fromkeys(["mails sent", "mail made"], (1, 1, 2))
"""Where a step was cut off that had its effect. It is made again when the view runs again."""

HELD = ("hold", "on"), "409 operation-interrupted", LEFT
RETRIED = ("retry", "on"), "201", ALL_ONCE
OTHERS = [
    (("retry", "off"), "201", {**ALL_ONCE, **CHARGED_TWICE, **MAILED_TWICE}),
    (("ask", "on"), "201", ALL_ONCE),
    (("ask", "off"), "201", {**ALL_ONCE, **MAILED_TWICE}),  # it asks about the charge only
]
"""By policy, and whether the provider deduplicates: what is told and what is there after a retry."""


@pytest.mark.parametrize(
    ("name", "runs"),
    [("shop", [HELD, RETRIED, *OTHERS]), ("shop_without_redis", [HELD, RETRIED])],
    ids=["hybrid", "no Redis"],  # its lock can matter also where nothing is asked of Redis
)
def test_killed_at_each_boundary(name, runs, request):
    shop: Shop = request.getfixturevalue(name)
    cases = [(run, point, str(uuid.uuid4())) for run, _, _ in runs for point in LEFT]
    for (policy, dedupe), point, order in cases:
        died = shop.buy(order, policy, x_kill=point, x_provider_dedupe=dedupe)
        early = shop.buy(order, policy)
        assert (point, died.told, early.told) == (point, "", "409 request-in-progress")
        assert early.retry_after == "1"
    shop.wait_for_leases_to_end()
    told, there = defaultdict(set), defaultdict(dict)
    for (policy, dedupe), point, order in cases:
        wait_until(lambda order=order, point=point: shop.counts(order) == LEFT[point], point)
        first = shop.buy(order, policy, x_provider_dedupe=dedupe)
        second = shop.buy(order, policy, x_provider_dedupe=dedupe)
        assert (second.told, second.body) == (first.told, first.body)
        assert second.replayed == (policy != "hold")
        told[policy, dedupe].add(first.told)
        there[policy, dedupe][point] = shop.counts(order)
    assert told == {run: {expected} for run, expected, _ in runs}
    assert there == {run: expected for run, _, expected in runs}


@pytest.mark.parametrize("policy", ["hold", "retry", "ask"])
def test_killed_with_its_response_stored_it_is_done(shop, order, policy):
    assert shop.buy(order, policy, x_kill="answer stored").told == ""
    first, second = shop.buy(order, policy), shop.buy(order, policy)
    assert first.told == "201"
    assert first.replayed
    assert second == first
    assert shop.counts(order) == ONCE


@pytest.mark.parametrize("dedupe", ["on", "off"])
@pytest.mark.parametrize("trouble", ["drop-before", "drop-after"])
def test_a_provider_in_trouble_is_called_again_with_the_same_key(shop, order, trouble, dedupe):
    told = shop.buy(order, x_provider_trouble=trouble, x_provider_dedupe=dedupe)
    assert (told.told, told.retry_after) == ("503 try-again", "1")
    first, second = shop.buy(order, x_provider_dedupe=dedupe), shop.buy(order)
    assert (first.told, second.body) == ("201", first.body)
    lost_the_result = trouble.endswith("after") and dedupe == "off"
    assert shop.counts(order) == ((2, 1, 1) if lost_the_result else ONCE)
