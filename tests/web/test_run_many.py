"""``Idempotency.run_many``: many items in one call, each with a key of its own."""

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from uuid import UUID, uuid4

import celery.exceptions
import pytest
import sqlalchemy as sa
from flask import abort, jsonify, request
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import (
    ConfigurationError,
    IdempotencyError,
    KeyExpired,
    KeyMalformed,
    KeyReused,
    NotAtomic,
    OperationInterrupted,
    RequestInProgress,
    ScopeUnknown,
    StoreUnavailable,
    after_commit,
    current_operation,
    idempotent,
    operation_rejected,
)
from flask_idempotency.core.errors import SealBroken
from tests.drivers import EACH
from tests.killed import Killed
from tests.stores import BOTH


@pytest.fixture
def world(make_world):
    world = make_world(IDEMPOTENCY_PROBE_AFTER=0)
    with world.app.app_context():
        yield world


@pytest.fixture
def pay(world):
    """Writes a payment and commits; what the payload says may go wrong then."""

    def pay(payload):
        pay.runs.append(payload)
        payment = world.Payment(amount=payload["amount"], note=payload.get("note"))
        world.db.session.add(payment)
        if payload.get("commit", True):
            world.db.session.commit()
        match payload.get("then"):
            case "raise":
                raise LookupError("secret")
            case "abort":
                abort(404)
            case "fail":
                world.db.session.execute(sa.text("select 1 / 0"))
            case "no json":
                return object()
        return {"amount": payload["amount"], "attempt": current_operation.attempt}

    pay.runs = []
    return pay


@pytest.fixture
def run_many(world, pay):
    return functools.partial(world.idempotency.run_many, function=pay, name="pay", scope="alice")


def items(*amounts, **more):
    return [(f"key-{amount}", {"amount": amount, **more}) for amount in amounts]


def outcomes(results):
    return [result.outcome for result in results]


def amounts(world):
    return [amount for (amount,) in world.sql("select amount from payment order by 1")]


@EACH
@BOTH
def test_each_runs_once_and_gives_the_same_result(world, run_many, pay):
    first = run_many(items(1, 2, 3))
    assert [result.result for result in first] == [
        {"amount": amount, "attempt": 1} for amount in (1, 2, 3)
    ]
    assert outcomes(first) == ["executed"] * 3
    again = run_many(items(3, 4, 1))
    assert outcomes(again) == ["replayed", "executed", "replayed"]
    assert [result.result["amount"] for result in again] == [3, 4, 1]
    assert [result.key for result in again] == ["key-3", "key-4", "key-1"]
    assert amounts(world) == [1, 2, 3, 4]
    assert len(pay.runs) == 4


@EACH
@pytest.mark.parametrize("then", ["raise", "abort", "fail", "no json"])
@pytest.mark.parametrize("commit", [True, False], ids=["committed", "left"])
def test_one_that_fails_is_undone_alone_and_may_run_again(world, run_many, then, commit):
    bad = items(2, then=then, commit=commit)
    results = run_many([*items(1), *bad, *items(3)])
    assert outcomes(results) == ["executed", "failed", "executed"]
    assert amounts(world) == [1, 3]
    assert [result.status for result in results] == [200, 404 if then == "abort" else 500, 200]
    repeated = run_many([*items(1), *bad])
    assert outcomes(repeated) == ["replayed", "failed"]
    world.db.session.rollback()
    assert amounts(world) == [1, 3]


@EACH
def test_one_that_has_failed_runs_again_as_the_next_attempt(world, run_many, pay):
    flag = {"then": "raise"}

    def sometimes(payload):
        return pay({**payload, **flag})

    assert outcomes(run_many(items(1, 2), function=sometimes)) == ["failed"] * 2
    flag.clear()
    results = run_many(items(2, 1), function=sometimes)
    assert [result.result for result in results] == [
        {"amount": amount, "attempt": 2} for amount in (2, 1)
    ]
    assert amounts(world) == [1, 2]


@EACH
def test_what_a_function_does_not_commit_is_committed_with_its_item(world, run_many):
    assert outcomes(run_many(items(1, 2, commit=False))) == ["executed"] * 2
    world.db.session.rollback()
    assert amounts(world) == [1, 2]


