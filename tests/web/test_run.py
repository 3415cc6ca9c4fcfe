"""``Idempotency.run``: the same guarantee outside of requests, in queues, and several times at once."""

import asyncio
import functools
import threading
import types
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial
from uuid import UUID

import pytest
import sqlalchemy as sa
from billiard.exceptions import SoftTimeLimitExceeded
from celery.exceptions import Ignore, Reject, Retry
from flask import copy_current_request_context
from rq.timeouts import JobTimeoutException

from flask_idempotency import (
    ConfigurationError,
    IdempotencyError,
    KeyMalformed,
    KeyReused,
    NotAtomic,
    OperationFailed,
    OperationInterrupted,
    ScopeUnknown,
    current_operation,
    idempotent,
)
from flask_idempotency.core.keys import SHOWN, derive_key, hash_key
from tests.conftest import PATIENCE_SECONDS

KINDS = pytest.mark.parametrize("atomic", [True, False])


@pytest.fixture
def world(make_world, probing_at_once):
    return make_world(PROPAGATE_EXCEPTIONS=False)


@pytest.fixture
def context(world):
    with world.app.app_context() as context:
        yield context


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


@pytest.mark.usefixtures("context")
def test_it_runs_once_and_gives_the_same_result(world, run, pay):
    assert [run("key", pay, 7) for _ in range(2)] == [{"id": 1, "attempt": 1}] * 2
    assert world.sql("select amount from payment") == [(7,)]
    assert run("key", pay, scope="bob")["id"] == 2
    for number, key in enumerate(["Ä 1", "\n", "\ud800", "k" * 10_000], 3):  # any text of any length
        assert run(key, pay)["id"] == run(key, pay)["id"] == number
    assert run(UUID(int=7), pay) == run(str(UUID(int=7)), pay)  # as text
    for result in None, 0, "", [], "text", {"a": [1.5, None]}:  # any JSON
        assert [run(repr(result), lambda result=result: result) for _ in range(2)] == [result] * 2


@pytest.mark.usefixtures("context")
def test_what_raises_or_is_no_json_is_rolled_back_and_may_run_again(world, run, pay):
    with pytest.raises(LookupError):
        run("key", lambda: (pay(), {}["x"]))
    with pytest.raises(IdempotencyError, match="not JSON"):
        run("key", lambda: pay() and object())
    assert world.count() == 0
    assert run("key", pay)["attempt"] == 3


@pytest.mark.usefixtures("context")
def test_another_payload_is_another_request(run, pay):
    run("key", pay, payload={"a": 1, "b": [2]})
    run("key", pay, payload={"b": [2], "a": 1})
    for other in {"a": 1}, None:
        with pytest.raises(KeyReused):
            run("key", pay, payload=other)
    assert pay.runs == 1


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


Branch = type("Branch", (Shop,), {})
MODULES = [{"__name__": name} for name in ("__main__", "__mp_main__", "<run_path>")]
NAMELESS = [types.FunctionType(named.__code__, each) for each in (*MODULES, {})]
REACHED = {
    "named": [named, functools.wraps(named)(lambda: 1), functools.lru_cache(named)],
    "Shop.method": [Shop().method, Branch().method],
    "Shop.of_the_class": [Shop.of_the_class, Branch.of_the_class, Shop().of_the_class],
}
"""By another name for it, an instance, its class or a subclass, a decorator or a cache."""


@pytest.mark.usefixtures("context")
def test_a_function_has_one_name_however_it_is_reached_or_needs_one(world):
    """The script defines one as __main__.pay; a worker that imports the script knows it as shop.pay."""
    for name, functions in REACHED.items():
        for function in functions:
            world.idempotency.run(name, function, scope=None)
    assert [r.name for r in world.records()] == [f"{__name__}.{name}" for name in REACHED]
    for nameless in *NAMELESS, lambda: 1, partial(named):
        with pytest.raises(ConfigurationError, match="name="):
            world.idempotency.run("key", nameless, scope=None)
        assert world.idempotency.run("key", nameless, scope=None, name="pay") == 1


