"""Stores that break a guarantee, each in one place; and the correct one that they are made from.

Not collected with the rest: ``test_broken_stores.py`` runs it, and looks at what the contract catches.
"""

import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import pytest
import sqlalchemy as sa

from flask_idempotency.core.errors import LeaseLost
from flask_idempotency.core.records import State
from flask_idempotency.stores.memory import MemoryHold, MemoryLease, MemoryRecords
from flask_idempotency.testing import Clock, contract


class Sound(contract.StoreContract):
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
        monkeypatch.setattr(contract, "PATIENCE_SECONDS", 1.0)
        return self.store(engine, Clock())

    @pytest.fixture
    def pass_time(self, records):
        return records.clock.advance


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


class TestForgetsItsTransactionsTakeOver(Sound):
    """The attempt and its owner are not durable before the view runs."""

    class hold(MemoryHold):  # noqa: N801
        def abandon(self):
            super().abandon()
            record = self._entry.record
            if record.state is State.IN_PROGRESS and record.attempt > 1:
                self._entry.record = replace(record, attempt=record.attempt - 1, owner="")


class TestKeepsTheRowOfWhatWasAbandoned(Sound):
    class hold(MemoryHold):  # noqa: N801
        def abandon(self):
            super().abandon()
            self.is_open = True


class TestTakesOverWhatIsHeldOnceItsRetentionIsOver(Sound):
    class store(MemoryRecords):  # noqa: N801
        def take_over(self, claim, as_seen):
            if as_seen.expired:
                self._entries[claim.key].holder, claim = None, replace(claim, lease_seconds=60.0)
            return super().take_over(claim, as_seen)


class TestEndsTheLeaseWithAnAbandonedStep(Sound):
    class hold(MemoryHold):  # noqa: N801
        def abandon(self):
            super().abandon()
            if self._entry.lease is not None:
                self._entry.lease = self._records.clock()


class TestReopensWhatIsFinished(Sound):
    """Abandoning after ``complete`` gives the record a lease again: it never expires."""

    class store(MemoryRecords):  # noqa: N801
        def seen(self, entry):
            seen = super().seen(entry)
            return seen if seen.state is State.IN_PROGRESS else replace(seen, lease_left=None)

    class lease(MemoryLease):  # noqa: N801
        def abandon(self):
            if self._entry.record.owner == self._claim.owner and self._entry.record.response:
                self._entry.lease = self._records.clock()
            super().abandon()


class TestReopensWhatIsReleased(Sound):
    class lease(MemoryLease):  # noqa: N801
        def release(self):
            super().release()
            self._open = True


class TestCountsAttemptsAfreshAfterARelease(Sound):
    class lease(MemoryLease):  # noqa: N801
        def release(self):
            super().release()
            self._entry.record = replace(self._entry.record, attempt=1)


class TestKeepsTheFirstRetentionOfWhatIsReleased(Sound):
    class lease(MemoryLease):  # noqa: N801
        def release(self):
            before = self._entry.expires
            super().release()
            self._entry.expires = before


class TestKeepsTheFirstRetentionOfWhatIsCompleted(Sound):
    class hold(MemoryHold):  # noqa: N801
        def _store(self, response, state):
            before = self._entry.expires
            super()._store(response, state)
            self._entry.expires = before


class TestForgetsStepsWithTheRelease(Sound):
    class lease(MemoryLease):  # noqa: N801
        def release(self):
            super().release()
            self._entry.steps.clear()


class TestForgetsStepsWithTheInterruption(Sound):
    class store(MemoryRecords):  # noqa: N801
        def take_over(self, claim, as_seen):
            if as_seen.lease_left is not None:
                self._entries[claim.key].steps.clear()
            return super().take_over(claim, as_seen)


class TestKeepsStepsAsText(Sound):
    class lease(MemoryLease):  # noqa: N801
        def record(self, step, result):
            super().record(step, result.decode(errors="replace").encode())


class TestRecordsAStepWithoutRenewingTheLease(Sound):
    class lease(MemoryLease):  # noqa: N801
        def record(self, step, result):
            self._check()
            self._entry.steps[step] = result