@EACH
def test_what_the_database_refuses_fails_alone(world, run_many):
    results = run_many([
        *items(1, note="a"), *items(2, note="a"), *items(3, note="a", commit=False),
        *items(4, note="b", commit=False),
    ])  # fmt: skip
    assert outcomes(results) == ["executed", "failed", "failed", "executed"]
    assert isinstance(results[1].error, sa.exc.IntegrityError)
    assert amounts(world) == [1, 4]


def test_an_item_is_the_same_operation_as_a_single_run(world, run_many, pay):
    run = functools.partial(world.idempotency.run, name="pay", scope="alice")
    payload = {"amount": 1}
    assert run("key-1", pay, payload, payload=payload) == {"amount": 1, "attempt": 1}
    assert outcomes(run_many(items(1, 2))) == ["replayed", "executed"]
    assert run("key-2", pay, {"amount": 2}, payload={"amount": 2}) == {"amount": 2, "attempt": 1}
    with pytest.raises(KeyReused):
        run("key-2", pay, payload, payload=payload)
    assert amounts(world) == [1, 2]


def test_another_payload_is_a_mismatch(world, run_many):
    run_many(items(1))
    [result, other] = run_many([("key-1", {"amount": 2}), *items(3)])
    assert (result.outcome, result.status) == ("mismatch", 422)
    assert isinstance(result.error, KeyReused)
    assert other.outcome == "executed"
    assert amounts(world) == [1, 3]


def test_a_failed_item_keeps_its_payload(run_many):
    run_many(items(1, then="raise"))
    assert outcomes(run_many(items(1))) == ["mismatch"]


def test_the_same_key_twice_in_one_call(world, run_many):
    results = run_many([*items(1), *items(1), ("key-1", {"amount": 2}), *items(3, then="raise") * 2])
    assert outcomes(results) == ["executed", "replayed", "mismatch", "failed", "failed"]
    assert results[1].result == results[0].result
    assert amounts(world) == [1]


def test_scopes_and_namespaces_do_not_meet(world, run_many):
    for more in {}, {"scope": "bob"}, {"namespace": "v2"}, {"name": "other"}:
        assert outcomes(run_many(items(1), **more)) == ["executed"]
    assert amounts(world) == [1] * 4


def test_no_items(world, run_many):
    assert run_many([]) == []
    assert world.sql("select count(*) from idempotency_record") == [(0,)]


def test_the_first_result_is_decoded_json_like_the_others(run_many):
    for _ in range(2):
        [result] = run_many([("a", 1)], function=lambda _: {1: (2, 3)})
        assert result.result == {"1": [2, 3]}


def test_any_json_comes_back(run_many):
    values = [None, 0, "", [], "text", {"a": [1.5, None]}]
    pairs = [(str(number), value) for number, value in enumerate(values)]
    for outcome in "executed", "replayed":
        results = run_many(pairs, function=lambda payload: payload)
        assert [result.result for result in results] == values
        assert {*outcomes(results)} == {outcome}


