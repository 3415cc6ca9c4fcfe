"""What every store of records must do: four stores, and that of Redis on fakeredis, too.

Tests wait some hundredths of a second for short leases and retentions to end by the store's own clock.
"""

import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count

import fakeredis
import pytest
import redis
import sqlalchemy as sa

from flask_idempotency.core.errors import IdempotencyError, LeaseLost
from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.records import SEALED, Record, State, StoredResponse
from flask_idempotency.stores.admin import AuditEntry
from flask_idempotency.stores.redis import RedisRecords
from tests.contract.claims import (
    PATIENCE_SECONDS,
    RESPONSE,
    SAME,
    SHORT_SECONDS,
    a_claim,
    again,
    has_expired,
    is_refused,
    is_renewed,
    lease_left,
    stored_record,
    until,
)
from tests.contract.races import ORDERS, RENEWAL, VERBS, at_once, finish_a_step, race_the_next_attempt
from tests.contract.test_requests import Shop
from tests.drivers import with_driver

DRIVERS = ("psycopg2", "psycopg")
"""Stand for the store ``postgres``: also the records of ``hybrid``, whose lock is none of a record's
business, and of ``sql``."""

REDIS = {"redis": {}, "redis-text": {"decode_responses": True}, "redis-3": {"protocol": 3}}
"""A client of one's own may decode all answers, for the application's own use of it."""

TRANSACTIONAL = pytest.mark.usefixtures("shop")

THREADS = 8
OTHER = Fingerprint(2**15 - 1, b"\x01" * 32)  # the largest code
FAILURE = replace(RESPONSE, status=500)
ENTRY = AuditEntry("ann", "failed", "asked")

ENDS = {
    "in_progress": lambda _lease: None,
    "released": VERBS["release"],
    "interrupted": VERBS["abandon"],
    "completed": VERBS["complete"],
    "failed": lambda lease: lease.complete(FAILURE),
}
"""What brings an operation into a state that an operator sees."""


def pytest_generate_tests(metafunc):
    """Run each test on every store, unless it is of transactions, and with every kind of claim."""
    stores = DRIVERS if "shop" in metafunc.fixturenames else (*DRIVERS, *REDIS, "fakeredis")
    if "claim" in metafunc.fixturenames:
        kinds = [(store, "lease") for store in stores] + [(driver, "transaction") for driver in DRIVERS]
        metafunc.parametrize(("store", "claim"), kinds, indirect=True, ids=map("-".join, kinds))
    else:
        metafunc.parametrize("store", stores, indirect=True)


@pytest.fixture(scope="module")
def shops(databases):
    """An application for each driver. Each test uses a key of its own, so no store need be empty."""
    urls = {driver: databases.take() for driver in DRIVERS}
    made = {driver: Shop("postgres", with_driver(url, driver), "") for driver, url in urls.items()}
    yield made
    for driver, shop in made.items():
        shop.engine.dispose()
        databases.give_back(urls[driver])


@pytest.fixture
def shop(shops, store):
    return shops[store]


@pytest.fixture
def records(request, store, tmp_path):
    """The store under test."""
    if store in DRIVERS:
        yield request.getfixturevalue("shop").app.extensions["idempotency"].records
        return
    if store == "fakeredis":
        client = fakeredis.FakeRedis()
        client.ping()  # threads that are the first to ask make a database each
    else:
        url = request.getfixturevalue("redis_server").url
        client = redis.Redis.from_url(url, **REDIS[store])
    with client:
        yield RedisRecords(client, f"{tmp_path.name}:")


@pytest.fixture
def claim(request):
    """A claim to a new key, of either kind."""
    return a_claim(lease=60.0 if request.param == "lease" else None)


@pytest.fixture
def held():
    """A function that returns a hold, and has it abandoned after the test."""
    with ExitStack() as ends:

        def note(hold):
            ends.callback(hold.abandon)
            return hold

        yield note


