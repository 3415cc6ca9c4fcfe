"""The store ``redis`` when Redis carries a command out and its reply is lost."""

from dataclasses import replace

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.contract.claims import a_claim, again
from tests.log import ours

pytestmark = pytest.mark.parametrize("store", ["redis"], indirect=True)

ANY, CLAIM, FINISH = b"PEXPIRE", b'"status": null', b'"status": 201'
"""What is in every change, and in the two that begin and end a record."""


@pytest.fixture(params=["url", "client"])
def world(request, make_world, proxy):
    """By a URL, and by a client of the application's that sends a command again by itself."""
    if request.param == "url":
        yield make_world(IDEMPOTENCY_REDIS_URL=f"{proxy.url}?socket_timeout=5")
    else:
        with redis.Redis.from_url(proxy.url, retry=Retry(NoBackoff(), 1)) as client:
            yield make_world(init={"redis": client})


@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("lost", [CLAIM, FINISH], ids=["claim", "end"])
def test_a_claim_and_an_end_recognise_themselves_or_hold_the_key(
    world, add_view, proxy, assert_problem, caplog, lost, for_good
):
    """After a claim that is lost for good the view did not run, but no retry can know that."""

    def lose():
        if for_good:
            proxy.refuse()
        proxy.lose_answer(lost)

    in_view = []
    runs = add_view(world, atomic=False, during=lambda: [each() for each in in_view])
    world.post(key="opens-a-connection")
    if lost == CLAIM:
        lose()
    else:
        in_view.append(lose)
    first = world.post()
    if for_good:
        assert_problem(first, 503, "store-unavailable", retry=True)
        assert "Redis failed" in [line.getMessage().partition(":")[0] for line in ours(caplog)]
        proxy.accept()
    else:
        assert (first.status_code, proxy.lost) == (201, 1), first.text
    if for_good and lost == CLAIM:
        assert_problem(world.post(), 409, "request-in-progress", retry=True)
    else:
        assert world.post().headers["Idempotent-Replayed"] == "true"
    assert runs == [1] * (1 if for_good and lost == CLAIM else 2)


CHANGES = {
    "record": lambda lease: lease.record("charge", b"1"),
    "extend": lambda lease: lease.extend(5),
    "release": lambda lease: lease.release(),
    "abandon": lambda lease: lease.abandon(),
}


@pytest.mark.parametrize("change", [*CHANGES, "take over"])
def test_every_change_may_be_sent_twice(world, proxy, change):
    records, claim = world.app.extensions["idempotency"].records, a_claim(lease=60)
    lease = records.claim(claim)
    if change == "take over":
        lease.abandon()
    seen = records.look(claim.key)
    proxy.lose_answer(ANY)
    if change == "take over":
        assert records.take_over(again(claim), seen).attempt == 2
    else:
        CHANGES[change](lease)
    assert proxy.lost == 1


def test_a_claim_does_not_take_its_own_finished_record_for_a_new_one(world):
    """As if the network had kept the first copy of the command until after the end."""
    records = world.app.extensions["idempotency"].records
    claim = replace(a_claim(lease=60), owner="of-one-request")
    records.claim(claim).release()
    records.claim(claim)
    assert records.look(claim.key).attempt == 1
