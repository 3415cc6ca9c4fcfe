"""Steps: each runs once, whatever happens between them."""

from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest

from flask_idempotency import Retryable, StoreUnavailable, current_operation, idempotent
from flask_idempotency.core.errors import StepError
from tests.web.leased.records import end_lease, forge, results, steps


class Provider:
    """Counts the calls; is there for the test, not behind a network."""

    def __init__(self):
        self.calls = []

    def charge(self, amount, *, key=None, result=None):
        self.calls.append((amount, key))
        return {"id": len(self.calls)} if result is None else result


@pytest.fixture
def provider():
    return Provider()


def test_a_finished_step_is_not_repeated(world, add_json, provider):
    def view():
        step = current_operation.step
        first = step("charge", provider.charge, 5, key=current_operation.derive_key("charge"))
        if current_operation.attempt == 1:
            raise Retryable
        second = step("mail", provider.charge, 0)
        return [first, second]

    add_json(view)
    assert world.post().status_code == 503
    assert world.post().json == [{"id": 1}, {"id": 2}]
    assert [amount for amount, _ in provider.calls] == [5, 0]
    assert steps(world) == [("charge", 1), ("mail", 2)]
    assert world.post().json == [{"id": 1}, {"id": 2}]
    assert len(provider.calls) == 2


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_the_lease_is_whole_before_a_step_calls_and_after_it(world, add_json):
    """Nobody takes over while it calls, however long the view took before."""
    left = "select extract(epoch from lease_expires_at - clock_timestamp()) from idempotency_record"
    lefts = []

    def look():
        lefts.append(world.sql(left)[0][0])
        end_lease(world)

    def view():
        end_lease(world)
        current_operation.step("charge", look)
        look()
        return {}

    add_json(view, lease=60)
    assert world.post().status_code == 201
    assert [50 < seconds <= 60 for seconds in lefts] == [True, True], lefts


def test_what_comes_back_is_the_decoded_json_the_first_time_too(world, add_json, provider):
    results = []

    def view():
        results.append(current_operation.step("a", provider.charge, 1, result=((1, 2), {3: None})))
        if current_operation.attempt == 1:
            raise Retryable
        return {}

    add_json(view)
    world.post(), world.post()
    assert results == [[[1, 2], {"3": None}]] * 2