def test_the_first_claim_holds_the_key_alone(records, claim, held):
    assert records.look(claim.key) is None
    assert held(records.claim(claim)).attempt == 1
    assert is_refused(records.claim(again(claim)))
    assert is_refused(records.take_over(again(claim), stored_record(records, claim)))
    record = stored_record(records, claim)
    assert (record.state, record.attempt, record.owner) == (State.IN_PROGRESS, 1, claim.owner)
    assert (record.name, record.fingerprint, record.response) == ("pay", SAME, None)
    if claim.lease_seconds is None:
        assert record.lease_left is None
    else:
        assert 0 <= claim.lease_seconds - lease_left(records, claim) < PATIENCE_SECONDS


@pytest.mark.parametrize(
    "response",
    [
        RESPONSE,
        FAILURE,
        StoredResponse(200, None, b"\x01sealed"),
        StoredResponse(200, (), None),
        StoredResponse(200, (), b""),
    ],
    ids=["usual", "failure", "sealed", "unstored", "empty"],
)
def test_a_response_comes_back_as_it_was(records, claim, held, response):
    is_failure = response is FAILURE and claim.lease_seconds is not None
    hold = held(records.claim(claim))
    before = stored_record(records, claim)
    hold.complete(response)
    hold.abandon()
    hold.abandon()
    record = stored_record(records, claim)
    state = State.FAILED if is_failure else State.COMPLETED
    assert record == replace(before, state=state, response=response, lease_left=None)
    assert is_refused(records.claim(again(claim)))
    assert is_refused(records.take_over(again(claim), record))


def test_an_abandoned_operation_is_taken_over_once(records, claim, held):
    held(records.claim(claim)).abandon()
    before = stored_record(records, claim)
    second = held(records.take_over(again(claim), before))
    assert second.attempt == 2
    assert is_refused(records.take_over(again(claim), before))
    second.abandon()
    assert is_refused(records.take_over(again(claim), before)), "by a look that is outdated"
    third = held(records.take_over(again(claim), stored_record(records, claim)))
    third.complete(RESPONSE)
    record = stored_record(records, claim)
    assert (record.attempt, record.fingerprint) == (3, SAME)


def test_what_is_not_there_is_not_taken_over(records, claim):
    """It was there at the look, and has been purged since."""
    owner = again(claim).owner
    seen = Record(claim.key, "pay", State.IN_PROGRESS, SAME, 1, owner, expired=True)
    assert is_refused(records.take_over(claim, seen))
    assert records.look(claim.key) is None


def test_an_expired_operation_begins_afresh(records, claim, held):
    claim = replace(claim, ttl_seconds=SHORT_SECONDS)
    hold = held(records.claim(claim))
    if claim.lease_seconds is not None:
        hold.record("charge", b"1")
    hold.complete(RESPONSE)
    until(lambda: has_expired(records, claim))
    until(lambda: (found := records.look(claim.key)) is None or found.age > 1)
    fresh = replace(again(claim), ttl_seconds=60.0, fingerprint=OTHER)
    expired = records.look(claim.key)
    hold = held(records.claim(fresh) if expired is None else records.take_over(fresh, expired))
    record = stored_record(records, claim)
    assert (hold.attempt, record.attempt, record.fingerprint) == (1, 1, OTHER)
    assert (record.response, record.age < 1) == (None, True)
    if claim.lease_seconds is not None:
        assert hold.steps() == {}


@pytest.mark.parametrize("end", ["complete", "release"])
def test_retention_begins_with_the_end(records, claim, held, end):
    if end == "release":
        claim = a_claim(lease=60)
    claim = replace(claim, ttl_seconds=SHORT_SECONDS)
    # Its end comes between the two that the claim's could have, however slow the machine is.
    before = a_claim(ttl=2 * SHORT_SECONDS, lease=claim.lease_seconds)
    held(records.claim(before)).complete(RESPONSE)
    hold = held(records.claim(claim))
    time.sleep(1.5 * SHORT_SECONDS)
    VERBS[end](hold)
    hold.abandon()
    until(lambda: has_expired(records, claim))
    assert has_expired(records, before), "the retention has begun before the end"