WRONG = [
    ({"scope": ...}, ConfigurationError, "needs scope="),
    ({"scope": ""}, ScopeUnknown, "a known account"),
    ({"required": False}, ConfigurationError, "required is not an option; there are: ttl"),
    ({"payload": object()}, ConfigurationError, "payload"),
    ({"lease": 5}, ConfigurationError, "atomic=False"),
    ({"function": coroutine}, ConfigurationError, "async def"),
    ({"key": ""}, KeyMalformed, "must have 1 to 255 characters"),
    *(({"key": key}, KeyMalformed, "neither a string nor an integer") for key in (None, 5.0, True)),
]


@pytest.mark.usefixtures("context")
def test_wrong_arguments_are_named(world):
    for wrong, error, said in WRONG:
        arguments = {"key": "key", "function": named, "scope": "alice", **wrong}
        with pytest.raises(error, match=said):
            world.idempotency.run(arguments.pop("key"), arguments.pop("function"), **arguments)
    assert world.records() == []


@pytest.mark.parametrize("enabled", [True, False])
def test_one_tenant_needs_no_scope_and_switched_off_it_just_runs(make_world, enabled):
    world, runs = make_world(init={"scope": None}, IDEMPOTENCY_ENABLED=enabled), []
    with world.app.app_context():
        for _ in range(2):
            world.idempotency.run("key", lambda: runs.append(1), name="pay")
    assert len(runs) == (1 if enabled else 2)


@KINDS
@pytest.mark.usefixtures("context")
def test_what_its_caller_has_not_committed_is_refused(world, run, atomic):
    session = world.db.session
    for how in (
        lambda: session.execute(sa.insert(world.Payment).values(amount=1)),
        lambda: session.add(world.Payment(amount=1)),
        session.flush,
    ):
        how()
        with pytest.raises(NotAtomic, match="db.session held changes when run"):
            run("key", named, atomic=atomic)
    session.commit()
    assert (run("key", named, atomic=atomic), world.count()) == (1, 2)


def test_a_view_that_calls_it_is_no_replay_and_no_rejection(app, world, run, pay, heard):
    @app.post("/hook")
    def hook():
        with pytest.raises((LookupError, OperationFailed)):
            run("c", lambda: {}["x"], atomic=False)
        return run("key", pay)

    first, second = world.post("/hook", key=None), world.post("/hook", key=None)
    assert first.json == second.json
    assert "Cache-Control" not in f"{first.headers}{second.headers}"
    assert "operation_rejected" not in [name for name, _ in heard]
    assert pay.runs == 1


# In a queue.


def of(module, name, **attributes):
    """An error as the package has it, which is not installed for these tests."""
    return type(name, (Exception,), {"__module__": module, **attributes})()


ENDS = {
    # What stops a function in its middle: nobody knows whether its effect happened.
    "held": [
        SoftTimeLimitExceeded(),
        JobTimeoutException(),
        of("rq.exceptions", "ShutDownImminentException"),
        of("huey.exceptions", "TaskTimeout"),
        asyncio.CancelledError(),  # as dramatiq's, no Exception
    ],
    # What a function raises that asks to be run again.
    "free": [
        Retry(),
        Reject(requeue=True),
        of("dramatiq.errors", "Retry"),
        of("huey.exceptions", "RetryTask"),
        of("huey.exceptions", "CancelExecution", retry=True),
        of("arq.worker", "Retry"),
    ],
    "failed": [
        LookupError("secret"),
        Ignore(),
        Reject(requeue=False),
        of("huey.exceptions", "CancelExecution", retry=None),
        of("shop.errors", "Retry"),
    ],
}


def job(calls, error):
    """Two steps, with ``error`` between them in the first attempt."""
    current_operation.step("first", calls.append, "first")
    if current_operation.attempt == 1:
        raise error
    current_operation.step("second", calls.append, "second")
    return current_operation.attempt


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.usefixtures("context")
def test_what_a_function_raises_in_a_queue_holds_it_frees_it_or_is_stored(run, end):
    for number, error in enumerate(ENDS[end]):
        calls, again = [], partial(run, f"key-{number}", job, atomic=False)
        with pytest.raises(type(error)):
            again(calls, error)
        if end == "failed":
            with pytest.raises(OperationFailed, match=f"failed with {type(error).__name__}") as told:
                again(calls, error)
            assert "secret" not in str(told.value)
            assert calls == ["first"]
            continue
        if end == "held":
            with pytest.raises(OperationInterrupted):
                again(calls, error)
        retry = {"on_interrupted": "retry"} if end == "held" else {}
        assert again(calls, error, **retry) == 2
        assert calls == ["first", "second"]