class TestInAnOperation:
    """In a view with a key for the whole call."""

    @pytest.fixture
    def client(self, world, pay):
        @world.app.post("/batch")
        @idempotent
        def batch():
            body = request.get_json()
            if body.get("before"):
                world.db.session.add(world.Payment(amount=body["before"]))
            results = world.idempotency.run_many(
                [(each["key"], each) for each in body["items"]], pay, name="pay"
            )
            if "status" in body:
                abort(body["status"])
            if body.get("after"):
                world.db.session.add(world.Payment(amount=body["after"]))
                world.db.session.commit()
            rows = [{"outcome": each.outcome, "status": each.status} for each in results]
            return jsonify(rows), 207

        return world.app.test_client()

    @staticmethod
    def post(client, key, *each, user="alice", **more):
        body = {"items": [{"key": f"key-{amount}", "amount": amount} for amount in each], **more}
        headers = {"Idempotency-Key": key, "X-User": user}
        return client.post("/batch", json=body, headers=headers)

    @EACH
    @BOTH
    def test_the_whole_call_replays(self, world, client, pay):
        first = self.post(client, "call", 1, 2)
        assert first.status_code == 207
        assert [each["outcome"] for each in first.json] == ["executed"] * 2
        again = self.post(client, "call", 1, 2)
        assert again.headers["Idempotent-Replayed"] == "true"
        assert again.data == first.data
        assert len(pay.runs) == 2

    @EACH
    def test_another_call_finds_the_items(self, world, client):
        self.post(client, "call", 1, 2)
        again = self.post(client, "other", 2, 3)
        assert [each["outcome"] for each in again.json] == ["replayed", "executed"]
        assert amounts(world) == [1, 2, 3]

    def test_another_account_has_items_of_its_own(self, world, client):
        self.post(client, "call", 1)
        bobs = self.post(client, "call", 1, user="bob")
        assert [each["outcome"] for each in bobs.json] == ["executed"]
        assert amounts(world) == [1, 1]

    @EACH
    def test_what_is_written_before_and_after_commits_with_them(self, world, client):
        assert self.post(client, "call", 1, before=10, after=20).status_code == 207
        assert amounts(world) == [1, 10, 20]

    @EACH
    def test_if_the_call_is_rolled_back_so_are_they(self, world, client):
        assert self.post(client, "call", 1, before=10, status=500).status_code == 500
        assert amounts(world) == []
        again = self.post(client, "other", 1)
        assert [each["outcome"] for each in again.json] == ["executed"]
        assert amounts(world) == [1]

    @EACH
    def test_the_view_can_go_on_after_a_failed_item(self, world, client):
        body = [{"key": "a", "amount": 1, "then": "fail"}, {"key": "b", "amount": 2}]
        response = client.post(
            "/batch",
            json={"items": body, "before": 10, "after": 20},
            headers={"Idempotency-Key": "call", "X-User": "alice"},
        )
        assert [each["outcome"] for each in response.json] == ["failed", "executed"]
        assert amounts(world) == [2, 10, 20]


@EACH
def test_a_key_of_an_earlier_call_in_the_same_operation_has_its_result(world, run_many, pay):
    def view():
        first = run_many([*items(1, 2), *items(3, then="raise")])
        second = run_many([*items(2, 4), ("key-1", {"amount": 9}), *items(3, then="raise")])
        assert outcomes(run_many(items(2))) == ["replayed"]
        assert second[0].result == first[1].result
        return [outcomes(first), outcomes(second)]

    assert world.idempotency.run("k", view, name="view", scope=None) == [
        ["executed", "executed", "failed"],
        ["replayed", "executed", "mismatch", "failed"],
    ]
    assert amounts(world) == [1, 2, 4]
    assert outcomes(run_many(items(1, 2, 4))) == ["replayed"] * 3


@EACH
@BOTH
def test_while_the_view_goes_on_after_its_items_they_are_in_progress(app, world, run_many, pay):
    """Whoever meets them does not wait for the view."""
    done, go_on = threading.Event(), threading.Event()

    def view():
        found = outcomes(run_many(items(1, 2)))
        done.set()
        assert go_on.wait(10)
        return found

    def elsewhere():
        with app.app_context():
            return world.idempotency.run("k", view, name="view", scope=None)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(elsewhere)
        assert done.wait(10)
        assert outcomes(run_many(items(2, 3))) == ["in_progress", "executed"]
        go_on.set()
        assert first.result() == ["executed"] * 2
    assert outcomes(run_many(items(1, 2, 3))) == ["replayed"] * 3


def test_an_item_that_is_the_call_itself_is_refused(world, run_many):
    def view():
        return len(run_many([*items(1), ("k", {"amount": 2})]))

    with pytest.raises(ConfigurationError, match="the operation pay itself"):
        world.idempotency.run("k", view, name="pay", scope="alice")
    assert amounts(world) == []


def test_no_items_in_an_operation(world, run_many):
    assert world.idempotency.run("k", lambda: run_many([]), name="view", scope=None) == []


@EACH
@pytest.mark.parametrize("fails", [True, False])
def test_savepoints_of_the_connection_in_an_item_are_undone_with_it(world, run_many, fails):
    def pay(payload):
        connection = current_operation.connection
        connection.execute(sa.insert(world.Payment.__table__), {"amount": payload})
        with suppress(LookupError), connection.begin_nested():
            connection.execute(sa.insert(world.Payment.__table__), {"amount": payload + 10})
            raise LookupError
        connection.begin_nested()  # nobody ends it
        connection.execute(sa.insert(world.Payment.__table__), {"amount": payload + 20})
        if fails and payload == 2:
            raise LookupError

    results = run_many([(str(number), number) for number in (1, 2, 3)], function=pay)
    assert outcomes(results) == ["executed", "failed" if fails else "executed", "executed"]
    assert amounts(world) == ([1, 3, 21, 23] if fails else [1, 2, 3, 21, 22, 23])