@pytest.mark.parametrize("first", ["claims", "take-overs"])
def test_one_of_many_at_once_wins(records, claim, held, first):
    race = lambda: records.claim(again(claim))  # noqa: E731
    if first == "take-overs":
        held(records.claim(claim)).abandon()
        before = stored_record(records, claim)
        race = lambda: records.take_over(again(claim), before)  # noqa: E731
    got = at_once(*[race] * THREADS)
    won = [held(hold) for hold in got if not is_refused(hold)]
    if first == "take-overs" and not won:  # they met at the row: the next retry has it
        won = [held(records.take_over(again(claim), stored_record(records, claim)))]
    assert len(won) == 1


@pytest.mark.parametrize("end", ["complete", "release"])
def test_what_has_ended_gets_no_lease_again(records, held, end):
    """Not from a thread that is late, and renews the lease of what has ended meanwhile.

    Of what was given back, nobody would run it, and nobody else could, until that lease is over.
    """
    claim = a_claim(lease=60)
    lease = held(records.claim(claim))
    VERBS[end](lease)
    ended = stored_record(records, claim)
    _is_lost(lease, "extend", "record")
    assert (stored_record(records, claim), lease.steps()) == (ended, {})
    if end == "release":
        assert held(records.take_over(again(claim), ended)).attempt == 2


def test_an_expired_lease_is_its_holders_until_somebody_takes_over(records, held):
    claim = a_claim(lease=SHORT_SECONDS)
    lease = held(records.claim(claim))
    for act in (
        partial(lease.record, "charge", b"1"),
        partial(lease.extend, SHORT_SECONDS),
        partial(lease.complete, RESPONSE),
    ):
        until(lambda: lease_left(records, claim) <= 0)
        act()
    assert stored_record(records, claim).response == RESPONSE


def test_an_expired_lease_is_taken_over_and_its_holder_loses(records, held):
    claim = a_claim(lease=SHORT_SECONDS, ttl=SHORT_SECONDS)
    first = held(records.claim(claim))
    until(lambda: lease_left(records, claim) <= 0)
    record = stored_record(records, claim)
    assert not record.expired, "an interrupted operation does not expire"
    taken = replace(again(claim), lease_seconds=RENEWAL / 2)  # shorter than what the first asks for
    second = held(records.take_over(taken, record))
    assert second.attempt == 2
    _is_lost(first, "extend", "record", "complete", "release")
    first.abandon()
    record = stored_record(records, claim)
    assert (record.owner, record.attempt, record.response) == (taken.owner, 2, None)
    assert second.steps() == {}, "it has recorded a step for the other"
    assert RENEWAL / 4 < (record.lease_left or 0) <= RENEWAL / 2, "it has changed the other's lease"


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "complete"])
def test_a_holder_changes_nothing_else(records, held, verb):
    """Neither what the record says of its request and its attempt nor the steps before."""
    claim, steps = a_claim(lease=60), {"charge": b"1", "Charge": b"2"}
    lease = held(records.claim(claim))
    before = stored_record(records, claim)
    for step, result in steps.items():
        lease.record(step, result)
    VERBS[verb](lease)
    after = stored_record(records, claim)
    assert after == replace(before, lease_left=after.lease_left)
    assert lease.steps() == (steps | {"mail": b"1"} if verb == "record" else steps)
    if verb == "abandon":
        assert lease_left(records, claim) <= 0.01, "it has ended at once"


@pytest.mark.parametrize("verb", VERBS)
def test_a_late_holder_and_the_next_attempt_never_both_succeed(records, verb):
    """However close together they come: each compares and writes in one atomic act."""
    race_the_next_attempt(records, VERBS[verb])


