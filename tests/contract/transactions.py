"""What only an atomic store must do: commit writes and record together, or neither.

Each test runs on the transaction of an operation, and on that of a step. The fixture ``engine`` is the
SQLAlchemy engine of the store's transactions, with a pool of several connections: the tests create
tables of their own there, write on the holds' connections, and see from others what is committed.
"""

import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
from sqlalchemy import Column, MetaData, String, Table, exc, insert, select

from flask_idempotency.core.errors import IdempotencyError, LeaseLost, NotAtomic
from flask_idempotency.core.records import State
from tests.contract.claims import (
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
from tests.contract.races import finish_a_step, race_the_next_attempt
from tests.contract.suite import StoreContract


class Writes:
    """A table of the application, and what everybody sees in it."""

    def __init__(self, engine):
        self._engine = engine
        column = Column("name", String(40), primary_key=True)
        self.table = Table(f"contract_{secrets.token_hex(4)}", MetaData(), column)

    def write(self, connection, name):
        """One row, as a view writes it."""
        connection.execute(insert(self.table).values(name=name))

    def write_past_sqlalchemy(self, connection, name):
        """One row, on a cursor of the driver's own."""
        connection.connection.cursor().execute(f"INSERT INTO {self.table.name} VALUES ('{name}')")

    def committed(self):
        """The rows that another connection sees."""
        with self._engine.connect() as connection:
            return sorted(connection.scalars(select(self.table.c.name)))


@dataclass
class Attempt:
    """An attempt under test, with its transaction: the operation's, or that of a step of ``lease``."""

    records: Any
    held: Any
    claim: Any
    transaction: Any
    lease: Any

    @classmethod
    def of(cls, records, held, claim, hold):
        """The attempt of a hold, which is a transaction, or the lease of a step's."""
        if claim.lease_seconds is None:
            return cls(records, held, claim, hold, None)
        return cls(records, held, claim, held(hold.open_step()), hold)

    @property
    def connection(self):
        return self.transaction.connection

    def finish(self):
        """Commit the response, or the step."""
        if self.lease is None:
            self.transaction.complete(RESPONSE)
        else:
            self.transaction.record("pay", b"1")

    def assert_finished(self):
        """The response, or the step, is stored."""
        if self.lease is None:
            assert self._stored() == (State.COMPLETED, RESPONSE, {})
        else:
            assert self._stored() == (State.IN_PROGRESS, None, {"pay": b"1"})

    def assert_nothing_stored(self):
        assert self._stored() == (State.IN_PROGRESS, None, {})
        lease_left = stored_record(self.records, self.claim).lease_left
        assert self.lease is None or (lease_left or 0) > 0, "the step's end has ended the lease"

    def _stored(self):
        record = stored_record(self.records, self.claim)
        assert record.fingerprint == SAME, "the fingerprint has changed"
        return record.state, record.response, self.lease.steps() if self.lease is not None else {}

    def next(self):
        """The next attempt, after this one has ended without a response."""
        if self.lease is not None:
            self.lease.abandon()
        claim = again(self.claim)
        hold = self.held(self.records.take_over(claim, stored_record(self.records, claim)))
        assert hold.attempt == 2
        return Attempt.of(self.records, self.held, claim, hold)


class AtomicContract(StoreContract):
    """The contract of a store that has transactions."""

    atomic = True

    @pytest.fixture
    def engine(self):
        """The engine of the store's transactions."""
        raise NotImplementedError

    @pytest.fixture
    def writes(self, engine):
        """A table to write in. Ask for it before ``attempt``, so that it is dropped after that ends."""
        writes = Writes(engine)
        writes.table.create(engine)
        yield writes
        writes.table.drop(engine)

    @pytest.fixture(params=[None, 60.0], ids=["operation", "step"])
    def attempt(self, records, held, request):
        """An attempt that holds a record in a transaction."""
        claim = a_claim(lease=request.param)
        return Attempt.of(records, held, claim, held(records.claim(claim)))

    @pytest.mark.parametrize(
        "write", [Writes.write, Writes.write_past_sqlalchemy], ids=["sqlalchemy", "driver"]
    )
    def test_writes_commit_with_the_record_and_not_before(self, writes, attempt, write):
        write(writes, attempt.connection, "a")
        with attempt.connection.begin_nested():
            write(writes, attempt.connection, "b")
        savepoint = attempt.connection.begin_nested()
        write(writes, attempt.connection, "c")
        savepoint.rollback()
        assert writes.committed() == []
        attempt.assert_nothing_stored()
        attempt.finish()
        attempt.transaction.abandon()  # which undoes nothing that is finished
        assert writes.committed() == ["a", "b"]
        attempt.assert_finished()

    def test_an_attempt_that_was_abandoned_and_taken_over_writes_nothing(self, engine, writes, attempt):
        assert engine.pool.checkedout() == 1
        writes.write(attempt.connection, "a")
        attempt.transaction.abandon()
        attempt.transaction.abandon()
        assert engine.pool.checkedout() == 0, "the connection is returned"
        assert writes.committed() == []
        attempt.assert_nothing_stored()
        retry = attempt.next()
        with pytest.raises(IdempotencyError):
            attempt.finish()
        assert writes.committed() == []
        attempt.assert_nothing_stored()
        writes.write(retry.connection, "a")
        retry.finish()
        assert engine.pool.checkedout() == 0
        assert writes.committed() == ["a"]
        retry.assert_finished()

    def test_nothing_is_left_when_the_connection_ends(self, writes, attempt):
        """It is all that the database notices when a process dies."""
        writes.write(attempt.connection, "a")
        attempt.connection.connection.driver_connection.close()
        with pytest.raises(IdempotencyError):
            attempt.finish()
        attempt.transaction.abandon()
        assert writes.committed() == []
        attempt.assert_nothing_stored()
        attempt.records.wait(attempt.claim.key, 10)  # a busy server notices it a moment later
        attempt.next()

    def test_a_transaction_that_the_view_ended_cannot_be_finished(self, writes, attempt):
        """Ending it may fail at once; finishing must fail, so that nothing seems done."""
        writes.write(attempt.connection, "a")
        with suppress(Exception):
            attempt.connection.get_transaction().rollback()
        with pytest.raises(NotAtomic):
            attempt.finish()
        attempt.transaction.abandon()
        assert writes.committed() == []
        attempt.assert_nothing_stored()
        attempt.next()

    def test_an_ordinary_error_is_not_explained(self, writes, attempt):
        writes.write(attempt.connection, "a")
        with pytest.raises(exc.IntegrityError) as twice, attempt.connection.begin_nested():
            writes.write(attempt.connection, "a")
        for error in (None, ValueError("of the view"), twice.value):
            assert attempt.transaction.explain(error) is None
        attempt.finish()
        assert writes.committed() == ["a"]

    def test_nobody_takes_over_during_a_step(self, records, writes, held):
        claim = a_claim(lease=SHORT_SECONDS)
        attempt = Attempt.of(records, held, claim, held(records.claim(claim)))
        writes.write(attempt.connection, "a")
        until(lambda: lease_left(records, claim) <= 0)
        late = replace(again(claim), lease_seconds=60.0)
        assert is_refused(records.take_over(late, stored_record(records, claim)))
        attempt.finish()
        assert writes.committed() == ["a"]
        attempt.assert_finished()

    def test_a_late_step_and_the_next_attempt_never_both_succeed(self, records):
        race_the_next_attempt(records, finish_a_step)

    def test_nobody_takes_over_a_transaction_whose_retention_is_over(self, records, held):
        """However long its view takes."""
        claim = a_claim(ttl=SHORT_SECONDS)
        hold = held(records.claim(claim))
        until(lambda: has_expired(records, claim))
        assert is_refused(records.take_over(again(claim), stored_record(records, claim)))
        assert is_refused(records.claim(again(claim)))
        hold.complete(RESPONSE)
        assert stored_record(records, claim).response == RESPONSE

    def test_waiting_lasts_as_long_as_the_transaction_or_as_it_may(self, records, attempt):
        began = time.monotonic()
        records.wait(attempt.claim.key, SHORT_SECONDS)
        assert time.monotonic() - began > 0.9 * SHORT_SECONDS

    def test_a_step_renews_the_lease_of_who_has_it(self, records, held):
        claim = a_claim(lease=60)
        lease, names = held(records.claim(claim)), map(str, count())
        step = lambda: held(lease.open_step()).record(next(names), b"1")  # noqa: E731
        until(lambda: is_renewed(records, claim, step))
        lease.abandon()
        held(records.take_over(again(claim), stored_record(records, claim)))
        with pytest.raises(LeaseLost):
            lease.open_step()