@EACH
@BOTH
def test_who_comes_at_the_same_time_is_told_so(app, world, run_many, pay):
    inside, go_on = threading.Event(), threading.Event()

    def slow(payload):
        inside.set()
        assert go_on.wait(10)
        return pay(payload)

    def elsewhere():
        with app.app_context():
            return run_many(items(1, 2), function=slow)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(elsewhere)
        assert inside.wait(10)
        here = run_many(items(2, 3))
        with pytest.raises(RequestInProgress):
            world.idempotency.run("key-1", pay, name="pay", scope="alice", payload={"amount": 1})
        go_on.set()
        assert outcomes(first.result()) == ["executed"] * 2
    assert outcomes(here) == ["in_progress", "executed"]
    assert (here[0].status, type(here[0].error)) == (409, RequestInProgress)
    assert outcomes(run_many(items(1, 2, 3))) == ["replayed"] * 3
    assert amounts(world) == [1, 2, 3]


@EACH
def test_calls_with_overlapping_items_race(app, world, run_many):
    """In any order of their items, many times: each item is paid once."""
    workers, rounds = 4, 8
    barrier = threading.Barrier(workers)

    def call(worker, number):
        mine = items(*range(number * 10, number * 10 + 10))
        barrier.wait()
        with app.app_context():
            return outcomes(run_many(mine if worker % 2 else mine[::-1]))

    found = set()
    with ThreadPoolExecutor(workers) as pool:
        for number in range(rounds):
            results = list(pool.map(call, range(workers), [number] * workers))
            assert sum(each.count("executed") for each in results) == 10
            found.update(*results)
    assert found <= {"executed", "in_progress", "replayed"}
    assert len(found) > 1
    assert amounts(world) == [*range(rounds * 10)]


@EACH
def test_more_calls_at_once_than_there_are_connections_to_claim_on(app, world, run_many):
    workers = 16
    barrier = threading.Barrier(workers)

    def call(worker):
        with app.app_context():
            results = []
            for number in range(10):
                barrier.wait()
                first = worker * 1000 + number * 10
                results += outcomes(run_many(items(*range(first, first + 10))))
            return results

    with ThreadPoolExecutor(workers) as pool:
        assert list(pool.map(call, range(workers))) == [["executed"] * 100] * workers


@EACH
def test_a_single_run_and_many_race(app, world, run_many, pay):
    barrier = threading.Barrier(2)

    def single(number):
        payload = {"amount": number}
        barrier.wait()
        with app.app_context():
            try:
                world.idempotency.run(
                    f"key-{number}", pay, payload, name="pay", scope="alice", payload=payload
                )
            except RequestInProgress:
                return "in_progress"
            return "done"

    def many(number):
        barrier.wait()
        with app.app_context():
            return outcomes(run_many(items(number)))

    with ThreadPoolExecutor(2) as pool:
        for number in range(60):
            both = pool.submit(single, number), pool.submit(many, number)
            assert any(each.result() not in ("in_progress", ["in_progress"]) for each in both)
    assert amounts(world) == [*range(60)]


@EACH
def test_who_claims_an_item_that_was_done_before_its_lock_finds_it_done(app, world, run_many, pay):
    """A claim is committed, another call takes the row over and completes it, then comes the lock."""
    run_many(items(1, then="raise"))
    [stale] = [record for record in world.records() if record.name == "pay"]
    assert outcomes(run_many(items(1, then="raise"), function=lambda _: "done")) == ["executed"]
    lock = "select 1 from idempotency_record where owner = '{}' for update skip locked"
    assert world.sql(lock.format(stale.owner)) == []
    payload = {"amount": 1, "then": "raise"}
    run = functools.partial(world.idempotency.run, name="pay", scope="alice")
    assert run("key-1", pay, payload, payload=payload) == "done"
    assert len(pay.runs) == 1


def test_an_expired_item_begins_anew(world, run_many):
    run_many(items(1))
    world.sql("update idempotency_record set expires_at = now() - interval '1 second'")
    [result] = run_many([("key-1", {"amount": 2})])
    assert result.result == {"amount": 2, "attempt": 1}


