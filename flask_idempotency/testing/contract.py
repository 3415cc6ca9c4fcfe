"""What every store of records must do, as tests: subclass :class:`StoreContract` in a test file.

.. code-block:: python

    class TestMyStore(StoreContract):
        @pytest.fixture
        def engine(self, tmp_path):
            engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/shop.db")
            yield engine
            engine.dispose()

        @pytest.fixture
        def records(self, engine):
            return MyRecords(engine)

A store with leases only sets ``atomic = False`` and needs no ``engine``. For an atomic store ``engine``
is the SQLAlchemy engine of its transactions, with a pool of several connections (not SQLite in memory):
the tests create tables of their own there, write on the holds' connections, and see from others what is
committed. Tests wait for short leases and retentions to end by the store's own clock; override the
fixture ``pass_time`` if a test can move that clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

try:
    import pytest
except ImportError as error:
    raise ImportError(
        f"the store contract needs pytest ({error}): pip install 'flask-idempotency[testing]'"
    ) from error

from flask_idempotency.core.errors import LeaseLost, NotAtomic
from flask_idempotency.core.ports import Hold, Lease, Records
from flask_idempotency.core.records import Claim, State, StoredResponse

from .claims import (
    PATIENCE_SECONDS,
    RESPONSE,
    SAME,
    SHORT_SECONDS,
    a_claim,
    again,
    stored_record,
    wait_until,
)
from .transactions import TransactionContract

THREADS = 8


class StoreContract(TransactionContract):
    """The tests. Each uses a key of its own, so the store need not be empty."""

    atomic = True
    """Whether the store holds operations in transactions, and not in leases alone."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.atomic:  # then there is nothing to collect, and nothing to skip
            for name in vars(TransactionContract):
                if name.startswith("test_"):
                    setattr(cls, name, None)

    @pytest.fixture
    def records(self) -> Records:
        """The store under test."""
        raise NotImplementedError("give the store to test in a fixture named records")

    @pytest.fixture
    def pass_time(self) -> Callable[[float], object]:
        """Lets seconds pass on the store's clock; by waiting, as nobody can move most clocks."""
        return time.sleep

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test that takes a claim with every kind of claim that the store takes."""
        if "claim" in metafunc.fixturenames:
            kinds = {"transaction": None, "lease": 60.0} if self.atomic else {"lease": 60.0}
            metafunc.parametrize("claim", kinds.values(), indirect=True, ids=kinds)

    @pytest.fixture
    def claim(self, request: pytest.FixtureRequest) -> Claim:
        """A claim to a new key, of either kind."""
        return a_claim(lease=request.param)

    @pytest.fixture
    def held(self) -> Iterator[Callable[[Hold | None], Any]]:
        """A function that returns a hold, and has it abandoned after the test."""
        holds: list[Hold] = []

        def note(hold: Hold | None) -> Any:
            assert hold is not None
            holds.append(hold)
            return hold

        yield note
        for hold in reversed(holds):
            hold.abandon()

    def test_the_records_say_whether_they_have_transactions(self, records: Records, held: Any) -> None:
        assert records.atomic is self.atomic
        lease: Lease = held(records.claim(a_claim(lease=60)))
        if self.atomic:
            held(lease.open_step())
        else:
            with pytest.raises(NotAtomic):
                lease.open_step()

    def test_a_key_that_nobody_used_has_no_record(self, records: Records) -> None:
        assert records.look(a_claim().key) is None

    def test_the_first_claim_holds_the_key_alone(
        self, records: Records, claim: Claim, held: Any
    ) -> None:
        assert held(records.claim(claim)).attempt == 1
        assert records.claim(again(claim)) is None
        assert records.take_over(again(claim), stored_record(records, claim)) is None
        record = stored_record(records, claim)
        assert (record.state, record.attempt, record.owner) == (State.IN_PROGRESS, 1, claim.owner)
        assert (record.name, record.fingerprint, record.response) == ("pay", SAME, None)
        assert (record.lease_left is None) is (claim.lease_seconds is None)

    def test_a_response_comes_back_as_it_was(self, records: Records, claim: Claim, held: Any) -> None:
        hold = held(records.claim(claim))
        hold.complete(RESPONSE)
        hold.abandon()
        hold.abandon()
        record = stored_record(records, claim)
        assert (record.state, record.response, record.lease_left) == (State.COMPLETED, RESPONSE, None)
        assert records.claim(again(claim)) is None
        assert records.take_over(again(claim), record) is None

    @pytest.mark.parametrize(("headers", "body"), [(None, b"sealed"), ((), None), ((), b"")])
    def test_sealed_unstored_and_empty_responses_stay_different(
        self, records: Records, claim: Claim, held: Any, headers: Any, body: bytes | None
    ) -> None:
        response = StoredResponse(200, headers, body)
        held(records.claim(claim)).complete(response)
        assert stored_record(records, claim).response == response

    def test_an_abandoned_operation_is_taken_over_once(
        self, records: Records, claim: Claim, held: Any
    ) -> None:
        held(records.claim(claim)).abandon()
        before = stored_record(records, claim)
        second = held(records.take_over(again(claim), before))
        assert second.attempt == 2
        assert records.take_over(again(claim), before) is None
        second.abandon()
        assert records.take_over(again(claim), before) is None, "by a look that is outdated"
        third = held(records.take_over(again(claim), stored_record(records, claim)))
        third.complete(RESPONSE)
        assert stored_record(records, claim).attempt == 3

    def test_an_expired_operation_begins_afresh(
        self, records: Records, claim: Claim, held: Any
    ) -> None:
        claim = replace(claim, ttl_seconds=SHORT_SECONDS)
        hold = held(records.claim(claim))
        if claim.lease_seconds is not None:
            hold.record("charge", b"1")
        hold.complete(RESPONSE)
        wait_until(lambda: (found := records.look(claim.key)) is None or found.expired)
        found, fresh = records.look(claim.key), replace(again(claim), ttl_seconds=60.0)
        hold = held(records.claim(fresh) if found is None else records.take_over(fresh, found))
        assert hold.attempt == 1
        assert stored_record(records, claim).response is None
        if claim.lease_seconds is not None:
            assert hold.steps() == {}

    def test_one_of_many_concurrent_claims_wins(
        self, records: Records, claim: Claim, held: Any
    ) -> None:
        got = _at_once(lambda: records.claim(again(claim)))
        assert len([held(hold) for hold in got if hold is not None]) == 1

    def test_one_of_many_concurrent_take_overs_wins(
        self, records: Records, claim: Claim, held: Any
    ) -> None:
        held(records.claim(claim)).abandon()
        before = stored_record(records, claim)
        got = _at_once(lambda: records.take_over(again(claim), before))
        assert len([held(hold) for hold in got if hold is not None]) == 1

    def test_waiting_ends_when_the_holder_ends(self, records: Records, claim: Claim, held: Any) -> None:
        hold = held(records.claim(claim))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(records.wait, claim.key, PATIENCE_SECONDS)
            hold.complete(RESPONSE)
            waiting.result(PATIENCE_SECONDS)
        assert stored_record(records, claim).state is State.COMPLETED

    def test_a_failure_is_stored_as_one(self, records: Records, held: Any) -> None:
        claim = a_claim(lease=60)
        held(records.claim(claim)).complete(replace(RESPONSE, status=500))
        assert stored_record(records, claim).state is State.FAILED

    def test_an_expired_lease_is_taken_over_and_its_holder_loses(
        self, records: Records, held: Any
    ) -> None:
        claim = a_claim(lease=SHORT_SECONDS, ttl=SHORT_SECONDS)
        first: Lease = held(records.claim(claim))
        wait_until(lambda: (stored_record(records, claim).lease_left or 0) <= 0)
        record = stored_record(records, claim)
        assert not record.expired, "an interrupted operation does not expire"
        second = replace(again(claim), lease_seconds=60.0)
        assert held(records.take_over(second, record)).attempt == 2
        with pytest.raises(LeaseLost):
            first.extend(60)
        with pytest.raises(LeaseLost):
            first.record("step", b"1")
        with pytest.raises(LeaseLost):
            first.complete(RESPONSE)
        with pytest.raises(LeaseLost):
            first.release()
        first.abandon()
        record = stored_record(records, claim)
        assert (record.owner, record.attempt, record.response) == (second.owner, 2, None)
        assert (record.lease_left or 0) > 30, "it has ended the other's lease"

    def test_extending_makes_a_lease_longer_and_never_shorter(
        self, records: Records, held: Any
    ) -> None:
        claim = a_claim(lease=10)
        lease: Lease = held(records.claim(claim))
        for seconds in (1000, 1):
            lease.extend(seconds)
            assert 900 < (stored_record(records, claim).lease_left or 0) < 1001

    def test_a_released_operation_is_taken_over_with_its_steps(
        self, records: Records, held: Any, pass_time: Callable[[float], object]
    ) -> None:
        """Its retention begins again, so it outlives the first one."""
        claim = a_claim(lease=60, ttl=1.5)
        first: Lease = held(records.claim(claim))
        pass_time(1.0)
        assert first.steps() == {}
        first.record("charge", b'{"id": 1}')
        first.record("mail ü", b"null")
        first.release()
        pass_time(0.7)
        record = stored_record(records, claim)
        assert not record.expired
        assert (record.state, record.lease_left) == (State.IN_PROGRESS, None)
        second = held(records.take_over(again(claim), record))
        assert second.attempt == 2
        assert second.steps() == {"charge": b'{"id": 1}', "mail ü": b"null"}

    def test_resuming_begins_nothing_afresh(self, records: Records, claim: Claim, held: Any) -> None:
        """It continues a live operation. Only a store that takes resumable operations must do this."""
        if not getattr(records, "takes_resumable", False):
            return
        claim = replace(claim, ttl_seconds=SHORT_SECONDS)
        hold = held(records.claim(claim))
        if claim.lease_seconds is not None:
            hold.record("charge", b"1")
            hold.release()
        hold.abandon()
        fresh = replace(again(claim), ttl_seconds=60.0)
        unexpired = stored_record(records, claim)
        wait_until(lambda: stored_record(records, claim).expired)
        for found in unexpired, stored_record(records, claim):
            assert records.take_over(replace(fresh, resumes=claim.owner), found) is None
        assert stored_record(records, claim) == found, (
            "a take-over that is not allowed has changed the record"
        )
        if claim.lease_seconds is not None:
            assert hold.steps() == {"charge": b"1"}
        third = held(records.take_over(fresh, found))
        assert third.attempt == 1
        third.abandon()
        resuming = replace(again(claim), ttl_seconds=60.0, resumes=fresh.owner)
        assert held(records.take_over(resuming, stored_record(records, claim))).attempt == 2

    def test_abandoning_a_lease_ends_it_at_once(self, records: Records, held: Any) -> None:
        claim = a_claim(lease=60)
        held(records.claim(claim)).abandon()
        left = stored_record(records, claim).lease_left
        assert left is not None
        assert left <= 0.01


def _at_once(work: Callable[[], Hold | None]) -> list[Hold | None]:
    barrier = threading.Barrier(THREADS)

    def together() -> Hold | None:
        barrier.wait(PATIENCE_SECONDS)
        return work()

    with ThreadPoolExecutor(THREADS) as pool:
        return [future.result() for future in [pool.submit(together) for _ in range(THREADS)]]
