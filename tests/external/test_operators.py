"""``flask idempotency resume``, racing with clients and with itself; and an operator's decisions."""

from __future__ import annotations

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.external.conftest import Reply, Shop
from tests.waiting import wait_until

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


def resume(shop: Shop, *arguments: str) -> list[dict[str, Any]]:
    return json.loads(shop.run("resume", "--json", *arguments))


def resume_when_due(shop: Shop, *arguments: str) -> list[dict[str, Any]]:
    return wait_until(lambda: resume(shop, "--backoff", "0.1", *arguments), "one is due")


def test_resume_races_with_itself_and_with_the_clients(shop: Shop) -> None:
    """Slow calls, so that they meet; the clients begin when the first operation is resumed."""
    body = '{"delay": 0.05}'
    orders = [str(uuid.uuid4()) for _ in range(8)]
    for number, order in enumerate(orders):
        where = ("charge begun", "charge made", "charge recorded", "order written")[number % 4]
        assert shop.buy(order, "resumed", x_kill=where, body=body).status == 0
    shop.wait_for_leases_to_end()
    again = "SELECT FROM idempotency_record WHERE name = 'resumed' AND attempt > 1"

    def insist(order: str) -> Reply:
        return wait_until(
            lambda: (answer := shop.buy(order, "resumed", body=body)).status != 409 and answer,
            "the client has its answer",
        )

    arguments = ("resume", "--json", "--backoff", "0.1")
    with shop.command(*arguments) as one, shop.command(*arguments) as other:
        wait_until(lambda: shop.sql(again), "one is resumed")
        backwards = orders[::-1]
        with ThreadPoolExecutor(2) as clients:
            told = dict(zip(backwards, clients.map(insist, backwards), strict=True))
        reports = [json.loads(process.communicate(timeout=20)[0]) for process in (one, other)]
    assert (one.returncode, other.returncode) == (0, 0)
    assert {line["status"] for report in reports for line in report} <= {201, 409}
    assert any(answer.replayed for answer in told.values()), "resume was faster at none"
    assert {answer.told for answer in told.values()} == {"201"}
    for order in orders:
        assert shop.counts(order) == ONCE
        assert shop.buy(order, "resumed", body=body).body == told[order].body
    attempts = "SELECT max(attempt) FROM idempotency_record WHERE name = 'resumed'"
    assert shop.sql(attempts) == [(2,)]


def test_resume_leaves_alone_what_is_too_young_or_was_tried_too_often(shop: Shop, order: str) -> None:
    interrupt(shop, order, "resumed", "charge made")
    assert resume(shop, "--backoff", "60") == []
    assert resume(shop, "--backoff", "0.1", "--max-attempts", "1") == []
    assert shop.counts(order) == (1, 0, 0)
    (line,) = resume_when_due(shop)
    assert line == {"key": digits(shop, "resumed"), "operation": "resumed", "attempt": 1, "status": 201}
    assert shop.counts(order) == ONCE
    answer = shop.buy(order, "resumed")
    assert (answer.told, answer.replayed) == ("201", True)


def test_resume_sends_no_credentials_that_the_route_does_not_keep(shop: Shop, order: str) -> None:
    """A refused one keeps nobody from the others, however few are run at a time."""
    assert shop.buy(order, "anonymous", x_kill="charge made").status == 0
    other = str(uuid.uuid4())
    interrupt(shop, other, "resumed", "charge made")
    lines = [line for _ in range(2) for line in resume_when_due(shop, "--limit", "1")]
    assert [(line["operation"], line["status"]) for line in lines] == [
        ("anonymous", 401),
        ("resumed", 201),
    ]
    assert (shop.counts(order), shop.counts(other)) == ((1, 0, 0), ONCE)
    assert shop.buy(order, "anonymous").told == "201"  # with its client's own
    assert shop.counts(order) == ONCE


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


def test_a_resolved_operation_lacks_the_shops_own_row(shop: Shop, order: str) -> None:
    """What the advice warns of: the charge is there, the client has its 201, the shop has nothing."""
    interrupt(shop, order, "hold", "charge recorded")
    key = digits(shop, "hold")
    shop.run("resolve", key, "--status", "201", "--body", "{}", "--why", "charged", "--yes")
    assert shop.buy(order, "hold").told == "201"
    assert shop.counts(order) == (1, 0, 0)