def test_a_leased_operation_of_the_same_name_is_left_alone(world, run_many, pay):
    run = functools.partial(world.idempotency.run, name="pay", scope="alice", atomic=False)

    class Stop(BaseException):
        pass

    def dies(_payload):
        raise Stop

    with pytest.raises(Stop):
        run("key-1", dies, None, payload={"amount": 1})
    [result] = run_many(items(1))
    assert isinstance(result.error, OperationInterrupted)
    assert (result.outcome, result.status) == ("failed", 409)


def uuid7(age_seconds, tail):
    return f"{round((time.time() - age_seconds) * 1000) << 80 | 7 << 76 | 2 << 62 | tail:032x}"


@EACH
class TestOldKeys:
    @pytest.fixture
    def world(self, make_world):
        world = make_world(IDEMPOTENCY_REFUSE_OLD_KEYS=True, IDEMPOTENCY_TTL=600)
        with world.app.app_context():
            yield world

    def test_an_item_whose_record_is_forgotten_does_not_run_again(self, world, run_many, pay):
        old, young = str(UUID(uuid7(700, 1))), str(UUID(uuid7(500, 2)))
        pairs = [(old, {"amount": 1}), (young, {"amount": 2}), ("no birth", {"amount": 3})]
        results = run_many(pairs)
        assert outcomes(results) == ["failed", "executed", "executed"]
        assert (results[0].status, type(results[0].error)) == (409, KeyExpired)
        assert amounts(world) == [2, 3]
        assert outcomes(run_many(pairs)) == ["failed", "replayed", "replayed"]
        # Its birth alone is too old: the record is there.
        world.sql("update idempotency_record set created_at = created_at - interval '550 seconds'")
        assert outcomes(run_many(pairs[1:])) == ["replayed"] * 2

    def test_one_that_is_ahead_is_remembered_longer(self, world, run_many):
        run_many([(str(UUID(uuid7(-3600, 1))), {"amount": 1}), ("no birth", {"amount": 3})])
        found = world.sql(
            "select round(extract(epoch from expires_at - created_at) / 60) from idempotency_record"
            " where name = 'pay' order by 1"
        )
        assert [int(minutes) for (minutes,) in found] == [10, 75]


class TestInsideTheFunction:
    def test_the_operation_is_the_items(self, world, run_many):
        def look(payload):
            connection = current_operation.connection
            connection.execute(sa.insert(world.Payment.__table__), {"amount": payload})
            return [current_operation.key, current_operation.scope, current_operation.derive_key("a")]

        results = run_many([("a", 1), ("b", 2)], function=look)
        assert [result.result[:2] for result in results] == [["a", "alice"], ["b", "alice"]]
        assert len({result.result[2] for result in results}) == 2
        assert amounts(world) == [1, 2]

    def test_after_commit_waits_for_all_and_forgets_what_failed(self, world, run_many, pay):
        called = []

        def function(payload):
            after_commit(functools.partial(called.append, payload["amount"]))
            assert not called
            return pay(payload)

        run_many([*items(1), *items(2, then="raise"), *items(3)], function=function)
        assert called == [1, 3]

    def test_a_nested_transaction_is_undone_alone(self, world, run_many, pay):
        def function(payload):
            with pytest.raises(LookupError), world.db.session.begin_nested():
                pay({**payload, "commit": False, "then": "raise"})
            return pay({**payload, "amount": payload["amount"] + 10})

        assert outcomes(run_many(items(1, 2), function=function)) == ["executed"] * 2
        assert amounts(world) == [11, 12]

    def test_a_second_operation_is_refused(self, world, run_many):
        def function(payload):
            return world.idempotency.run("k", lambda: 1, name="x", scope=None)

        [result] = run_many(items(1), function=function)
        assert "inside the operation" in str(result.error)

    def test_itself_is_refused(self, world, run_many):
        def function(_payload):
            return len(run_many(items(2)))

        [result] = run_many(items(1), function=function)
        assert "another run_many()" in str(result.error)
        assert amounts(world) == []

    @EACH
    def test_a_commit_as_text_undoes_all(self, world, run_many, pay):
        def function(payload):
            pay(payload)
            if payload["amount"] == 2:
                world.db.session.execute(sa.text("COMMIT"))

        with pytest.raises(NotAtomic):
            run_many(items(1, 2, 3), function=function)
        assert amounts(world) == []
        assert len(pay.runs) == 2

    @EACH
    def test_a_lost_connection_undoes_all(self, world, run_many, pay):
        def function(payload):
            pay(payload)
            if payload["amount"] == 2:
                world.db.session.execute(sa.text("select pg_terminate_backend(pg_backend_pid())"))

        with pytest.raises(StoreUnavailable):
            run_many(items(1, 2, 3), function=function)
        assert amounts(world) == []
        assert outcomes(run_many(items(1, 2, 3))) == ["executed"] * 3

    @EACH
    def test_records_that_are_gone_at_the_end_undo_all(self, world, run_many, pay):
        def function(payload):
            pay(payload)
            world.db.session.execute(sa.text("delete from idempotency_record where name = 'pay'"))
            world.db.session.commit()

        with pytest.raises(NotAtomic):
            run_many(items(1, 2), function=function)
        assert amounts(world) == []

    def test_what_a_queue_raises_to_stop_a_job_undoes_all(self, world, run_many, pay):
        def function(payload):
            pay(payload)
            if payload["amount"] == 2:
                raise celery.exceptions.Retry

        with pytest.raises(celery.exceptions.Retry):
            run_many(items(1, 2, 3), function=function)
        assert amounts(world) == []