class TestRecordsAStepOfWhoWasTakenOver(Sound):
    """And says that the lease is lost."""

    class lease(MemoryLease):  # noqa: N801
        def record(self, step, result):
            self._entry.steps[step] = result
            super().record(step, result)


class TestRenewsTheLeaseOfSomebodyElse(Sound):
    """And says that its own is lost."""

    class lease(MemoryLease):  # noqa: N801
        def extend(self, seconds):
            self._entry.lease = max(self._entry.lease or 0.0, self._records.clock() + seconds)
            super().extend(seconds)


class TestRenewsFromTheLeasesEnd(Sound):
    class lease(MemoryLease):  # noqa: N801
        def extend(self, seconds):
            self._check()
            self._entry.lease += seconds


class TestShortensALease(Sound):
    class lease(MemoryLease):  # noqa: N801
        def extend(self, seconds):
            self._check()
            self._entry.lease = self._records.clock() + seconds


class TestGivesALeaseToWhatIsFinished(Sound):
    class lease(MemoryLease):  # noqa: N801
        def _check(self):
            if self._entry.record.owner != self._claim.owner:
                raise LeaseLost

        _check_lease = _check


class TestGivesALeaseToWhatIsReleased(Sound):
    class lease(MemoryLease):  # noqa: N801
        def _check_lease(self):
            self._check()


class TestLosesALeaseThatNobodyTook(Sound):
    class lease(MemoryLease):  # noqa: N801
        def _check(self):
            super()._check()
            if (self._entry.lease or 0) <= self._records.clock():
                raise LeaseLost


class TestRaisesWhereItAbandons(Sound):
    class lease(MemoryLease):  # noqa: N801
        def abandon(self):
            self._check()
            super().abandon()


class TestReleasesWhatItAbandons(Sound):
    class lease(MemoryLease):  # noqa: N801
        def abandon(self):
            super().abandon()
            self._entry.lease = None


class TestWaitsForTheEndOfAnAbandonedLease(Sound):
    class lease(MemoryLease):  # noqa: N801
        def abandon(self):
            pass


def _unfenced(verb):
    """A lease whose ``verb`` does not compare the owner's token."""

    def late(self, *arguments):
        self._claim = replace(self._claim, owner=self._entry.record.owner)
        return getattr(MemoryLease, verb)(self, *arguments)

    return type("lease", (MemoryLease,), {verb: late})


class TestExtendsForWhoWasTakenOver(Sound):
    lease = _unfenced("extend")


class TestRecordsForWhoWasTakenOver(Sound):
    lease = _unfenced("record")


class TestCompletesForWhoWasTakenOver(Sound):
    lease = _unfenced("complete")


class TestReleasesForWhoWasTakenOver(Sound):
    lease = _unfenced("release")


class TestAbandonsForWhoWasTakenOver(Sound):
    lease = _unfenced("abandon")


class TestHasLeasesOfOneLength(Sound):
    class store(MemoryRecords):  # noqa: N801
        def claim(self, claim):
            return super().claim(replace(claim, lease_seconds=claim.lease_seconds and 6.0))


class TestCutsKeys(Sound):
    class store(MemoryRecords):  # noqa: N801
        def look(self, key):
            return super().look(key[:-1])

        def claim(self, claim):
            return super().claim(replace(claim, key=claim.key[:-1]))

        def take_over(self, claim, as_seen):
            return super().take_over(replace(claim, key=claim.key[:-1]), as_seen)


class TestSharesSteps(Sound):
    class store(MemoryRecords):  # noqa: N801
        def _hold(self, entry, claim):
            self.__dict__.setdefault("steps", entry.steps)
            entry.steps = self.steps
            return super()._hold(entry, claim)


class TestLetsSeveralClaimAtOnce(Sound):
    class store(MemoryRecords):  # noqa: N801
        def claim(self, claim):
            if self.look(claim.key) is not None:
                return None
            with suppress(threading.BrokenBarrierError):  # a second one, if there is any, is here too
                self.__dict__.setdefault("met", threading.Barrier(2)).wait(5)
            with self.__dict__.setdefault("turn", threading.Lock()):
                self._entries.pop(claim.key, None)
                return super().claim(claim)