@pytest.mark.parametrize("verb", ["record", "complete"])
def test_what_one_holder_does_at_once_is_all_done(records, verb):
    """A thread may renew the lease while another goes on."""
    for order in ORDERS:
        claim = a_claim(lease=60)
        lease = records.claim(claim)
        race = partial(VERBS[verb], lease), partial(lease.extend, 1000)
        lost, _late = at_once(*race[::order])[::order]
        record = stored_record(records, claim)
        assert lost is None
        if verb == "complete":
            assert (record.response, record.lease_left) == (RESPONSE, None)
        else:
            assert lease.steps() == {"mail": b"1"}, "the step is lost"
            assert (record.lease_left or 0) > 900, "the renewal is lost"


def test_extending_makes_a_lease_longer_and_never_shorter(records, held):
    claim = a_claim(lease=10)
    lease, names = held(records.claim(claim)), map(str, count())
    until(lambda: is_renewed(records, claim, lambda: lease.record(next(names), b"1")))
    for seconds in (1000, 1):
        lease.extend(seconds)
        assert 900 < lease_left(records, claim) < 1001


@pytest.mark.parametrize("end", ["release", "abandon"])
def test_the_next_attempt_has_the_steps_of_those_before_and_their_age(records, held, end):
    claim, steps = a_claim(lease=60), {}
    lease = held(records.claim(claim))
    until(lambda: stored_record(records, claim).age > SHORT_SECONDS)
    results = {"charge": b'"\\u0000 \\ud800"', "mail ü": SEALED + bytes(range(256)), "lost": None}
    for attempt, (step, result) in enumerate(results.items(), start=2):
        assert lease.steps() == steps
        steps[step] = result
        lease.record(step, result)
        getattr(lease, end)()
        record = stored_record(records, claim)
        assert (record.state, record.response) == (State.IN_PROGRESS, None)
        assert (record.lease_left or 0) <= 0, "nobody runs it"
        assert (record.released is None) is (end == "abandon")
        assert not has_expired(records, claim), "it has done something"
        lease = held(records.take_over(again(claim), record))
        assert lease.attempt == attempt
        assert stored_record(records, claim).age >= record.age > SHORT_SECONDS
    assert lease.steps() == steps


def test_what_has_done_a_step_is_released_and_does_not_expire(records, held):
    """If nobody comes back, an operator must hear of it."""
    claim = a_claim(lease=60, ttl=SHORT_SECONDS)
    lease = held(records.claim(claim))
    lease.record("charge", b"1")
    lease.release()
    _is_lost(lease, "extend", "record")
    until(lambda: stored_record(records, claim).age > 2 * SHORT_SECONDS)
    record = stored_record(records, claim)
    assert not record.expired
    assert 0 < (record.released or 0) <= record.age
    lease = held(records.take_over(again(claim), record))
    assert (lease.attempt, lease.steps()) == (2, {"charge": b"1"})
    assert stored_record(records, claim).released is None


@pytest.mark.parametrize("step", [False, True])
def test_a_failure_after_a_step_waits_if_it_is_told_to(records, held, step):
    """It replays until somebody decides. One that has done nothing expires."""
    claim = a_claim(lease=60, ttl=SHORT_SECONDS)
    lease = held(records.claim(claim))
    if step:
        lease.record("charge", b"1")
    lease.complete(FAILURE, waits=True)
    if not step:
        until(lambda: has_expired(records, claim))
        return
    until(lambda: stored_record(records, claim).age > 2 * SHORT_SECONDS)
    record = stored_record(records, claim)
    assert (record.state, record.response, record.expired) == (State.FAILED, FAILURE, False)
    assert is_refused(records.take_over(again(claim), record))
    _is_lost(lease, "extend", "record")


