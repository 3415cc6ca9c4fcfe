"""What a client of the example sees over real HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
import requests

import example
from example.seed import ALICE, BOB
from laboratory.shops import FAULT, KILL_AFTER_COMMIT
from tests.acceptance.conftest import Shop

ROUNDS = 200  # of 20 ms: retries of a client that is told 409


def test_a_payment_is_made_once_and_found_where_location_says(shop: Shop, key: str) -> None:
    """Also if the laboratory's header asks for the death of the worker: nobody hears that here."""
    before = shop.balance()
    first = shop.pay(key, 250, **{FAULT: KILL_AFTER_COMMIT})
    retry = shop.pay(key, 250)
    assert first.status_code == 201
    assert "Idempotent-Replayed" not in first.headers
    assert retry.headers["Idempotent-Replayed"] == "true"
    assert (retry.status_code, retry.content) == (first.status_code, first.content)
    assert retry.headers["Location"] == first.headers["Location"]
    path = urlsplit(first.headers["Location"]).path
    found, bobs = (shop.call("GET", path, who) for who in (ALICE, BOB))
    assert (found.json(), bobs.status_code) == (first.json(), 404)
    assert shop.balance() == before - 250
    for who in None, ALICE._replace(token="guessed"):
        stranger = shop.call("POST", "/payments", who, key, body={"amount": 250})
        assert (stranger.status_code, stranger.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert "id" not in stranger.json()


def test_insufficient_funds_are_stored_and_replayed(shop: Shop, key: str) -> None:
    before = shop.balance()
    first, retry = (shop.pay(key, before + 1) for _ in range(2))
    assert first.status_code == retry.status_code == 402
    assert first.headers["Content-Type"] == "application/problem+json"
    assert retry.headers["Idempotent-Replayed"] == "true"
    assert retry.content == first.content
    assert shop.balance() == before


def test_who_knows_the_password_is_an_operator_and_without_one_nobody(shop: Shop) -> None:
    operators = requests.get(f"{shop.url}/operations/", auth=("ada", "sesame"), timeout=30)
    assert operators.status_code == 200
    settings = {"SQLALCHEMY_DATABASE_URI": shop.database_url, "SECRET_KEY": "secret"}
    for nothing in "", None:
        client = example.create_app({**settings, "OPERATOR_PASSWORD": nothing}).test_client()
        for password in "", "None", "wrong":
            assert client.get("/operations/", auth=("ada", password)).status_code == 401


@pytest.mark.parametrize("lock", ["redis", "none"])
def test_32_threads_with_one_key_pay_once(
    open_shop: Callable[..., Shop], shop: Shop, key: str, lock: str
) -> None:
    shop = shop if lock == "redis" else open_shop(REDIS_URL="")
    before, run_before = shop.balance(), shop.views_run()
    barrier = threading.Barrier(32)

    def client(_: int) -> list[requests.Response]:
        barrier.wait(30)
        answers = [shop.pay(key, 700)]
        while answers[-1].status_code == 409 and len(answers) < ROUNDS:
            time.sleep(0.02)  # sooner than Retry-After asks for
            answers.append(shop.pay(key, 700))
        return answers

    with ThreadPoolExecutor(32) as pool:
        histories = list(pool.map(client, range(32)))

    everything = [answer for history in histories for answer in history]
    assert {answer.status_code for answer in everything} <= {201, 409}
    for answer in everything:
        if answer.status_code == 409:
            assert int(answer.headers["Retry-After"]) >= 1
    last = [history[-1] for history in histories]
    assert {answer.status_code for answer in last} == {201}
    assert len({answer.content for answer in last}) == 1
    assert sum("Idempotent-Replayed" not in answer.headers for answer in last) == 1
    assert shop.views_run() == run_before + 1
    assert shop.sql("SELECT count(*) FROM payment WHERE amount = 700") == 1
    assert shop.balance() == before - 700