def test_what_an_item_changed_is_not_remembered_once_it_is_undone(make_world):
    world = make_world(db=SQLAlchemy(session_options={"expire_on_commit": False}))

    def spend(payload):
        account = world.db.session.get(world.Payment, 1)
        account.amount -= payload
        world.db.session.commit()
        if payload == 50:
            raise LookupError
        return account.amount

    with world.app.app_context():
        world.db.session.add(world.Payment(id=1, amount=100))
        world.db.session.commit()
        pairs = [("a", 10), ("b", 50), ("c", 20)]
        results = world.idempotency.run_many(pairs, spend, name="spend", scope=None)
    assert [result.result for result in results] == [90, None, 70]
    assert amounts(world) == [70]


def test_a_savepoint_of_the_connection_afterwards_can_be_rolled_back(world, run_many):
    def view():
        run_many(items(1))
        nested = current_operation.connection.begin_nested()
        current_operation.connection.execute(sa.insert(world.Payment.__table__), {"amount": 2})
        nested.rollback()

    world.idempotency.run("k", view, name="view", scope=None)
    assert amounts(world) == [1]


@EACH
@pytest.mark.parametrize("stop", [Killed, SystemExit, "celery"])
def test_what_stops_the_call_and_is_caught_leaves_what_has_finished(world, run_many, pay, stop):
    """A time limit, for example: the view goes on, and commits."""
    if stop == "celery":
        stop = celery.exceptions.SoftTimeLimitExceeded

    def function(payload):
        result = pay(payload)
        if payload["amount"] == 2:
            raise stop
        return result

    def view():
        with pytest.raises(stop):
            run_many(items(1, 2, 3), function=function)

    world.idempotency.run("k", view, name="view", scope=None)
    assert amounts(world) == [1]
    assert outcomes(run_many(items(1, 2, 3))) == ["replayed", "executed", "executed"]
    assert amounts(world) == [1, 2, 3]


@EACH
def test_a_result_that_cannot_be_read_fails_alone(make_world):
    world, problems = make_world(IDEMPOTENCY_ENCRYPTION_KEYS=[b"k" * 32]), []

    def pay(payload):
        world.db.session.add(world.Payment(amount=payload))
        return payload

    with world.app.app_context():
        run_many = functools.partial(world.idempotency.run_many, name="pay", scope=None)
        run_many([("a", 1), ("b", 2)], pay)
        world.sql("update idempotency_record set body = 'x' where name = 'pay' and attempt = 1")
        with operation_rejected.connected_to(
            lambda _app, event: problems.append(event.problem), world.app
        ):
            results = run_many([("c", 3), ("a", 1), ("d", 4)], pay)
    assert outcomes(results) == ["executed", "failed", "executed"]
    assert isinstance(results[1].error, SealBroken)
    assert problems == ["record-unreadable"]
    assert amounts(world) == [1, 2, 3, 4]


