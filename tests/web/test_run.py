"""``Idempotency.run``: the same guarantee outside of requests.

In a queue's worker, too, whose exceptions say more than that a job failed.
"""

import asyncio
import functools
import types
from functools import partial

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery.exceptions import Ignore, Reject, Retry
from flask_sqlalchemy import SQLAlchemy
from rq.timeouts import JobTimeoutException

from flask_idempotency import (
    ConfigurationError,
    IdempotencyError,
    KeyMalformed,
    KeyReused,
    OperationFailed,
    OperationInterrupted,
    Retryable,
    ScopeUnknown,
    after_commit,
    current_operation,
)
from flask_idempotency.core.errors import RecordBroken

KINDS = pytest.mark.parametrize("atomic", [True, False])


@pytest.fixture
def world(make_world, probing_at_once):
    world = make_world(PROPAGATE_EXCEPTIONS=False)
    with world.app.app_context():
        yield world


@pytest.fixture
def pay(world):
    """A function that writes a payment, commits, and returns its id; counts its runs."""

    def pay(amount=5):
        pay.runs += 1
        payment = world.Payment(amount=amount)
        world.db.session.add(payment)
        world.db.session.commit()
        return {"id": payment.id, "attempt": current_operation.attempt}

    pay.runs = 0
    return pay


@pytest.fixture
def run(world):
    return partial(world.idempotency.run, name="pay", scope="alice")


def test_it_runs_once_and_gives_the_same_result(world, run, pay):
    assert [run("key", pay, 7) for _ in range(2)] == [{"id": 1, "attempt": 1}] * 2
    assert world.sql("select amount from payment") == [(7,)]
    assert run("key", pay, scope="bob")["id"] == 2
    for number, key in enumerate(["Ä 1", "\n", "\ud800", "k" * 10_000], 3):  # any text of any length
        assert run(key, pay)["id"] == run(key, pay)["id"] == number
    for result in None, 0, "", [], "text", {"a": [1.5, None]}:  # any JSON
        assert [run(repr(result), lambda result=result: result) for _ in range(2)] == [result] * 2


def test_what_raises_or_is_no_json_is_rolled_back_and_may_run_again(world, run, pay):
    with pytest.raises(LookupError):
        run("key", lambda: (pay(), {}["x"]))
    with pytest.raises(IdempotencyError, match="not JSON"):
        run("key", lambda: pay() and object())
    assert world.count() == 0
    assert run("key", pay)["attempt"] == 3


@pytest.mark.parametrize("expires", [True, False], ids=["expires", "stays"])
def test_what_is_rolled_back_is_not_remembered_by_the_next_job(make_world, expires):
    world = make_world(db=SQLAlchemy(session_options={"expire_on_commit": expires}))

    def spend(fails):
        account.amount -= 10
        world.db.session.commit()
        return {}["x"] if fails else None

    with world.app.app_context():
        account = world.Payment(id=1, amount=100)
        world.db.session.add(account)
        world.db.session.commit()
        run = partial(world.idempotency.run, name="spend", scope=None)
        with pytest.raises(LookupError):
            run("a", spend, True)
        run("b", spend, False)
    assert world.sql("select amount from payment") == [(90,)]


def test_another_payload_is_another_request(run, pay):
    run("key", pay, payload={"a": 1, "b": [2]})
    run("key", pay, payload={"b": [2], "a": 1})
    for other in {"a": 1}, None:
        with pytest.raises(KeyReused):
            run("key", pay, payload=other)
    assert pay.runs == 1


def test_what_became_of_an_interrupted_one_may_be_found_out_or_stay_unknown(run):
    def dies():
        raise KeyboardInterrupt if current_operation.attempt == 1 else OperationInterrupted("silent")

    run = partial(run, "key", dies, atomic=False)
    with pytest.raises(KeyboardInterrupt):
        run()
    with pytest.raises(Retryable, match="The outcome is not known yet"):
        run(on_interrupted="retry")
    found = run(on_interrupted=lambda _operation: {"found": True})
    assert found == run() == {"found": True}


def named():
    return 1


async def coroutine():
    return 1


class Shop:
    def method(self):
        return 1

    @classmethod
    def of_the_class(cls):
        return 1


class Branch(Shop):
    pass


def test_a_function_has_one_name_however_it_is_reached(world):
    """By another name for it, an instance, its class or a subclass, a decorator or a cache."""
    reached = {
        "named": [named, functools.wraps(named)(lambda: 1), functools.lru_cache(named)],
        "Shop.method": [Shop().method, Branch().method],
        "Shop.of_the_class": [Shop.of_the_class, Branch.of_the_class, Shop().of_the_class],
    }
    for name, functions in reached.items():
        for function in functions:
            world.idempotency.run(name, function, scope=None)
    assert [r.name for r in world.records()] == [f"{__name__}.{name}" for name in reached]


def test_a_function_whose_name_depends_on_the_process_needs_a_name(world):
    """The script defines it as __main__.pay; a worker that imports the script knows it as shop.pay."""
    modules = [{"__name__": name} for name in ("__main__", "__mp_main__", "<run_path>")]
    nameless = [types.FunctionType(named.__code__, each) for each in (*modules, {})]
    for pay in *nameless, lambda: 1, partial(named):
        with pytest.raises(ConfigurationError, match="name="):
            world.idempotency.run("key", pay, scope=None)
        assert world.idempotency.run("key", pay, scope=None, name="pay") == 1