@pytest.mark.parametrize("state", ENDS)
def test_an_operator_ends_what_is_interrupted_or_failed_as_it_was_seen(records, held, state):
    claim, admin = a_claim(lease=60), records.admin()
    lease = held(records.claim(claim))
    look = lambda: admin.lines(1, start=claim.key)[0]  # noqa: E731
    settle = lambda seen, ttl: admin.settle(seen, ENTRY, ttl, FAILURE, anew=False)  # noqa: E731
    outdated = look()
    ENDS[state](lease)
    seen = look()
    assert seen.state == state
    if state not in ("interrupted", "failed"):
        assert not settle(seen, 1000)
        assert look() == seen
        return
    assert not settle(outdated, 1000)
    assert look() == seen
    lives = []
    for ttl in 10, 1000, 10:
        assert settle(look(), ttl)
        lives.append(round((look().expires - look().completed).total_seconds(), -1))
    assert lives == [60, 1000, 1000], "it lives as long as it would have, or longer"
    record = stored_record(records, claim)
    assert (record.state, record.response) == (State.FAILED, FAILURE)
    assert record.owner != claim.owner
    _is_lost(lease, *VERBS.keys() - {"abandon"})


def test_who_was_taken_over_commits_nothing_and_the_next_attempt_all(shop, records, held, claim):
    """In the transaction of an operation, or in that of a step."""
    is_step, before = claim.lease_seconds is not None, shop.count()

    def begin(hold):
        mine = held(hold.open_step()) if is_step else hold
        mine.transaction.connection.execute(sa.insert(shop.Payment))
        return mine

    def finish(transaction):
        if is_step:
            transaction.record("pay", b"1")
        else:
            transaction.complete(RESPONSE)

    hold = held(records.claim(claim))
    late = begin(hold)
    for each in late, late, hold:
        each.abandon()
    assert shop.engine.pool.checkedout() == 0
    hold = held(records.take_over(again(claim), stored_record(records, claim)))
    with pytest.raises(IdempotencyError):
        finish(late)
    assert shop.count() == before
    transaction = begin(hold)
    assert shop.count() == before
    finish(transaction)
    transaction.abandon()  # which undoes nothing that is finished
    assert shop.count() == before + 1
    assert shop.engine.pool.checkedout() == 0
    assert stored_record(records, claim).response == (None if is_step else RESPONSE)
    assert not is_step or hold.steps() == {"pay": b"1"}


@TRANSACTIONAL
def test_nobody_takes_over_during_a_step(records, held):
    claim = a_claim(lease=SHORT_SECONDS)
    lease = held(records.claim(claim))
    step = held(lease.open_step())
    until(lambda: lease_left(records, claim) <= 0)
    late = replace(again(claim), lease_seconds=60.0)
    assert is_refused(records.take_over(late, stored_record(records, claim)))
    step.record("pay", b"1")
    assert lease.steps() == {"pay": b"1"}


@TRANSACTIONAL
def test_a_late_step_and_the_next_attempt_never_both_succeed(records):
    race_the_next_attempt(records, finish_a_step)


@TRANSACTIONAL
def test_nobody_takes_over_a_transaction_whose_retention_is_over(records, held):
    """However long its view takes."""
    claim = a_claim(ttl=SHORT_SECONDS)
    hold = held(records.claim(claim))
    until(lambda: has_expired(records, claim))
    assert is_refused(records.take_over(again(claim), stored_record(records, claim)))
    assert is_refused(records.claim(again(claim)))
    hold.complete(RESPONSE)
    assert stored_record(records, claim).response == RESPONSE


@TRANSACTIONAL
def test_a_step_renews_the_lease_of_who_has_it(records, held):
    claim = a_claim(lease=60)
    lease, names = held(records.claim(claim)), map(str, count())
    step = lambda: held(lease.open_step()).record(next(names), b"1")  # noqa: E731
    until(lambda: is_renewed(records, claim, step))
    lease.abandon()
    held(records.take_over(again(claim), stored_record(records, claim)))
    with pytest.raises(LeaseLost):
        lease.open_step()


def _is_lost(lease, *verbs):
    """Assert that a holder of the past may do none of these."""
    for verb in verbs:
        with pytest.raises(LeaseLost):
            VERBS[verb](lease)
