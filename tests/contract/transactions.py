"""What only an atomic store must do: commit writes and record together, or neither.

Each test runs on the transaction of an operation, and on that of a step.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
from sqlalchemy import Column, Connection, Engine, MetaData, String, Table, exc, insert, select
from sqlalchemy.pool import QueuePool

from flask_idempotency.core.errors import IdempotencyError, LeaseLost, NotAtomic
from flask_idempotency.core.ports import Hold, Lease, Records
from flask_idempotency.core.records import Claim, Record, State
from tests.contract.claims import (
    RESPONSE,
    SAME,
    SHORT_SECONDS,
    a_claim,
    again,
    has_expired,
    is_renewed,
    lease_left,
    stored_record,
    until,
)
from tests.contract.races import finish_a_step, race_the_next_attempt

Held = Callable[[Any], Any]


class Writes:
    """A table of the application, and what everybody sees in it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        column = Column("name", String(40), primary_key=True)
        self.table = Table(f"contract_{secrets.token_hex(4)}", MetaData(), column)

    def write(self, connection: Connection, name: str) -> None:
        """One row, as a view writes it."""
        connection.execute(insert(self.table).values(name=name))

    def write_past_sqlalchemy(self, connection: Connection, name: str) -> None:
        """One row, on a cursor of the driver's own."""
        connection.connection.cursor().execute(f"INSERT INTO {self.table.name} VALUES ('{name}')")

    def committed(self) -> list[str]:
        """The rows that another connection sees."""
        with self._engine.connect() as connection:
            return sorted(connection.scalars(select(self.table.c.name)))


@dataclass
class Attempt:
    """An attempt under test, with its transaction: the operation's, or that of a step of ``lease``."""

    records: Records
    held: Held
    claim: Claim
    transaction: Any
    lease: Lease | None

    @classmethod
    def of(cls, records: Records, held: Held, claim: Claim, hold: Any) -> Attempt:
        """The attempt of a hold, which is a transaction, or the lease of a step's."""
        if claim.lease_seconds is None:
            return cls(records, held, claim, hold, None)
        return cls(records, held, claim, held(hold.open_step()), hold)

    @property
    def connection(self) -> Any:
        return self.transaction.connection

    def finish(self) -> None:
        """Commit the response, or the step."""
        if self.lease is None:
            self.transaction.complete(RESPONSE)
        else:
            self.transaction.record("pay", b"1")

    def is_finished(self) -> bool:
        """Return True if the response, or the step, is stored."""
        record = self._stored()
        if self.lease is None:
            return (record.state, record.response) == (State.COMPLETED, RESPONSE)
        return self.lease.steps() == {"pay": b"1"}

    def is_in_progress(self) -> bool:
        """Return True if nothing of it is stored."""
        record = self._stored()
        steps = self.lease.steps() if self.lease is not None else {}
        assert self.lease is None or (record.lease_left or 0) > 0, "the step's end has ended the lease"
        return (record.state, record.response, steps) == (State.IN_PROGRESS, None, {})

    def _stored(self) -> Record:
        record = stored_record(self.records, self.claim)
        assert record.fingerprint == SAME, "the fingerprint has changed"
        return record

    def next(self) -> Attempt:
        """The next attempt, after this one has ended without a response."""
        if self.lease is not None:
            self.lease.abandon()
        claim = again(self.claim)
        hold: Hold = self.held(self.records.take_over(claim, stored_record(self.records, claim)))
        assert hold.attempt == 2
        return Attempt.of(self.records, self.held, claim, hold)


