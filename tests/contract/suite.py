"""What every store of records must do, as tests: subclass :class:`StoreContract` in a test file.

For a store with transactions subclass :class:`.transactions.AtomicContract`. Tests wait some hundredths
of a second for short leases and retentions to end by the store's own clock.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count

import pytest

from flask_idempotency.core.errors import LeaseLost, NotAtomic
from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.records import SEALED, Record, State, StoredResponse
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
from tests.contract.races import ORDERS, RENEWAL, VERBS, at_once, race_the_next_attempt

THREADS = 8
OTHER = Fingerprint(2**15 - 1, b"\x01" * 32)  # the largest code
FAILURE = replace(RESPONSE, status=500)


class StoreContract:
    """The tests. Each uses a key of its own, so the store need not be empty."""

    atomic = False
    """Whether the store holds operations in transactions, and not in leases alone."""

    @pytest.fixture
    def records(self):
        """The store under test."""
        raise NotImplementedError

    def pytest_generate_tests(self, metafunc):
        """Run each test that takes a claim with every kind of claim that the store takes."""
        if "claim" in metafunc.fixturenames:
            kinds = {"transaction": None, "lease": 60.0} if self.atomic else {"lease": 60.0}
            metafunc.parametrize("claim", kinds.values(), indirect=True, ids=kinds)

    @pytest.fixture
    def claim(self, request):
        """A claim to a new key, of either kind."""
        return a_claim(lease=request.param)

    @pytest.fixture
    def held(self):
        """A function that returns a hold, and has it abandoned after the test."""
        holds = []

        def note(hold):
            assert hold is not None
            holds.append(hold)
            return hold

        yield note
        for hold in reversed(holds):
            hold.abandon()

    def test_the_records_say_whether_they_have_transactions(self, records, held):
        assert records.atomic is self.atomic
        lease = held(records.claim(a_claim(lease=60)))
        if self.atomic:
            held(lease.open_step())
        else:
            with pytest.raises(NotAtomic):
                lease.open_step()

    def test_the_first_claim_holds_the_key_alone(self, records, claim, held):
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

    def test_keys_that_differ_in_one_byte_are_two(self, records, held):
        claim = a_claim(lease=60)
        lease = held(records.claim(claim))
        lease.record("charge", b"1")
        for place in (0, len(claim.key) - 1):
            key = bytearray(claim.key)
            key[place] ^= 1
            other = replace(again(claim), key=bytes(key))
            assert records.look(other.key) is None
            assert held(records.claim(other)).steps() == {}

    @pytest.mark.parametrize(
        "response",
        [
            RESPONSE,
            StoredResponse(200, None, b"\x01sealed"),
            StoredResponse(200, (), None),
            StoredResponse(200, (), b""),
        ],
        ids=["usual", "sealed", "unstored", "empty"],
    )
    def test_a_response_comes_back_as_it_was(self, records, claim, held, response):
        hold = held(records.claim(claim))
        before = stored_record(records, claim)
        hold.complete(response)
        hold.abandon()
        hold.abandon()
        record = stored_record(records, claim)
        assert record == replace(before, state=State.COMPLETED, response=response, lease_left=None)
        assert is_refused(records.claim(again(claim)))
        assert is_refused(records.take_over(again(claim), record))

    def test_a_failure_is_stored_as_one(self, records, held):
        claim = a_claim(lease=60)
        lease = held(records.claim(claim))
        before = stored_record(records, claim)
        lease.complete(FAILURE)
        record = stored_record(records, claim)
        assert record == replace(before, state=State.FAILED, response=FAILURE, lease_left=None)
        assert is_refused(records.take_over(again(claim), record))

    def test_an_abandoned_operation_is_taken_over_once(self, records, claim, held):
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

    def test_what_is_not_there_is_not_taken_over(self, records, claim):
        """It was there at the look, and has been purged since."""
        owner = again(claim).owner
        seen = Record(claim.key, "pay", State.IN_PROGRESS, SAME, 1, owner, expired=True)
        assert is_refused(records.take_over(claim, seen))
        assert records.look(claim.key) is None

    def test_an_expired_operation_begins_afresh(self, records, claim, held):
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
    def test_retention_begins_with_the_end(self, records, claim, held, end):
        """An operation that takes longer than its retention outlives one that ended before it began.

        That one has twice the retention, so its end is sure to come between the two that the other
        could have: no test depends on how fast the machine is.
        """
        if end == "release":
            claim = a_claim(lease=60)
        claim = replace(claim, ttl_seconds=SHORT_SECONDS)
        before = a_claim(ttl=2 * SHORT_SECONDS, lease=claim.lease_seconds)
        held(records.claim(before)).complete(RESPONSE)
        hold = held(records.claim(claim))
        time.sleep(1.5 * SHORT_SECONDS)
        VERBS[end](hold)
        hold.abandon()
        until(lambda: has_expired(records, claim))
        assert has_expired(records, before), "the retention has begun before the end"

    @pytest.mark.parametrize("first", ["claims", "take-overs"])
    def test_one_of_many_at_once_wins(self, records, claim, held, first):
        race = lambda: records.claim(again(claim))  # noqa: E731
        if first == "take-overs":
            held(records.claim(claim)).abandon()
            before = stored_record(records, claim)
            race = lambda: records.take_over(again(claim), before)  # noqa: E731
        got = at_once(*[race] * THREADS)
        assert len([held(hold) for hold in got if not is_refused(hold)]) == 1

    def test_an_operation_is_given_up_by_a_lease_of_no_time(self, records, claim, held):
        """Also one that was atomic. It stays interrupted, however short its retention."""
        hold = held(records.claim(claim))
        gives_up = replace(again(claim), ttl_seconds=SHORT_SECONDS, lease_seconds=0.0)
        assert is_refused(records.take_over(gives_up, stored_record(records, claim))), "it runs"
        hold.abandon()
        held(records.take_over(gives_up, stored_record(records, claim))).abandon()
        until(lambda: lease_left(records, claim) < -2 * SHORT_SECONDS)
        record = stored_record(records, claim)
        assert (record.state, record.owner) == (State.IN_PROGRESS, gives_up.owner)
        assert (record.attempt, record.expired, record.response) == (2, False, None)
        assert record.released_attempt is None

    def test_waiting_ends_when_the_holder_ends(self, records, claim, held):
        hold = held(records.claim(claim))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(_wait, records, claim)
            hold.complete(RESPONSE)
            assert waiting.result() < PATIENCE_SECONDS / 2
        assert stored_record(records, claim).state is State.COMPLETED
        assert _wait(records, claim) < PATIENCE_SECONDS / 2, "nobody holds it any more"
        assert _wait(records, a_claim()) < PATIENCE_SECONDS / 2, "it is not there"

    @pytest.mark.parametrize("end", ["complete", "release"])
    def test_what_has_ended_gets_no_lease_again(self, records, held, end):
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

    def test_an_expired_lease_is_its_holders_until_somebody_takes_over(self, records, held):
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

    def test_an_expired_lease_is_taken_over_and_its_holder_loses(self, records, held):
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
    def test_a_holder_changes_nothing_else(self, records, held, verb):
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
    def test_a_late_holder_and_the_next_attempt_never_both_succeed(self, records, verb):
        """However close together they come: each compares and writes in one atomic act."""
        race_the_next_attempt(records, VERBS[verb])

    @pytest.mark.parametrize("verb", ["record", "complete"])
    def test_what_one_holder_does_at_once_is_all_done(self, records, verb):
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

    def test_extending_makes_a_lease_longer_and_never_shorter(self, records, held):
        claim = a_claim(lease=10)
        lease, names = held(records.claim(claim)), map(str, count())
        until(lambda: is_renewed(records, claim, lambda: lease.record(next(names), b"1")))
        for seconds in (1000, 1):
            lease.extend(seconds)
            assert 900 < lease_left(records, claim) < 1001

    @pytest.mark.parametrize("end", ["release", "abandon"])
    def test_the_next_attempt_has_the_steps_of_those_before_and_their_age(self, records, held, end):
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

    def test_what_has_done_a_step_is_released_and_does_not_expire(self, records, held):
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
    def test_a_failure_after_a_step_waits_if_it_is_told_to(self, records, held, step):
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


def _is_lost(lease, *verbs):
    """Assert that a holder of the past may do none of these."""
    for verb in verbs:
        with pytest.raises(LeaseLost):
            VERBS[verb](lease)


def _wait(records, claim):
    """How many seconds a request waits that may wait for long."""
    began = time.monotonic()
    records.wait(claim.key, PATIENCE_SECONDS)
    return time.monotonic() - began
