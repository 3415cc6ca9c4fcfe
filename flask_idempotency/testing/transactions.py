"""What an atomic store must do besides: writes and record commit together, or not at all.

Each test runs on the transaction of an operation, and on that of a step.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

try:
    import pytest
except ImportError as error:
    raise ImportError(
        f"the contract of stores needs pytest ({error}): pip install 'flask-idempotency[testing]'"
    ) from error

from sqlalchemy import Column, Connection, Engine, MetaData, String, Table, exc, insert, select
from sqlalchemy.pool import QueuePool

from flask_idempotency.core.errors import IdempotencyError, LeaseLost, NotAtomic
from flask_idempotency.core.ports import Hold, Lease, Records
from flask_idempotency.core.records import Claim, State

from .claims import RESPONSE, SHORT_SECONDS, a_claim, again, stored_record, wait_until

Held = Callable[[Any], Any]


class Writes:
    """A table of the application, and what of it everybody sees."""

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
class Work:
    """A transaction that holds a record: an operation's, or that of a step of ``lease``."""

    records: Records
    held: Held
    claim: Claim
    transaction: Any
    lease: Lease | None

    @property
    def connection(self) -> Any:
        return self.transaction.connection

    def finish(self) -> None:
        """Commit the answer, or the step."""
        if self.lease is None:
            self.transaction.complete(RESPONSE)
        else:
            self.transaction.record("pay", b"1")

    def is_finished(self) -> bool:
        """Whether the answer, or the step, is there."""
        if self.lease is None:
            record = stored_record(self.records, self.claim)
            return (record.state, record.response) == (State.COMPLETED, RESPONSE)
        return self.lease.steps() == {"pay": b"1"}

    def is_in_progress(self) -> bool:
        """Whether nothing of it is there."""
        record = stored_record(self.records, self.claim)
        steps = self.lease.steps() if self.lease is not None else {}
        return (record.state, record.response, steps) == (State.IN_PROGRESS, None, {})

    def next_attempt(self) -> Work:
        """The operation has ended without an answer: the next attempt's transaction."""
        if self.lease is not None:
            self.lease.abandon()
        claim = again(self.claim)
        hold: Hold = self.held(self.records.take_over(claim, stored_record(self.records, claim)))
        assert hold.attempt == 2
        return begun(self.records, self.held, claim, hold)


def begun(records: Records, held: Held, claim: Claim, hold: Any) -> Work:
    """The transaction of a hold: itself, or a step of the lease that it is."""
    if claim.lease_seconds is None:
        return Work(records, held, claim, hold, None)
    return Work(records, held, claim, held(hold.open_step()), hold)


