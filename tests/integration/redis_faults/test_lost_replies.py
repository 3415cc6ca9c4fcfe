"""The store ``redis`` when Redis carries a command out and its reply is lost."""

from __future__ import annotations

import secrets
from dataclasses import replace

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

import servers
from flask_idempotency import current_operation, idempotent
from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.records import Claim, StoredResponse

pytestmark = pytest.mark.parametrize("store", ["redis"], indirect=True)

ANY, CLAIM, FINISH = b"PEXPIRE", b'"status": null', b'"status": 201'
"""What is in every change, and in the two that begin and end a record."""

ANSWER = StoredResponse(201, (("X-Same", "1"),), b"paid")


@pytest.fixture
def proxy(redis_server):
    with servers.FaultProxy(redis_server.url) as proxy:
        yield proxy


@pytest.fixture(params=["url", "client"])
def world(request, make_world, proxy):
    """By a URL, and by a client of the application's that sends a command again by itself."""
    if request.param == "url":
        yield make_world(IDEMPOTENCY_REDIS_URL=f"{proxy.url}?socket_timeout=5")
    else:
        with redis.Redis.from_url(proxy.url, retry=Retry(NoBackoff(), 1)) as client:
            yield make_world(init={"redis": client})


@pytest.fixture
def records(world):
    return world.app.extensions["idempotency"].records


@pytest.fixture
def add(world):
    """Adds a view that does something in its middle; gives the attempts it ran."""

    def add(during=lambda: None):
        runs = []

        def charge():
            runs.append(current_operation.attempt)
            during()
            return {"run": len(runs)}, 201

        view = idempotent(atomic=False)(charge)
        world.app.add_url_rule("/payments", "charge", view, methods=["POST"])
        return runs

    return add


@pytest.fixture
def claim():
    key, owner = secrets.token_bytes(32), secrets.token_urlsafe(16)
    return Claim(key, "pay", Fingerprint(1, b"\x00" * 16), owner, ttl_seconds=60.0, lease_seconds=60.0)


def test_a_claim_recognises_itself(world, add, proxy, assert_replayed):
    runs = add()
    proxy.lose_answer(CLAIM)
    first = world.post()
    assert (first.status_code, proxy.lost) == (201, 1), first.text
    assert_replayed(first, world.post())
    assert runs == [1]


def test_an_end_recognises_itself(world, add, proxy, assert_replayed):
    runs = add(during=lambda: proxy.lose_answer(FINISH))
    first = world.post()
    assert (first.status_code, proxy.lost) == (201, 1), first.text
    assert_replayed(first, world.post())
    assert runs == [1]


def test_a_take_over_recognises_itself(records, proxy, claim):
    records.claim(claim).abandon()
    seen, second = records.look(claim.key), replace(claim, owner="another")
    proxy.lose_answer(ANY)
    assert records.take_over(second, seen).attempt == 2
    assert proxy.lost == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda lease: lease.record("charge", b"1"),
        lambda lease: lease.extend(5),
        lambda lease: lease.release(),
        lambda lease: lease.abandon(),
        lambda lease: lease.complete(ANSWER),
    ],
    ids=["record", "extend", "release", "abandon", "complete"],
)
def test_every_change_may_be_sent_twice(records, proxy, claim, change):
    lease = records.claim(claim)
    proxy.lose_answer(ANY)
    change(lease)
    assert proxy.lost == 1


def test_a_claim_does_not_take_its_own_finished_record_for_a_new_one(records, claim):
    """As if the network had kept the first copy of the command until after the end."""
    records.claim(claim).complete(ANSWER)
    assert records.claim(claim) == records.look(claim.key)
    assert records.look(claim.key).response == ANSWER


def test_an_end_that_nobody_could_confirm_is_found_by_the_retry(
    world, add, proxy, assert_problem, assert_replayed
):
    def lose_it_for_good():
        proxy.refuse()
        proxy.lose_answer(FINISH)

    runs = add(during=lose_it_for_good)
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    proxy.accept()
    retry, again = world.post(), world.post()
    assert (retry.status_code, retry.json) == (201, {"run": 1})
    assert retry.headers["Idempotent-Replayed"] == "true"
    assert retry.data == again.data
    assert runs == [1]


def test_a_claim_that_nobody_could_confirm_holds_its_key(world, add, records, proxy, assert_problem):
    """What the page on stores says: the view did not run, but no retry can know that."""
    runs = add()
    assert world.post(key="opens-a-connection").status_code == 201
    proxy.refuse()
    proxy.lose_answer(CLAIM)
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    proxy.accept()
    assert_problem(world.post(), 409, "request-in-progress", retry=True)
    assert runs == [1]
