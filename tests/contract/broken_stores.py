"""Stores that break a guarantee, each in one place; and the correct one that they are made from.

Not collected with the rest: ``test_broken_stores.py`` runs it, and looks at what the contract catches.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import pytest
import sqlalchemy as sa

from flask_idempotency.core.records import State
from flask_idempotency.stores.memory import MemoryHold, MemoryLease, MemoryRecords
from flask_idempotency.testing.contract import StoreContract


class Sound(StoreContract):
    store = MemoryRecords
    hold = MemoryHold
    lease = MemoryLease

    @pytest.fixture
    def engine(self, tmp_path):
        engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
        yield engine
        engine.dispose()

    @pytest.fixture
    def records(self, engine, monkeypatch):
        monkeypatch.setattr("flask_idempotency.stores.memory.MemoryHold", self.hold)
        monkeypatch.setattr("flask_idempotency.stores.memory.MemoryLease", self.lease)
        return self.store(engine)


class TestSound(Sound):
    pass


class TestAnswersWithoutWrites(Sound):
    """The answer is there, and what the view wrote is not."""

    class hold(MemoryHold):  # noqa: N801
        def complete(self, answer):
            self._transaction.abandon()
            with self._records.changed:
                self._store(answer, State.COMPLETED)
            self.abandon()


class TestRecordsStepsWithoutWrites(Sound):
    class hold(MemoryHold):  # noqa: N801
        def record(self, step, result):
            self._transaction.abandon()
            self._entry.steps[step] = result
            self._entry.lease = self._records.clock() + 60
            self.abandon()


class TestStoresTheAnswerFirst(Sound):
    """In a transaction of its own: there even if the view's cannot commit."""

    class hold(MemoryHold):  # noqa: N801
        def complete(self, answer):
            with self._records.changed:
                self._store(answer, State.COMPLETED)
            self._commit(lambda: None)


class TestCommitsEachWrite(Sound):
    class hold(MemoryHold):  # noqa: N801
        def opened(self):
            self.connection.execution_options(isolation_level="AUTOCOMMIT")
            return self

        @cached_property
        def connection(self):
            return self._records.engine.connect()

        def complete(self, answer):
            with self._records.changed:
                self._store(answer, State.COMPLETED)
            self.abandon()

        def abandon(self):
            self.connection.close()
            super().abandon()


class TestCommitsWhatIsAbandoned(Sound):
    class hold(MemoryHold):  # noqa: N801
        def abandon(self):
            if self._transaction is not None and self._transaction._open:
                self._transaction.commit()
            super().abandon()


class TestLetsALateAttemptFinish(Sound):
    """Without a look at who owns the record by now."""

    class hold(MemoryHold):  # noqa: N801
        def complete(self, answer):
            if self.is_open:
                super().complete(answer)
                return
            self._claim = replace(self._claim, owner=self._entry.record.owner)
            with self._records.changed:
                self._store(answer, State.COMPLETED)


class TestLetsTheViewEndTheTransaction(Sound):
    class hold(MemoryHold):  # noqa: N801
        def opened(self):
            super().opened()
            self._transaction.guard = self._transaction.raise_if_ended = lambda: None
            self._transaction._driver.set_authorizer(lambda *_what: 0)
            return self

        def _commit(self, then):
            if self._transaction._driver.in_transaction:
                return super()._commit(then)
            with self._records.changed:
                then()
            return self.abandon()


class TestTakesEveryErrorForItsOwn(Sound):
    class hold(MemoryHold):  # noqa: N801
        def explain(self, error):
            return error


class TestKeepsConnections(Sound):
    class hold(MemoryHold):  # noqa: N801
        def opened(self):
            self.kept = self._records.engine.connect()
            return super().opened()


class TestDoesNotLockTheRecordForAStep(Sound):
    class lease(MemoryLease):  # noqa: N801
        def open_step(self):
            hold = super().open_step()
            self._entry.holder = None
            return hold


class TestBeginsAStepForWhoWasTakenOver(Sound):
    class lease(MemoryLease):  # noqa: N801
        def open_step(self):
            self._claim = replace(self._claim, owner=self._entry.record.owner)
            return super().open_step()


class TestDoesNotRenewTheLease(Sound):
    class hold(MemoryHold):  # noqa: N801
        def record(self, step, result):
            def keep():
                self._entry.steps[step] = result

            self._commit(keep)


class TestResumesWhatHasExpired(Sound):
    """As if its client had sent it."""

    class store(MemoryRecords):  # noqa: N801
        def take_over(self, claim, seen):
            return super().take_over(replace(claim, resumes=None), seen)