class TestLetsSeveralTakeOverAtOnce(Sound):
    class store(MemoryRecords):  # noqa: N801
        def take_over(self, claim, as_seen):
            if self.look(claim.key) != as_seen:
                return None
            with suppress(threading.BrokenBarrierError):  # a second one, if there is any, is here too
                self.__dict__.setdefault("met", threading.Barrier(2)).wait(5)
            with self.__dict__.setdefault("turn", threading.Lock()):
                self._entries[claim.key].lease = None
                return super().take_over(claim, self.look(claim.key))


class TestTakesOverWhatHasChanged(Sound):
    """Since it was looked at."""

    class store(MemoryRecords):  # noqa: N801
        def take_over(self, claim, as_seen):
            found = self.look(claim.key)
            return super().take_over(claim, replace(as_seen, owner=found.owner))


class TestTakesOverWhatIsNotThere(Sound):
    class store(MemoryRecords):  # noqa: N801
        def take_over(self, claim, as_seen):
            return super().take_over(claim, as_seen) if self.look(claim.key) else self.claim(claim)


class TestTakesOverFailures(Sound):
    class store(MemoryRecords):  # noqa: N801
        def take_over(self, claim, as_seen):
            entry = self._entries[claim.key]
            if entry.record.state is State.FAILED:
                entry.record = replace(entry.record, state=State.IN_PROGRESS)
            return super().take_over(claim, as_seen)


class TestCallsAFailureCompleted(Sound):
    class lease(MemoryLease):  # noqa: N801
        def _store(self, response, state):
            super()._store(response, State.COMPLETED)


class TestExpiresWhatIsInterrupted(Sound):
    class store(MemoryRecords):  # noqa: N801
        def seen(self, entry):
            seen = super().seen(entry)
            return replace(seen, expired=entry.expires <= self.clock())


class TestCountsOnAfterTheRetention(Sound):
    class store(MemoryRecords):  # noqa: N801
        def take_over(self, claim, as_seen):
            hold = super().take_over(claim, as_seen)
            if hold is not None:
                hold.attempt = as_seen.attempt + 1
            return hold


class TestKeepsStepsAfterTheRetention(Sound):
    class store(MemoryRecords):  # noqa: N801
        def take_over(self, claim, as_seen):
            steps = dict(self._entries[claim.key].steps)
            hold = super().take_over(claim, as_seen)
            self._entries[claim.key].steps.update(steps)
            return hold


class TestKeepsTheFingerprintAfterTheRetention(Sound):
    class store(MemoryRecords):  # noqa: N801
        def take_over(self, claim, as_seen):
            return super().take_over(replace(claim, fingerprint=as_seen.fingerprint), as_seen)


class TestWaitsOnThoughTheHolderHasEnded(Sound):
    class store(MemoryRecords):  # noqa: N801
        def wait(self, key, seconds):
            time.sleep(seconds)


class TestDoesNotWaitForTheHolder(Sound):
    class store(MemoryRecords):  # noqa: N801
        def wait(self, key, seconds):
            pass


class TestWaitsThoughNobodyHolds(Sound):
    class store(MemoryRecords):  # noqa: N801
        def wait(self, key, seconds):
            if self.look(key) is None:
                time.sleep(seconds)
            super().wait(key, seconds)


class TestClaimsWithoutALook(Sound):
    class store(MemoryRecords):  # noqa: N801
        def look_or_claim(self, claim):
            return self.claim(claim)


class TestLooksAndClaimsAtOnceForSeveral(Sound):
    class store(MemoryRecords):  # noqa: N801
        def look_or_claim(self, claim):
            if (found := self.look(claim.key)) is not None:
                return found
            time.sleep(0.05)
            self._entries.pop(claim.key, None)
            return self.claim(claim)


def _forgetful(kind, verb):
    """A hold whose ``verb`` changes the fingerprint."""

    def forget(self, *arguments):
        getattr(kind, verb)(self, *arguments)
        self._entry.record = replace(self._entry.record, fingerprint=contract.OTHER)

    return type(kind.__name__, (kind,), {verb: forget})


class TestForgetsTheFingerprintWithTheResponse(Sound):
    lease = _forgetful(MemoryLease, "complete")


class TestForgetsTheFingerprintWithAnAtomicResponse(Sound):
    hold = _forgetful(MemoryHold, "complete")


