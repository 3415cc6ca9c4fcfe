"""An operator's decisions about an operation whose worker was killed."""

from __future__ import annotations

import json

import pytest

from tests.external.conftest import Shop


def interrupt(shop: Shop, order: str, where: str) -> str:
    """Kill the order's worker; its lease is over then. What ``list`` shows of its record."""
    assert shop.buy(order, "hold", x_kill=where).status == 0
    shop.wait_for_leases_to_end()
    what = "--operation", "hold", "--state", "interrupted", "--limit", "1", "--json"
    [line] = json.loads(shop.run("list", *what))
    assert (line["state"], line["attempt"]) == ("interrupted", 1)
    return str(line["key"])


def test_an_operator_ends_it_and_then_lets_it_run_again(shop: Shop, order: str) -> None:
    key = interrupt(shop, order, "charge made")
    assert shop.buy(order, "hold").told == "409 operation-interrupted"
    shop.run("release", "--why=asked", "--fail", key)
    first, second = shop.buy(order, "hold"), shop.buy(order, "hold")
    assert (first.told, first.replayed) == ("500 operation-failed", True)
    assert second == first
    assert shop.counts(order) == (1, 0, 0)
    shop.run("release", "--why=asked", key)
    first, second = shop.buy(order, "hold"), shop.buy(order, "hold")
    assert (first.told, second.body) == ("201", first.body)
    assert shop.counts(order) == (1, 1, 1)


@pytest.mark.parametrize("where", ["charge made", "charge recorded"])
def test_an_operator_asks_the_provider_by_the_derived_key(shop: Shop, order: str, where: str) -> None:
    """Whether the step was recorded or not: what the provider did is found."""
    key = interrupt(shop, order, where)
    (shown,) = json.loads(shop.run("show", key, "--derive", "charge", "--json"))
    (derived,) = shown["derived"]
    found = shop.provider.call("GET", f"/find/{derived['derived_key']}")
    assert (found["what"], found["order"]) == ("charges", order)
    recorded = [(step["derived_key"], json.loads(step["result"])) for step in shown["steps"]]
    assert recorded == [(derived["derived_key"], found)] * (where == "charge recorded")