# Several operations at once in one request, or in one application context: each is its own.

EVENTS = 5


def in_threads(handlers, *args):
    with ThreadPoolExecutor(len(handlers)) as pool:
        return [each.result() for each in [*map(pool.submit, handlers, *args)]]


@KINDS
@pytest.mark.parametrize("has_own_session", [True, False])
@pytest.mark.parametrize("is_copy", [True, False], ids=["copies of the request", "own contexts"])
def test_each_event_of_a_delivery_is_handled_once(world, heard, run, is_copy, has_own_session, atomic):
    barrier, provider = threading.Barrier(EVENTS), []
    keys = {str(event): hash_key("", "pay", "alice", str(event)) for event in range(EVENTS)}
    derived = {event: derive_key(key, "charge") for event, key in keys.items()}

    def charge(event):
        with world.app.app_context() if has_own_session else nullcontext():
            barrier.wait(PATIENCE_SECONDS)
            world.db.session.add(world.Payment(amount=1, note=event))
            world.db.session.commit()
            key = current_operation.derive_key("charge")
            if atomic:
                provider.append(key)
            else:
                current_operation.step("charge", provider.append, key)
            barrier.wait(PATIENCE_SECONDS)
            return [event, current_operation.key, key]

    def handle(event):
        with nullcontext() if is_copy else world.app.app_context():
            return run(event, charge, event, atomic=atomic)

    @world.app.post("/hook")
    def deliver():
        world.db.session.scalar(sa.select(1))  # leaves a transaction open
        copied = copy_current_request_context if is_copy else lambda function: function
        return in_threads([copied(handle) for _ in keys], keys)

    for _ in range(2):
        assert world.post("/hook", key=None).json == [[each, each, derived[each]] for each in keys]
    assert sorted(provider) == sorted(derived.values())
    assert world.sql("select note from payment order by note") == [(each,) for each in keys]
    told = Counter((name, event.id) for name, event in heard if event.outcome is not None)
    names = ("operation_executed", "operation_replayed")
    digits = [key.hex()[:SHOWN] for key in keys.values()]
    assert told == dict.fromkeys(((name, each) for name in names for each in digits), 1)


REFUSED = r"in a thread or task that shares .* `with app.app_context\(\):`"


@KINDS
@pytest.mark.parametrize("is_async", [True, False])
def test_a_thread_that_shares_the_context_of_a_request_is_refused(world, run, atomic, is_async):
    def call():
        with pytest.raises(NotAtomic, match=REFUSED):
            run("thread", pytest.fail, atomic=atomic)
        return ""

    async def async_hook():
        return await asyncio.to_thread(call)

    hook = async_hook if is_async else lambda: in_threads([partial(copy_context().run, call)])[0]
    world.app.add_url_rule("/hook", "hook", hook, methods=["POST"])
    assert world.post("/hook", key=None).status_code == 200
    assert world.records() == []


@KINDS
def test_so_is_one_that_shares_the_context_of_another_run(world, run, background, gate, atomic):
    with world.app.app_context():
        here = copy_context()
        first = background(copy_context().run, partial(run, "first", gate, atomic=atomic))
        gate.wait_until_reached()
        with pytest.raises(NotAtomic, match=REFUSED):
            here.run(run, "thread", pytest.fail, atomic=atomic)
        gate.open()
        first.result()
        assert run("then", lambda: 1, atomic=atomic) == 1


@KINDS
def test_a_copy_of_the_context_is_inside_the_operation_and_a_copy_of_the_request_is_not(
    world, run, atomic
):

    def look():
        return current_operation.key if current_operation else None

    def nested():
        with pytest.raises(IdempotencyError, match="inside the operation view"):
            run("inner", look)
        return look()

    def in_thread():
        return run("of the thread", look, atomic=atomic), look()

    @world.app.post("/payments", endpoint="view")
    @idempotent(atomic=atomic)
    def view():
        copies = partial(copy_context().run, nested), copy_current_request_context(in_thread)
        return [nested(), asyncio.run(asyncio.to_thread(nested)), *in_threads(copies), look()]

    for _ in range(2):
        assert world.post().json == ["key-1"] * 3 + [["of the thread", None], "key-1"]
    assert sorted(record.name for record in world.records()) == ["pay", "view"]