@EACH
@pytest.mark.parametrize("local", ["", "LOCAL "])
@pytest.mark.parametrize("where", ["before", "in an item"])
def test_a_role_that_may_not_use_the_records(world, run_many, local, where):
    role = f"nobody_{uuid4().hex}"
    world.sql(f"create role {role}")
    world.sql(f"grant insert, select on payment to {role}")
    world.sql(f"grant usage on sequence payment_id_seq to {role}")

    def become():
        world.db.session.execute(sa.text(f"SET {local}ROLE {role}"))

    def role_now():
        return world.db.session.scalar(sa.text("select current_user"))

    def pay(payload):
        if where == "in an item":
            become()
        world.db.session.execute(sa.insert(world.Payment.__table__), {"amount": payload})
        return role_now() == role

    def view():
        if where == "before":
            become()
            if not local:
                world.db.session.commit()
        results = run_many([(str(number), number) for number in (1, 2)], function=pay)
        assert outcomes(results) == ["executed"] * 2
        return [result.result for result in results]

    try:
        kept = world.idempotency.run("k", view, name="view", scope=None)
        # SET LOCAL ends with the transaction: here, with the commit of what was written before.
        assert kept == [where == "in an item" or not local] * 2
    finally:
        world.db.session.execute(sa.text("RESET ROLE"))
        world.db.session.commit()
        world.sql(f"drop owned by {role}")
        world.sql(f"drop role {role}")
    assert amounts(world) == [1, 2]


def test_outside_of_an_operation_too_what_was_written_before_is_committed(world, run_many):
    world.db.session.add(world.Payment(amount=10))
    world.db.session.flush()
    assert outcomes(run_many([*items(1), *items(2, then="raise")])) == ["executed", "failed"]
    assert amounts(world) == [1, 10]


class TestEvents:
    def test_each_item_is_told(self, run_many, heard):
        run_many([*items(1), *items(2, then="raise")])
        assert [(name, event.outcome) for name, event in heard if event.operation == "pay"] == [
            ("operation_rolled_back", "rolled_back"),
            ("operation_executed", "executed"),
        ]
        heard.clear()
        run_many([*items(1), ("key-1", 5), *items(3)])
        assert [name for name, event in heard if event.operation == "pay"] == [
            "operation_replayed",
            "operation_rejected",
            "operation_executed",
        ]
        heard.clear()
        run_many([("key-1", {"amount": 7})])
        assert [(name, event.problem) for name, event in heard if event.operation == "pay"] == [
            ("operation_rejected", "key-reused")
        ]


class TestWrongUse:
    def test_items(self, run_many, pay):
        for wrong in None, "text", {"a": 1}, 5:
            with pytest.raises(ConfigurationError, match="allowed: pairs of a key and a payload"):
                run_many(wrong)
        for wrong in "ab", ("a",), ("a", 1, 2), None:
            with pytest.raises(ConfigurationError, match="item 1 is"):
                run_many([("a", 1), wrong])
        for wrong in "", None, 5:
            with pytest.raises(KeyMalformed, match="item 1"):
                run_many([("a", 1), (wrong, 1)])
        with pytest.raises(ConfigurationError, match=r"payload of run_many\(\) is not JSON"):
            run_many([*items(1), ("b", object())])
        assert pay.runs == []

    def test_an_option(self, run_many):
        with pytest.raises(ConfigurationError, match=r"atomic is not an option of run_many\(\)"):
            run_many(items(1), atomic=False)

    def test_a_scope(self, world, pay):
        with pytest.raises(ConfigurationError, match=r"run_many\(\) needs scope"):
            world.idempotency.run_many(items(1), pay, name="pay")
        with pytest.raises(ScopeUnknown):
            world.idempotency.run_many(items(1), pay, name="pay", scope="")

    def test_an_async_function(self, run_many):
        async def function(payload): ...

        with pytest.raises(ConfigurationError, match="async def"):
            run_many(items(1), function=function)

    def test_inside_a_block(self, world, pay, run_many):
        def view():
            with world.db.session.begin_nested():
                run_many(items(1))

        with pytest.raises(IdempotencyError, match="inside begin"):
            world.idempotency.run("k", view, name="view", scope=None)
        assert amounts(world) == []

    @EACH
    @pytest.mark.parametrize("fails", [False, True])
    def test_a_step_with_a_transaction_of_its_own_can(self, world, run_many, fails):
        def step():
            found = outcomes(run_many([*items(1), *items(2, then="raise"), *items(3)]))
            if fails:
                raise LookupError
            return found

        def view():
            return current_operation.step("many", step, atomic=True)

        with suppress(LookupError):
            found = world.idempotency.run("k", view, name="view", scope=None, atomic=False)
            assert found == ["executed", "failed", "executed"]
        assert amounts(world) == ([] if fails else [1, 3])
        again = "executed" if fails else "replayed"
        assert outcomes(run_many(items(1, 3))) == [again] * 2
        assert amounts(world) == [1, 3]

    def test_inside_an_operation_that_is_not_atomic(self, world, run_many):
        with pytest.raises(IdempotencyError, match="which is not atomic"):
            world.idempotency.run(
                "k", lambda: run_many(items(1)), name="view", scope=None, atomic=False
            )

    def test_at_another_level(self, make_world, pay):
        strict = make_world(SQLALCHEMY_ENGINE_OPTIONS={"isolation_level": "REPEATABLE READ"})
        with strict.app.app_context(), pytest.raises(NotAtomic, match="READ COMMITTED"):
            strict.idempotency.run_many(items(1), pay, name="pay", scope=None)


