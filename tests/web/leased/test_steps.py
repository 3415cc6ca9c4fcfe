"""Steps: each runs once, whatever happens between them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from flask_idempotency import Retryable, StoreUnavailable, current_operation
from flask_idempotency.core.errors import StepError
from tests.conftest import PATIENCE_SECONDS
from tests.web.leased.records import end_lease, forge, results, steps

SEALED = {"IDEMPOTENCY_ENCRYPTION_KEYS": [b"k" * 32]}
SMALL_POOL = {"SQLALCHEMY_ENGINE_OPTIONS": {"pool_size": 1, "max_overflow": 0, "pool_timeout": 2}}


@pytest.fixture
def provider():
    """Charges, and notes the amounts; is there for the test, not behind a network."""

    def charge(amount, *, key=None, result=None):
        charge.amounts.append(amount)
        return {"id": len(charge.amounts), "key": key} if result is None else result

    charge.amounts = []
    return charge


def step(name, *args, **kwargs):
    return current_operation.step(name, *args, **kwargs)


def retry_once():
    if current_operation.attempt == 1:
        raise Retryable


@pytest.mark.parametrize("config", [{}, SMALL_POOL, SEALED], ids=["", "one connection", "sealed"])
def test_a_finished_step_is_not_repeated(world, add, provider):
    """What it returned is the decoded JSON the first time, too."""
    returned = []

    def view():
        assert world.db.session.scalars(world.db.select(world.Payment)).all() == []
        first = step("charge", provider, 5, result=((1, 2), {3: None}))
        returned.append(first)
        retry_once()
        return [first, step("mail", provider, 0, key="k"), step("pay", dict, atomic=True)]

    add(view)
    assert world.post().status_code == 503
    decoded = [[1, 2], {"3": None}]
    assert [world.post().json for _ in range(2)] == [[decoded, {"id": 2, "key": "k"}, {}]] * 2
    assert (returned, provider.amounts) == ([decoded] * 2, [5, 0])
    assert steps(world) == [("charge", 1), ("mail", 2), ("pay", 2)]


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_the_lease_is_whole_before_a_step_calls_and_after_it(world, add):
    left = "select extract(epoch from lease_expires_at - clock_timestamp()) from idempotency_record"
    lefts = []

    def look():
        lefts.append(world.sql(left)[0][0])
        end_lease(world)

    def view():
        end_lease(world)
        step("charge", look)
        look()
        return {}

    add(view, lease=60)
    assert world.post().status_code == 201
    assert [50 < seconds <= 60 for seconds in lefts] == [True, True], lefts


@pytest.mark.parametrize("result", [object(), float("nan"), {1, 2}, b"bytes", "a" * 2**20], ids=type)
def test_what_ran_is_recorded_as_run_whatever_came_of_it(world, add, provider, result):
    errors = []

    def view():
        try:
            step("charge", provider, 5, result=result)
        except StepError as error:
            errors.append(str(error))
            raise Retryable from error
        return {}

    add(view)
    for _ in range(3):
        assert world.post().status_code == 503
        world.sql("update idempotency_record set expires_at = created_at")
    assert provider.amounts == [5]
    assert "step 'charge' was done, but its result" in errors[0]
    assert "an operator must decide about this operation" in errors[1] == errors[2]
    assert (steps(world), results(world)) == ([("charge", 1)], [None])


def test_where_there_is_no_room_for_a_result_the_step_is_not_called(world, add, provider):
    def view():
        for number in range(4):
            step(f"charge {number}", provider, number, result="a" * (2**19 - 2))

    add(view)
    assert world.post().status_code == 500
    assert provider.amounts == [0, 1]
    assert len(steps(world)) == 2


@pytest.mark.parametrize("store", ["hybrid", "sql", "redis"], indirect=True)
@pytest.mark.parametrize("same", [True, False])
def test_a_step_runs_in_one_thread_and_different_ones_run_at_once(world, add, same):
    """On each store, as each has a lock of its own. The barrier opens when each has begun or failed."""
    calls, start, everybody = [], threading.Barrier(3), threading.Barrier(3)

    def charge(number):
        calls.append(number)
        everybody.wait(PATIENCE_SECONDS)
        return number

    def work(operation, number):
        with world.app.app_context():
            start.wait(PATIENCE_SECONDS)
            try:
                return operation.step("same" if same else f"step {number}", charge, number)
            except StepError as error:
                everybody.wait(PATIENCE_SECONDS)
                return str(error)

    def view():
        operation = current_operation._get_current_object()
        with ThreadPoolExecutor(3) as pool:
            return [*pool.map(lambda number: work(operation, number), range(3))]

    add(view)
    found = world.post().json
    refused = [each for each in found if "is running in another thread" in str(each)]
    assert (len(calls), len(refused)) == ((1, 2) if same else (3, 0))
    assert sorted(each for each in found if each not in refused) == sorted(calls)


def test_a_call_that_cannot_be_a_step_is_refused_before_it_is_made(world, add, provider):
    async def charge_later():
        raise AssertionError

    def view():
        step("charge", provider, 1)
        with pytest.raises(StepError, match="two steps"):
            step("charge", provider, 2)
        for name in "", "x" * 256, "a\0b", "a\ud800b", None:
            with pytest.raises(StepError, match="1 to 255 characters"):
                step(name, provider, 3)
        with pytest.raises(StepError, match="async def"):
            step("later", charge_later)
        return {}

    add(view)
    assert world.post().status_code == 201
    assert provider.amounts == [1]


def test_what_a_step_leaves_uncommitted_or_failed_is_the_views_and_does_not_cost_its_record(
    world, add, provider
):
    def charge(amount):
        provider(amount)
        world.db.session.add(world.Payment(amount=amount))
        world.db.session.flush()
        if amount == 4:
            with pytest.raises(sa.exc.ProgrammingError):
                world.db.session.execute(sa.text("select * from nowhere"))

    def view():
        for name, amount, end in ("two", 2, "flush"), ("three", 3, "commit"), ("four", 4, "rollback"):
            step(name, charge, amount)
            current_operation.extend(100)
            getattr(world.db.session, end)()
        retry_once()
        return {}

    add(view)
    assert [world.post().status_code for _ in range(2)] == [503, 201]
    assert (provider.amounts, world.count()) == ([2, 3, 4], 2)


@pytest.mark.parametrize("config", [SEALED])
def test_a_result_is_encrypted_and_one_that_somebody_writes_in_plain_is_not_used(
    world, add, provider, caplog
):
    def view():
        result = step("charge", provider, 5, result="canary")
        retry_once()
        return step("mail", provider, result, result="mailed")

    runs = add(view)
    world.post()
    (sealed,) = results(world)
    assert "canary" not in sealed
    forge(world, '"forged"')
    assert world.post().status_code == 500
    assert "SealBroken: The stored step charge is not encrypted" in caplog.text
    assert (runs, provider.amounts) == ([1], [5]), "nothing of the view is repeated"


@pytest.mark.parametrize("forged", ["[" * 200_000 + "]" * 200_000, "1" * 5000, "sealed:\xff", "{"])
def test_a_result_that_cannot_be_read_leaves_the_operation_open(world, add, provider, caplog, forged):
    def view():
        step("charge", provider, 5)
        retry_once()

    add(view)
    world.post()
    forge(world, forged)
    assert world.post().status_code == 500
    assert "RecordBroken: The stored record" in caplog.text
    assert [record.state for record in world.records()] == ["in_progress"]
    assert provider.amounts == [5]


@pytest.mark.parametrize("atomic", [True, False])
def test_a_step_that_may_be_recorded_is_looked_up_before_it_is_done_again(
    world, add, provider, monkeypatch, atomic
):
    """The reply to its record is lost; the view swallows that, and calls it once more."""

    def lose_the_reply(holder):
        record = holder.record

        def lost(*given):
            monkeypatch.undo()
            record(*given)
            raise StoreUnavailable

        monkeypatch.setattr(holder, "record", lost)
        return holder

    def view():
        lease = current_operation.steps._lease
        if atomic:
            opened = lease.open_step
            monkeypatch.setattr(lease, "open_step", lambda *given: lose_the_reply(opened(*given)))
        else:
            lose_the_reply(lease)
        with pytest.raises(StoreUnavailable):
            step("charge", provider, 1, atomic=atomic)
        step("charge", provider, 1, atomic=atomic)
        return {}

    add(view)
    assert world.post().status_code == 201
    assert provider.amounts == [1]