WRONG = [
    ({"scope": ...}, ConfigurationError, "needs scope="),
    ({"scope": ""}, ScopeUnknown, "a known account"),
    ({"required": False}, ConfigurationError, "required is not an option; there are: ttl"),
    ({"payload": object()}, ConfigurationError, "payload"),
    ({"lease": 5}, ConfigurationError, "atomic=False"),
    ({"function": coroutine}, ConfigurationError, "async def"),
    *(({"key": key}, KeyMalformed, "not a string") for key in ("", None, 5)),
]


def test_wrong_arguments_are_named(world):
    for wrong, error, said in WRONG:
        arguments = {"key": "key", "function": named, "scope": "alice", **wrong}
        with pytest.raises(error, match=said):
            world.idempotency.run(arguments.pop("key"), arguments.pop("function"), **arguments)
    assert world.records() == []


def test_one_tenant_needs_no_scope_and_switched_off_it_just_runs(make_world):
    runs = []
    for config in {}, {"IDEMPOTENCY_ENABLED": False}:
        world = make_world(init={"scope": None}, **config)
        with world.app.app_context():
            for _ in range(2):
                world.idempotency.run("key", lambda: runs.append(1), name="pay")
    assert runs == [1] * 3


def test_a_view_that_calls_it_is_no_replay_and_no_rejection(app, world, run, pay, heard):
    @app.post("/hook")
    def hook():
        with pytest.raises((LookupError, OperationFailed)):
            run("c", lambda: {}["x"], atomic=False)
        return run("key", pay)

    heard.clear()
    first, second = world.post("/hook", key=None), world.post("/hook", key=None)
    assert first.json == second.json
    assert "Cache-Control" not in f"{first.headers}{second.headers}"
    assert "operation_rejected" not in [name for name, _ in heard]
    assert pay.runs == 1


@pytest.mark.parametrize("body", [b"[" * 200_000 + b"]" * 200_000, b"1" * 5000, b"\xff", b""])
def test_a_result_that_somebody_else_wrote_is_refused_by_name(world, run, pay, heard, body):
    run("key-1", pay)
    for status, written, error in (
        *((status, body, RecordBroken) for status in (200, 500, 99)),
        (500, b"[]", OperationFailed),
    ):
        heard.clear()
        world.sql("update idempotency_record set body = :body, status = :st", body=written, st=status)
        with pytest.raises(error):
            run("key-1", pay)
        if status == 99:
            assert [event.problem for _, event in heard] == ["record-unreadable"]
    assert pay.runs == 1


@KINDS
@pytest.mark.parametrize("fails", [True, False])
def test_what_was_asked_for_after_the_commit_follows_a_success_alone(world, run, pay, atomic, fails):
    seen = []

    def job():
        pay()
        after_commit(lambda: seen.append(world.records()[0].state))
        return {}["x"] if fails else None

    for _ in range(2):
        with pytest.raises((LookupError, OperationFailed)) if fails else world.app.app_context():
            run("key", job, atomic=atomic)
    assert seen == ([] if fails else ["completed"])


def of(module, name, base=Exception, **attributes):
    """A class as the package has it, which is not installed for these tests."""
    return type(name, (base,), {"__module__": module, **attributes})


ENDS = {
    # What stops a function in its middle: nobody knows whether its effect happened.
    "held": [
        SoftTimeLimitExceeded(),
        JobTimeoutException(),
        of("rq.exceptions", "ShutDownImminentException")(),
        of("huey.exceptions", "TaskTimeout")(),
        asyncio.CancelledError(),  # as dramatiq's, no Exception
    ],
    # What a function raises that asks to be run again.
    "free": [
        Retry(),
        Reject(requeue=True),
        of("dramatiq.errors", "Retry")(),
        of("huey.exceptions", "RetryTask")(),
        of("huey.exceptions", "CancelExecution", retry=True)(),
        of("arq.worker", "Retry", RuntimeError)(),
    ],
    "failed": [
        LookupError("secret"),
        Ignore(),
        Reject(requeue=False),
        of("huey.exceptions", "CancelExecution", retry=None)(),
        of("shop.errors", "Retry")(),
    ],
}


def job(calls, error):
    """Two steps, with ``error`` between them in the first attempt."""
    current_operation.step("first", calls.append, "first")
    if current_operation.attempt == 1 and error is not None:
        raise error
    current_operation.step("second", calls.append, "second")
    return current_operation.attempt


@pytest.mark.parametrize(
    ("error", "end"), [(error, end) for end, errors in ENDS.items() for error in errors], ids=str
)
def test_what_a_function_raises_in_a_queue_holds_it_frees_it_or_is_stored(run, error, end):
    calls, run = [], partial(run, "key", job, atomic=False)
    with pytest.raises(type(error)):
        run(calls, error)
    if end == "failed":
        with pytest.raises(OperationFailed, match=f"failed with {type(error).__name__}") as told:
            run(calls, error)
        assert "secret" not in str(told.value)
        assert calls == ["first"]
        return
    if end == "held":
        with pytest.raises(OperationInterrupted):
            run(calls, error)
    retry = {"on_interrupted": "retry"} if end == "held" else {}
    assert run(calls, error, **retry) == 2
    assert calls == ["first", "second"]
