"""The store ``redis`` when Redis carries a command out and its reply is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

import servers
from tests.contract.claims import a_claim, again

pytestmark = pytest.mark.parametrize("store", ["redis"], indirect=True)

ANY, CLAIM, FINISH = b"PEXPIRE", b'"status": null', b'"status": 201'
"""What is in every change, and in the two that begin and end a record."""


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


@pytest.mark.parametrize("lost", [CLAIM, FINISH])
def test_a_claim_and_an_end_recognise_themselves(world, add_view, proxy, assert_replayed, lost):
    def lose():
        if lost == FINISH:
            proxy.lose_answer(lost)

    runs = add_view(world, atomic=False, during=lose)
    if lost == CLAIM:
        proxy.lose_answer(lost)
    first = world.post()
    assert (first.status_code, proxy.lost) == (201, 1), first.text
    assert_replayed(first, world.post())
    assert runs == [1]


def test_a_take_over_recognises_itself(records, proxy):
    claim = a_claim(lease=60)
    records.claim(claim).abandon()
    seen = records.look(claim.key)
    proxy.lose_answer(ANY)
    assert records.take_over(again(claim), seen).attempt == 2
    assert proxy.lost == 1


ENDS = {
    "record": lambda lease: lease.record("charge", b"1"),
    "extend": lambda lease: lease.extend(5),
    "release": lambda lease: lease.release(),
    "abandon": lambda lease: lease.abandon(),
}


@pytest.mark.parametrize("change", ENDS)
def test_every_change_may_be_sent_twice(records, proxy, change):
    lease = records.claim(a_claim(lease=60))
    proxy.lose_answer(ANY)
    ENDS[change](lease)
    assert proxy.lost == 1


def test_a_claim_does_not_take_its_own_finished_record_for_a_new_one(records):
    """As if the network had kept the first copy of the command until after the end."""
    claim = replace(a_claim(lease=60), owner="of-one-request")
    records.claim(claim).release()
    records.claim(claim)
    assert records.look(claim.key).attempt == 1


@pytest.mark.parametrize("lost", [CLAIM, FINISH])
def test_what_nobody_could_confirm_holds_its_key_or_is_found_by_the_retry(
    world, add_view, proxy, assert_problem, lost
):
    """After a lost claim the view did not run, but no retry can know that."""

    def lose_for_good():
        proxy.refuse()
        proxy.lose_answer(lost)

    runs = add_view(world, atomic=False, during=lose_for_good if lost == FINISH else lambda: None)
    if lost == CLAIM:
        world.post(key="opens-a-connection")
        lose_for_good()
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    proxy.accept()
    if lost == CLAIM:
        assert_problem(world.post(), 409, "request-in-progress", retry=True)
    else:
        assert world.post().headers["Idempotent-Replayed"] == "true"
    assert runs == [1]