@pytest.mark.parametrize("result", [object(), float("nan"), {1, 2}, b"bytes"])
def test_a_result_that_is_not_json_is_told_before_the_next_effect(
    world, add_json, provider, caplog, result
):
    def view():
        current_operation.step("first", provider.charge, 1, result=result)
        current_operation.step("second", provider.charge, 2)

    add_json(view)
    assert world.post().status_code == 500
    assert "StepError: step 'first' was done, but its result is not JSON" in caplog.text
    assert [amount for amount, _ in provider.calls] == [1]
    assert world.post().headers["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize("result", [float("nan"), "a" * 2**20], ids=["no JSON", "too long"])
def test_what_ran_is_recorded_as_run_whatever_came_of_it(world, add_json, provider, result):
    """It is never called again, and the operation waits for an operator."""
    errors = []

    def view():
        try:
            current_operation.step("charge", provider.charge, 5, result=result)
        except StepError as error:
            errors.append(str(error))
            raise Retryable from error
        return {}

    add_json(view)
    for _ in range(3):
        assert world.post().status_code == 503
        world.sql("update idempotency_record set expires_at = created_at")
    assert len(provider.calls) == 1
    assert "step 'charge' was done, but its result" in errors[0]
    assert "an operator must decide about this operation" in errors[1] == errors[2]
    assert (steps(world), results(world)) == ([("charge", 1)], [None])


def test_steps_of_many_threads_are_all_recorded(world, add_json, provider):
    def view():
        def charge(number):
            return current_operation.step(
                f"charge {number}", provider.charge, number, result="a" * 20_000
            )

        with ThreadPoolExecutor(40) as pool:
            calls = [pool.submit(copy_context().run, charge, number) for number in range(40)]
        return {"done": sum(call.exception() is None for call in calls)}

    add_json(view)
    assert world.post().json == {"done": 40}
    assert len(steps(world)) == len(provider.calls) == 40


def test_where_there_is_no_room_for_a_result_the_step_is_not_called(world, add_json, provider):
    def view():
        for number in range(4):
            current_operation.step(f"charge {number}", provider.charge, 5, result="a" * (2**19 - 2))

    add_json(view)
    assert world.post().status_code == 500
    assert len(provider.calls) == 2
    assert [attempt for _, attempt in steps(world)] == [1, 1]


def test_two_steps_of_one_name_are_an_error(world, add_json, provider):
    errors = []

    def view():
        current_operation.step("charge", provider.charge, 1)
        with pytest.raises(StepError, match="two steps") as error:
            current_operation.step("charge", provider.charge, 2)
        errors.append(error)
        return {}

    add_json(view)
    assert world.post().status_code == 201
    assert len(errors) == len(provider.calls) == 1


def test_a_step_has_a_name(world, add_json, provider):
    def view():
        for name in "", "x" * 256, "a\0b", "a\ud800b", None, 5:
            with pytest.raises(StepError, match="1 to 255 characters"):
                current_operation.step(name, provider.charge, 1)
        return {}

    add_json(view)
    assert world.post().status_code == 201
    assert provider.calls == []


def test_a_step_passes_every_argument_on(world, add_json):
    def create(name, function, /, *, self):
        return [name, function, self]

    def greet(name, function="hello"):
        return f"{function} {name}"

    add_json(
        lambda: [
            current_operation.step("create", create, "a", "b", self="c"),
            current_operation.step("greet", greet, name="Alice", function="hi"),
        ]
    )
    assert world.post().json == [["a", "b", "c"], "hi Alice"]


def test_a_step_calls_no_async_function(world, add_json):
    async def charge():
        raise AssertionError

    def view():
        with pytest.raises(StepError, match="async def"):
            current_operation.step("charge", charge)

    add_json(view)
    assert world.post().status_code == 201


def test_what_a_step_leaves_uncommitted_is_the_views_to_commit(world, add_json):
    def write(amount):
        world.db.session.add(world.Payment(amount=amount))
        world.db.session.flush()

    def view():
        write(1)
        current_operation.step("two", write, 2)
        current_operation.extend(100)
        current_operation.step("three", write, 3)
        assert world.count() == 0
        world.db.session.commit()
        return {}

    add_json(view)
    assert world.post().status_code == 201
    assert (world.count(), len(steps(world))) == (3, 2)


def test_atomic_operations_have_none(app, world):
    @app.post("/payments")
    @idempotent
    def pay():
        with pytest.raises(RuntimeError, match="atomic=False"):
            current_operation.step("charge", dict)
        with pytest.raises(RuntimeError, match="atomic=False"):
            current_operation.extend(5)
        assert len(current_operation.derive_key("charge")) == 43
        return {}

    assert world.post().status_code == 200


@pytest.mark.parametrize(
    "config", [{"SQLALCHEMY_ENGINE_OPTIONS": {"pool_size": 1, "max_overflow": 0, "pool_timeout": 2}}]
)
def test_one_connection_is_enough(world, add_json, provider):
    def view():
        assert world.db.session.scalar(world.db.select(world.db.func.count(world.Payment.id))) == 0
        current_operation.step("charge", provider.charge, 5)
        if current_operation.attempt == 1:
            raise Retryable
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        assert world.db.session.scalars(world.db.select(world.Payment.amount)).all() == [5]
        current_operation.step("pay", dict, atomic=True)
        assert world.db.session.scalars(world.db.select(world.Payment.amount)).all() == [5]
        return {}

    add_json(view)
    assert [world.post().status_code for _ in range(2)] == [503, 201]
    assert len(provider.calls) == 1


@pytest.mark.parametrize("config", [{"IDEMPOTENCY_ENCRYPTION_KEYS": [b"k" * 32]}])
def test_results_are_sealed_where_responses_are(world, add_json, provider):
    def view():
        result = current_operation.step("charge", provider.charge, 5, result="canary")
        if current_operation.attempt == 1:
            raise Retryable
        return result

    add_json(view)
    world.post()
    (stored,) = results(world)
    assert "canary" not in stored
    assert world.post().json == "canary"
    assert len(provider.calls) == 1


def test_without_the_key_of_a_recorded_step_the_view_does_not_run_again(make_world, provider):
    runs, uri = [], None

    def view():
        runs.append(1)
        current_operation.step("charge", provider.charge, 5)
        raise Retryable

    for keys in [b"k" * 32], [b"o" * 32]:
        given = {} if uri is None else {"SQLALCHEMY_DATABASE_URI": uri}
        world = make_world(IDEMPOTENCY_ENCRYPTION_KEYS=keys, **given)
        uri = world.app.config["SQLALCHEMY_DATABASE_URI"]
        world.app.post("/payments", endpoint="pay")(idempotent(atomic=False)(view))
        status = world.post().status_code
    assert (status, runs, len(provider.calls)) == (500, [1], 1)


@pytest.mark.parametrize("config", [{"IDEMPOTENCY_ENCRYPTION_KEYS": [b"k" * 32]}])
def test_a_result_that_somebody_writes_in_plain_is_not_used(world, add_json, provider, caplog):
    def view():
        result = current_operation.step("charge", provider.charge, 5)
        if current_operation.attempt == 1:
            raise Retryable
        return current_operation.step("mail", provider.charge, result["id"])

    add_json(view)
    world.post()
    (sealed,) = results(world)
    forge(world, '{"id": 666}')
    assert world.post().status_code == 500
    assert "SealBroken: The stored step charge is not encrypted" in caplog.text
    assert [amount for amount, _ in provider.calls] == [5]
    assert [record.state for record in world.records()] == ["in_progress"]
    forge(world, sealed)
    world.sql("update idempotency_record set lease_expires_at = null")
    assert world.post().status_code == 201
    assert [amount for amount, _ in provider.calls] == [5, 1]


@pytest.mark.parametrize("forged", ["[" * 200_000 + "]" * 200_000, "1" * 5000, "sealed:\xff", "{"])
def test_a_result_that_cannot_be_read_leaves_the_operation_open(
    world, add_json, provider, caplog, forged
):
    def view():
        current_operation.step("charge", provider.charge, 5)
        if current_operation.attempt == 1:
            raise Retryable
        return "done"

    add_json(view)
    world.post()
    forge(world, forged)
    assert world.post().status_code == 500
    assert "RecordBroken: The stored record" in caplog.text
    assert [record.state for record in world.records()] == ["in_progress"]
    assert [amount for amount, _ in provider.calls] == [5]


def test_steps_go_with_their_record(app, world, add_json, provider):
    add_json(lambda: current_operation.step("charge", provider.charge, 5))
    world.post(), world.post(key="key-2")
    world.sql("update idempotency_record set expires_at = now() where attempt = 1 and ctid ="
              " (select min(ctid) from idempotency_record)")  # fmt: skip
    assert sum(app.extensions["idempotency"].records.admin().purge(100)) == 1
    assert steps(world) == [("charge", 1)]


@pytest.mark.parametrize("atomic", [True, False])
def test_a_step_that_may_be_recorded_is_looked_up_before_it_is_done_again(
    world, add, atomic, monkeypatch
):
    runs = []

    def view():
        steps = current_operation.steps
        real = steps._lease.open_step if atomic else steps._lease.record

        def answer_lost(*args):
            monkeypatch.undo()
            if not atomic:
                real(*args)
                raise StoreUnavailable
            hold = real()
            record = hold.record

            def lost(*given):
                record(*given)
                raise StoreUnavailable

            hold.record = lost
            return hold

        monkeypatch.setattr(steps._lease, "open_step" if atomic else "record", answer_lost)
        with pytest.raises(StoreUnavailable):
            current_operation.step("charge", runs.append, 1, atomic=atomic)
        current_operation.step("charge", runs.append, 1, atomic=atomic)
        return {}, 201

    add(view)
    assert world.post().status_code == 201
    assert runs == [1]