class TestForgetsTheFingerprintWithTheTransaction(Sound):
    hold = _forgetful(MemoryHold, "abandon")


class TestForgetsTheFingerprintWithAnAtomicStep(Sound):
    hold = _forgetful(MemoryHold, "record")


class TestForgetsTheFingerprintWithAStep(Sound):
    lease = _forgetful(MemoryLease, "record")


class TestForgetsTheFingerprintWithARenewal(Sound):
    lease = _forgetful(MemoryLease, "extend")


class TestForgetsTheFingerprintWithTheRelease(Sound):
    lease = _forgetful(MemoryLease, "release")


class TestForgetsTheFingerprintWithTheInterruption(Sound):
    lease = _forgetful(MemoryLease, "abandon")


class TestForgetsTheFingerprintOfAFailure(Sound):
    class lease(MemoryLease):  # noqa: N801
        def _store(self, response, state):
            super()._store(response, state)
            if state is State.FAILED:
                self._entry.record = replace(self._entry.record, fingerprint=contract.OTHER)


class TestForgetsTheFingerprintOfWhatItTakesOver(Sound):
    class store(MemoryRecords):  # noqa: N801
        def take_over(self, claim, as_seen):
            return super().take_over(replace(claim, fingerprint=contract.OTHER), as_seen)


class TestForgetsStepsWithARenewal(Sound):
    class lease(MemoryLease):  # noqa: N801
        def extend(self, seconds):
            super().extend(seconds)
            self._entry.steps.clear()

        def record(self, step, result):
            before = self.steps()
            super().record(step, result)
            self._entry.steps.update(before)


class TestFoldsTheNamesOfSteps(Sound):
    class lease(MemoryLease):  # noqa: N801
        def record(self, step, result):
            super().record(step.lower(), result)


def _hasty(verb):
    """A lease whose ``verb`` compares the owner's token first, and then writes the whole record."""

    def write(self, *arguments):
        seen = {**vars(self._entry), "steps": self.steps()}
        if seen["record"].owner == self._claim.owner:
            time.sleep(0.001)
            vars(self._entry).update(seen)
        getattr(MemoryLease, verb)(self, *arguments)

    return type("lease", (MemoryLease,), {verb: write})


class TestExtendsAfterTheComparison(Sound):
    lease = _hasty("extend")


class TestRecordsAfterTheComparison(Sound):
    lease = _hasty("record")


class TestCompletesAfterTheComparison(Sound):
    lease = _hasty("complete")


class TestReleasesAfterTheComparison(Sound):
    lease = _hasty("release")


class TestAbandonsAfterTheComparison(Sound):
    lease = _hasty("abandon")


class TestTakesOverWhatHasEndedMeanwhile(Sound):
    """Compares, when it writes, only the owner."""

    class store(MemoryRecords):  # noqa: N801
        def take_over(self, claim, as_seen):
            entry, state = self._entries.get(claim.key), State.IN_PROGRESS
            if as_seen.lease_left is not None and self.look(claim.key) == as_seen:
                time.sleep(0.001)
                with self.changed:
                    entry.record = replace(entry.record, state=state, response=None)
                    entry.lease = self.clock()
                    return super().take_over(claim, as_seen)
            return super().take_over(claim, as_seen)


class TestBeginsAStepAfterTheComparison(Sound):
    class lease(MemoryLease):  # noqa: N801
        def open_step(self):
            self._check()
            time.sleep(0.001)
            self._entry.record = replace(self._entry.record, owner=self._claim.owner)
            return super().open_step()


def _careless(verb):
    """A lease whose ``verb`` does not look whether its conditional write was rejected."""

    def write(self, *arguments):
        self._check()
        seen = {**vars(self._entry), "steps": self.steps()}
        time.sleep(0.001)
        with self._records.changed:
            if seen == vars(self._entry):
                getattr(MemoryLease, verb)(self, *arguments)

    return type("lease", (MemoryLease,), {verb: write})


class TestDoesNotNoticeThatAStepWasRejected(Sound):
    lease = _careless("record")


class TestDoesNotNoticeThatAResponseWasRejected(Sound):
    lease = _careless("complete")


class TestDoesNotNoticeThatARenewalWasRejected(Sound):
    lease = _careless("extend")
