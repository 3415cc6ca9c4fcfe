"""An operator's decisions."""

from __future__ import annotations

import json

import pytest

from tests.external.conftest import Shop

ONCE = (1, 1, 1)


def interrupt(shop: Shop, order: str, policy: str, where: str, **headers: str) -> None:
    """Kill the order's worker; its lease is over then."""
    assert shop.buy(order, policy, x_kill=where, **headers).status == 0
    shop.wait_for_leases_to_end()


def digits(shop: Shop, name: str) -> str:
    """What ``list`` shows of the newest record of a route."""
    query = (
        "SELECT encode(substring(key FOR 4), 'hex') FROM idempotency_record WHERE name = %s"
        " ORDER BY created_at DESC LIMIT 1"
    )
    return shop.sql(query, name)[0][0]


def test_an_operator_lets_it_run_again(shop: Shop, order: str) -> None:
    interrupt(shop, order, "hold", "charge recorded")
    key = digits(shop, "hold")
    assert shop.buy(order, "hold").told == "409 operation-interrupted"
    lines = json.loads(
        shop.run("list", "--operation", "hold", "--state", "interrupted", "--limit", "1", "--json")
    )
    assert [(line["key"], line["state"], line["attempt"]) for line in lines] == [
        (key, "interrupted", 1)
    ]
    head, line, _, _, step, _, came, release, resolve = shop.run("show", key).splitlines()
    assert head.split()[:3] == ["key", "operation", "state"]
    assert line.split()[:3] == [key, "hold", "interrupted"]
    assert step.split()[:2] == ["charge", "1"]
    assert came.startswith("Finished: charge.")
    assert release.startswith("Release it if the other service has done no more than that")
    assert "Look at your own rows first" in release
    assert "it will not do what comes after charge" in resolve
    assert (
        shop.run("release", "--why=asked", key)
        == f"{key}: may be run again; until then it is listed as interrupted\n"
    )
    first, second = shop.buy(order, "hold"), shop.buy(order, "hold")
    assert (first.told, second.body) == ("201", first.body)
    assert shop.counts(order) == ONCE


def test_an_operator_ends_it_and_thinks_better_of_it(shop: Shop, order: str) -> None:
    interrupt(shop, order, "hold", "charge made")
    key = digits(shop, "hold")
    assert shop.run("release", "--why=asked", "--fail", key) == f"{key}: failed for good\n"
    first, second = shop.buy(order, "hold"), shop.buy(order, "hold")
    assert (first.told, first.replayed) == ("500 operation-failed", True)
    assert second == first
    assert shop.counts(order) == (1, 0, 0)
    assert (
        shop.run("release", "--why=asked", key)
        == f"{key}: may be run again; until then it is listed as interrupted\n"
    )
    assert shop.buy(order, "hold").told == "201"
    assert shop.counts(order) == ONCE


@pytest.mark.parametrize("where", ["charge made", "charge recorded"])
def test_an_operator_asks_the_provider_by_the_derived_key(shop: Shop, order: str, where: str) -> None:
    """Whether the step was recorded or not: what the provider did is found."""
    interrupt(shop, order, "hold", where)
    (shown,) = json.loads(shop.run("show", digits(shop, "hold"), "--derive", "charge", "--json"))
    (derived,) = shown["derived"]
    found = shop.provider.call("GET", f"/find/{derived['derived_key']}")
    assert (found["what"], found["order"]) == ("charges", order)
    for step in shown["steps"]:
        assert step["derived_key"] == derived["derived_key"]
        assert json.loads(step["result"]) == found
    assert len(shown["steps"]) == (where == "charge recorded")
