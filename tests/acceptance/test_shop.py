"""What a client of the example sees over real HTTP."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import requests

from example.seed import ALICE, BOB
from tests.acceptance.conftest import Shop

ROUNDS = 200  # of 20 ms: retries of a client that is told 409


def test_a_payment_is_made_and_found_where_location_says(shop: Shop, key: str) -> None:
    before = shop.balance()
    answer = shop.pay(key, 250)
    assert answer.status_code == 201
    assert "Idempotent-Replayed" not in answer.headers
    found = shop.call("GET", urlsplit(answer.headers["Location"]).path)
    assert found.json() == answer.json()
    assert shop.balance() == before - 250


def test_a_retry_gets_the_same_response_and_pays_nothing(shop: Shop, key: str) -> None:
    first = shop.pay(key)
    before = shop.balance()
    retry = shop.pay(key)
    assert retry.headers["Idempotent-Replayed"] == "true"
    assert (retry.status_code, retry.content) == (first.status_code, first.content)
    assert retry.headers["Location"] == first.headers["Location"]
    assert shop.balance() == before


def test_insufficient_funds_are_stored_and_replayed(shop: Shop, key: str) -> None:
    before = shop.balance()
    first = shop.pay(key, before + 1)
    retry = shop.pay(key, before + 1)
    assert first.status_code == retry.status_code == 402
    assert first.headers["Content-Type"] == "application/problem+json"
    assert retry.headers["Idempotent-Replayed"] == "true"
    assert retry.content == first.content
    assert shop.balance() == before


def test_two_accounts_with_the_same_key_do_not_meet(shop: Shop, key: str) -> None:
    alices, bobs = shop.pay(key, 100, who=ALICE), shop.pay(key, 200, who=BOB)
    assert [alices.status_code, bobs.status_code] == [201, 201]
    assert "Idempotent-Replayed" not in bobs.headers
    assert alices.json()["id"] != bobs.json()["id"]
    path = f"/payments/{alices.json()['id']}"
    assert shop.call("GET", path, who=ALICE).status_code == 200
    assert shop.call("GET", path, who=BOB).status_code == 404


def test_a_stranger_gets_neither_a_view_nor_a_replay(shop: Shop, key: str) -> None:
    shop.pay(key)
    stranger = ALICE._replace(token="guessed")
    for who in (None, stranger):
        answer = shop.call("POST", "/payments", who=who, key=key, body={"amount": 100})
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert "id" not in answer.json()


def test_32_threads_with_one_key_pay_once(either_shop: Shop, key: str) -> None:
    shop = either_shop
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
