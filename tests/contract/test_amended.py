"""Every store lets another body use a key whose attempt left no response, in the profile that says so.

Agentic Commerce Protocol, RFC on agentic checkout, section 6.5: see ``tests/web/profiles/test_acp.py``.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from flask import request

from flask_idempotency import current_operation
from tests.contract.test_requests import CLIENTS, TRANSACTIONAL, Shop


@pytest.fixture(params=TRANSACTIONAL)
def store(request):
    return request.param


@pytest.fixture
def shop(store, tmp_path, databases, redis_server):
    on_postgres = store in ("hybrid", "postgres")
    uri = databases.take() if on_postgres else f"sqlite:///{tmp_path}/shop.db"
    config = {"IDEMPOTENCY_PROFILE": "acp", "PROPAGATE_EXCEPTIONS": False}
    shop = Shop(store, uri, redis_server.url, **config)
    yield shop
    if on_postgres:
        databases.give_back(uri)
    with shop.app.app_context():
        shop.db.engine.dispose()


@pytest.fixture
def failing_once(shop):
    """The view fails in its first attempt; the list to which each run adds attempt and body."""
    runs = []

    def view():
        runs.append((current_operation.attempt, request.json))
        shop.pay(request.json["note"])
        if len(runs) == 1:
            raise LookupError
        return request.json, 201

    shop.view(view)
    return runs


def test_after_a_rollback_another_body_is_the_keys(shop, failing_once):
    assert shop.post(json={"note": "a"}).status_code == 500
    second = shop.post(json={"note": "b"})
    assert (second.status_code, second.json) == (201, {"note": "b"})
    assert shop.post(json={"note": "b"}).headers["Idempotent-Replayed"] == "true"
    assert shop.post(json={"note": "a"}).status_code == 422
    assert failing_once == [(1, {"note": "a"}), (2, {"note": "b"})]
    assert shop.count() == 1


def test_of_many_bodies_at_once_one_is(shop, failing_once):
    assert shop.post(json={"note": "a"}).status_code == 500
    barrier = threading.Barrier(CLIENTS)

    def client(number):
        barrier.wait(10)
        return shop.post(json={"note": f"b{number}"}).status_code

    with ThreadPoolExecutor(CLIENTS) as pool:
        statuses = list(pool.map(client, range(CLIENTS)))
    assert statuses.count(201) <= 1  # none where each met another that had just begun
    assert set(statuses) <= {201, 409, 422}
    if 201 not in statuses:
        assert shop.post(json={"note": "last"}).status_code == 201
    assert (len(failing_once), shop.count()) == (2, 1)


def test_a_living_owner_keeps_its_key(shop):
    inside, go_on = threading.Event(), threading.Event()

    def view():
        inside.set()
        assert go_on.wait(10)
        shop.pay()
        return {}, 201

    shop.view(view)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(shop.post, json={"note": "a"})
        assert inside.wait(10)
        other = shop.post(json={"note": "b"})
        go_on.set()
        assert first.result().status_code == 201
    assert (other.status_code, other.json["code"]) == (409, "idempotency_in_flight")
    assert shop.post(json={"note": "b"}).status_code == 422
    assert shop.count() == 1


def test_another_body_does_not_begin_it_more_often(shop):
    shop.view(lambda: 1 / 0, max_attempts=2)
    statuses = [shop.post(json={"note": note}).status_code for note in "abc"]
    assert statuses == [500, 500, 409]


def test_where_steps_may_be_left_another_body_is_refused(shop):
    runs = []

    def view():
        amount = request.json["amount"]
        runs.append(current_operation.step("charge", lambda: amount))
        return runs[-1:], (503 if len(runs) == 1 else 201)

    shop.view(view, atomic=False, store=lambda response: response.status_code < 500)
    assert shop.post(json={"amount": 5}).status_code == 503
    assert shop.post(json={"amount": 6}).status_code == 422
    assert runs == [5]