class TransactionContract:
    """The tests, of a store whose fixture ``engine`` is the engine that its transactions are on."""

    @pytest.fixture
    def engine(self) -> Engine:
        """The engine of the store's transactions."""
        raise NotImplementedError

    @pytest.fixture
    def writes(self, engine: Engine) -> Iterator[Writes]:
        """A table to write in. Ask for it before ``attempt``, so that it is dropped after that ends."""
        writes = Writes(engine)
        writes.table.create(engine)
        yield writes
        writes.table.drop(engine)

    @pytest.fixture(params=[None, 60.0], ids=["operation", "step"])
    def attempt(self, records: Records, held: Held, request: pytest.FixtureRequest) -> Attempt:
        """An attempt that holds a record in a transaction."""
        claim = a_claim(lease=request.param)
        return Attempt.of(records, held, claim, held(records.claim(claim)))

    @pytest.mark.parametrize(
        "write", [Writes.write, Writes.write_past_sqlalchemy], ids=["sqlalchemy", "driver"]
    )
    def test_writes_commit_with_the_record_and_not_before(
        self, writes: Writes, attempt: Attempt, write: Callable[[Writes, Connection, str], None]
    ) -> None:
        write(writes, attempt.connection, "a")
        with attempt.connection.begin_nested():
            write(writes, attempt.connection, "b")
        savepoint = attempt.connection.begin_nested()
        write(writes, attempt.connection, "c")
        savepoint.rollback()
        assert writes.committed() == []
        assert attempt.is_in_progress()
        attempt.finish()
        assert writes.committed() == ["a", "b"]
        assert attempt.is_finished()

    def test_abandoned_writes_are_gone(self, writes: Writes, attempt: Attempt) -> None:
        writes.write(attempt.connection, "a")
        attempt.transaction.abandon()
        attempt.transaction.abandon()
        assert writes.committed() == []
        assert attempt.is_in_progress()
        retry = attempt.next()
        writes.write(retry.connection, "a")
        retry.finish()
        assert writes.committed() == ["a"]
        assert retry.is_finished()

    def test_abandoning_undoes_nothing_that_is_finished(self, writes: Writes, attempt: Attempt) -> None:
        writes.write(attempt.connection, "a")
        attempt.finish()
        attempt.transaction.abandon()
        assert writes.committed() == ["a"]
        assert attempt.is_finished()

    def test_nothing_is_left_when_the_connection_ends(self, writes: Writes, attempt: Attempt) -> None:
        """It is all that the database notices when a process dies."""
        writes.write(attempt.connection, "a")
        attempt.connection.connection.driver_connection.close()
        with pytest.raises(IdempotencyError):
            attempt.finish()
        attempt.transaction.abandon()
        assert writes.committed() == []
        assert attempt.is_in_progress()
        attempt.records.wait(attempt.claim.key, 10)  # a busy server notices it a moment later
        attempt.next()

    def test_an_attempt_that_was_taken_over_writes_nothing(
        self, writes: Writes, attempt: Attempt
    ) -> None:
        writes.write(attempt.connection, "a")
        attempt.transaction.abandon()
        retry = attempt.next()
        with pytest.raises(IdempotencyError):
            attempt.finish()
        assert writes.committed() == []
        assert attempt.is_in_progress()
        writes.write(retry.connection, "b")
        retry.finish()
        assert writes.committed() == ["b"]
        assert retry.is_finished()

    def test_a_transaction_that_the_view_ended_cannot_be_finished(
        self, writes: Writes, attempt: Attempt
    ) -> None:
        """Ending it may fail at once; finishing must fail, so that nothing seems done."""
        writes.write(attempt.connection, "a")
        with suppress(Exception):
            attempt.connection.get_transaction().rollback()
        with pytest.raises(NotAtomic):
            attempt.finish()
        attempt.transaction.abandon()
        assert writes.committed() == []
        assert attempt.is_in_progress()
        attempt.next()

    def test_an_ordinary_error_is_not_explained(self, writes: Writes, attempt: Attempt) -> None:
        writes.write(attempt.connection, "a")
        with pytest.raises(exc.IntegrityError) as twice, attempt.connection.begin_nested():
            writes.write(attempt.connection, "a")
        for error in (None, ValueError("of the view"), twice.value):
            assert attempt.transaction.explain(error) is None
        attempt.finish()
        assert writes.committed() == ["a"]

    def test_connections_are_returned(self, engine: Engine, attempt: Attempt) -> None:
        if not isinstance(engine.pool, QueuePool):
            pytest.fail("give an engine with SQLAlchemy's usual pool, whose connections can be counted")
        assert engine.pool.checkedout() == 1
        attempt.transaction.abandon()
        assert engine.pool.checkedout() == 0
        attempt.next().finish()
        assert engine.pool.checkedout() == 0

    def test_nobody_takes_over_during_a_step(
        self, records: Records, writes: Writes, held: Held
    ) -> None:
        claim = a_claim(lease=SHORT_SECONDS)
        attempt = Attempt.of(records, held, claim, held(records.claim(claim)))
        writes.write(attempt.connection, "a")
        until(lambda: lease_left(records, claim) <= 0)
        late = replace(again(claim), lease_seconds=60.0)
        assert isinstance(records.take_over(late, stored_record(records, claim)), Record | None)
        attempt.finish()
        assert writes.committed() == ["a"]
        assert attempt.is_finished()

    def test_a_late_step_and_the_next_attempt_never_both_succeed(self, records: Records) -> None:
        race_the_next_attempt(records, finish_a_step)

    def test_nobody_takes_over_a_transaction_whose_retention_is_over(
        self, records: Records, held: Held
    ) -> None:
        """However long its view takes."""
        claim = a_claim(ttl=SHORT_SECONDS)
        hold = held(records.claim(claim))
        until(lambda: has_expired(records, claim))
        assert isinstance(records.take_over(again(claim), stored_record(records, claim)), Record | None)
        assert isinstance(records.claim(again(claim)), Record | None)
        hold.complete(RESPONSE)
        assert stored_record(records, claim).response == RESPONSE

    def test_waiting_lasts_as_long_as_the_transaction_or_as_it_may(
        self, records: Records, attempt: Attempt
    ) -> None:
        began = time.monotonic()
        records.wait(attempt.claim.key, SHORT_SECONDS)
        assert time.monotonic() - began > 0.9 * SHORT_SECONDS

    def test_a_step_renews_the_lease(self, records: Records, held: Held) -> None:
        claim = a_claim(lease=60)
        lease, names = held(records.claim(claim)), map(str, count())

        def finish_a_step() -> None:
            held(lease.open_step()).record(next(names), b"1")

        until(lambda: is_renewed(records, claim, finish_a_step))

    def test_an_attempt_that_was_taken_over_opens_no_step(self, records: Records, held: Held) -> None:
        claim = a_claim(lease=60)
        lease = held(records.claim(claim))
        lease.abandon()
        held(records.take_over(again(claim), stored_record(records, claim)))
        with pytest.raises(LeaseLost):
            lease.open_step()