class TransactionContract:
    """The tests, of a store whose fixture ``engine`` is the engine that its transactions are on."""

    @pytest.fixture
    def engine(self) -> Engine:
        """The engine whose transactions the store's holds are."""
        raise NotImplementedError(
            "give the engine whose transactions the store uses in a fixture named engine, or set"
            " atomic = False if the store has leases only"
        )

    @pytest.fixture
    def writes(self, engine: Engine) -> Iterator[Writes]:
        """A table to write in. Ask for it before what holds a record, which must end before it."""
        writes = Writes(engine)
        writes.table.create(engine)
        yield writes
        writes.table.drop(engine)

    @pytest.fixture(params=[None, 60.0], ids=["operation", "step"])
    def work(self, records: Records, held: Held, request: pytest.FixtureRequest) -> Work:
        """A transaction that holds a record."""
        claim = a_claim(lease=request.param)
        return begun(records, held, claim, held(records.claim(claim)))

    def test_writes_commit_with_the_record_and_not_before(self, writes: Writes, work: Work) -> None:
        writes.write(work.connection, "a")
        with work.connection.begin_nested():
            writes.write(work.connection, "b")
        savepoint = work.connection.begin_nested()
        writes.write(work.connection, "c")
        savepoint.rollback()
        assert writes.committed() == []
        assert work.is_in_progress()
        work.finish()
        assert writes.committed() == ["a", "b"]
        assert work.is_finished()

    def test_so_do_writes_past_sqlalchemy(self, writes: Writes, work: Work) -> None:
        with work.connection.begin_nested():
            writes.write_past_sqlalchemy(work.connection, "a")
        savepoint = work.connection.begin_nested()
        writes.write_past_sqlalchemy(work.connection, "b")
        savepoint.rollback()
        assert writes.committed() == []
        work.finish()
        assert writes.committed() == ["a"]
        assert work.is_finished()

    def test_what_is_abandoned_was_never_written(self, writes: Writes, work: Work) -> None:
        writes.write(work.connection, "a")
        work.transaction.abandon()
        work.transaction.abandon()
        assert writes.committed() == []
        assert work.is_in_progress()
        retry = work.next_attempt()
        writes.write(retry.connection, "a")
        retry.finish()
        assert writes.committed() == ["a"]
        assert retry.is_finished()

    def test_what_is_finished_is_not_undone(self, writes: Writes, work: Work) -> None:
        writes.write(work.connection, "a")
        work.finish()
        work.transaction.abandon()
        assert writes.committed() == ["a"]
        assert work.is_finished()

    def test_nothing_is_there_when_the_connection_ends(self, writes: Writes, work: Work) -> None:
        """That is also all that the database hears of a process that dies."""
        writes.write(work.connection, "a")
        work.connection.connection.driver_connection.close()
        with pytest.raises(IdempotencyError):
            work.finish()
        work.transaction.abandon()
        assert writes.committed() == []
        assert work.is_in_progress()
        work.next_attempt()

    def test_who_finishes_after_another_has_begun_writes_nothing(
        self, writes: Writes, work: Work
    ) -> None:
        writes.write(work.connection, "a")
        work.transaction.abandon()
        retry = work.next_attempt()
        with pytest.raises(IdempotencyError):
            work.finish()
        assert writes.committed() == []
        assert work.is_in_progress()
        writes.write(retry.connection, "b")
        retry.finish()
        assert writes.committed() == ["b"]
        assert retry.is_finished()

    def test_what_the_view_has_ended_cannot_be_finished(self, writes: Writes, work: Work) -> None:
        """Refused at once or in the end: it is not to seem done."""
        writes.write(work.connection, "a")
        with suppress(Exception):
            work.connection.get_transaction().rollback()
        with pytest.raises(NotAtomic):
            work.finish()
        work.transaction.abandon()
        assert writes.committed() == []
        assert work.is_in_progress()
        work.next_attempt()

    def test_an_ordinary_error_means_nothing_special(self, writes: Writes, work: Work) -> None:
        writes.write(work.connection, "a")
        with pytest.raises(exc.IntegrityError) as twice, work.connection.begin_nested():
            writes.write(work.connection, "a")
        for error in (None, ValueError("of the view"), twice.value):
            assert work.transaction.explain(error) is None
        work.finish()
        assert writes.committed() == ["a"]

    def test_connections_are_given_back(self, engine: Engine, work: Work) -> None:
        if not isinstance(engine.pool, QueuePool):
            pytest.fail("give an engine with SQLAlchemy's usual pool, whose connections can be counted")
        assert engine.pool.checkedout() == 1
        work.transaction.abandon()
        assert engine.pool.checkedout() == 0
        work.next_attempt().finish()
        assert engine.pool.checkedout() == 0

    def test_nobody_takes_over_in_the_middle_of_a_step(
        self, records: Records, writes: Writes, held: Held
    ) -> None:
        claim = a_claim(lease=SHORT_SECONDS)
        work = begun(records, held, claim, held(records.claim(claim)))
        writes.write(work.connection, "a")
        wait_until(lambda: (stored_record(records, claim).lease_left or 0) <= 0)
        late = replace(again(claim), lease_seconds=60.0)
        assert records.take_over(late, stored_record(records, claim)) is None
        work.finish()
        assert writes.committed() == ["a"]
        assert work.is_finished()

    def test_a_step_renews_the_lease(self, records: Records, held: Held) -> None:
        claim = a_claim(lease=2.0)
        work = begun(records, held, claim, held(records.claim(claim)))
        wait_until(lambda: (stored_record(records, claim).lease_left or 0) < 1.9)
        work.finish()
        assert (stored_record(records, claim).lease_left or 0) > 1.9

    def test_who_was_taken_over_begins_no_step(self, records: Records, held: Held) -> None:
        claim = a_claim(lease=60)
        lease = held(records.claim(claim))
        lease.abandon()
        held(records.take_over(again(claim), stored_record(records, claim)))
        with pytest.raises(LeaseLost):
            lease.open_step()