@pytest.mark.parametrize("store", ["redis"], indirect=True)
def test_a_store_that_cannot_hold_many_is_refused(make_world, redis_server):
    world = make_world(IDEMPOTENCY_REDIS_URL=redis_server.url)
    with world.app.app_context(), pytest.raises(ConfigurationError, match="redis"):
        world.idempotency.run_many([("a", 1)], str, name="pay", scope=None)


@pytest.fixture
def other_store(make_world, store, tmp_path):
    sqlite = {"SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path / 'shop.db'}"}
    return make_world(**(sqlite if store == "sql" else {}))


@pytest.mark.parametrize("store", ["sql", "memory"], indirect=True)
class TestOtherStores:
    """For development and for tests."""

    @pytest.fixture
    def world(self, other_store):
        with other_store.app.app_context():
            yield other_store

    def count(self, world):
        return [
            row[0] for row in world.db.session.execute(sa.text("select amount from payment order by 1"))
        ]

    def test_each_runs_once(self, world, run_many, pay):
        assert outcomes(run_many(items(1, 2))) == ["executed"] * 2
        results = run_many([*items(2, 3), ("key-1", {"amount": 9})])
        assert outcomes(results) == ["replayed", "executed", "mismatch"]
        assert results[0].result == {"amount": 2, "attempt": 1}
        assert self.count(world) == [1, 2, 3]

    @pytest.mark.parametrize("then", ["raise", "no json"])
    def test_one_that_fails_is_undone_alone_and_may_run_again(self, world, run_many, pay, then):
        results = run_many([*items(1), *items(2, then=then), *items(3)])
        assert outcomes(results) == ["executed", "failed", "executed"]
        assert self.count(world) == [1, 3]

        def mended(payload):
            return pay({**payload, "then": None})

        [result] = run_many(items(2, then=then), function=mended)
        assert (result.outcome, result.result["amount"], result.result["attempt"]) == ("executed", 2, 2)
        assert self.count(world) == [1, 2, 3]

    def test_what_is_rolled_back_leaves_nothing(self, world, run_many, pay):
        def view():
            run_many(items(1, 2))
            raise LookupError

        with pytest.raises(LookupError):
            world.idempotency.run("k", view, name="view", scope=None)
        assert self.count(world) == []
        assert outcomes(run_many(items(1, 2))) == ["executed"] * 2


def test_results_are_sealed(make_world):
    world = make_world(IDEMPOTENCY_ENCRYPTION_KEYS=[b"k" * 32])
    with world.app.app_context():
        for outcome in "executed", "replayed":
            [result] = world.idempotency.run_many(
                [("a", {"secret": "canary"})], dict, name="pay", scope=None
            )
            assert (result.outcome, result.result) == (outcome, {"secret": "canary"})
    assert all(b"canary" not in bytes(record.body or b"") for record in world.records())


def test_switched_off_each_is_a_transaction_of_its_own(make_world):
    world = make_world(IDEMPOTENCY_ENABLED=False)

    def pay(payload):
        world.db.session.add(world.Payment(amount=payload))
        if payload == 2:
            raise LookupError
        return payload

    with world.app.app_context():
        for _ in range(2):
            results = world.idempotency.run_many([("a", 1), ("b", 2)], pay, name="pay", scope=None)
            assert outcomes(results) == ["executed", "failed"]
    assert amounts(world) == [1, 1]
