"""Several operations at once in one request, or in one application context: each is its own."""

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial

import pytest
import sqlalchemy as sa
from flask import copy_current_request_context, current_app

from flask_idempotency import (
    ConfigurationError,
    IdempotencyError,
    NotAtomic,
    current_operation,
    idempotent,
)
from flask_idempotency.core.keys import SHOWN, derive_key, hash_key
from tests.conftest import PATIENCE_SECONDS

EVENTS = 5

KINDS = pytest.mark.parametrize("atomic", [True, False])


@pytest.fixture
def run(world):
    """Runs a function in an operation of its own."""
    return partial(world.idempotency.run, scope="p", name="job")


def in_threads(handlers, *args):
    with ThreadPoolExecutor(len(handlers)) as pool:
        return [each.result() for each in [*map(pool.submit, handlers, *args)]]


def in_copies_of_the_request(handle, events):
    return in_threads([copy_current_request_context(handle) for _ in events], events)


def in_contexts_of_their_own(handle, events):
    app = current_app._get_current_object()

    def in_its_own(event):
        with app.app_context():
            return handle(event)

    return in_threads([in_its_own] * len(events), events)


@KINDS
@pytest.mark.parametrize("has_own_session", [True, False])
@pytest.mark.parametrize("fan_out", [in_copies_of_the_request, in_contexts_of_their_own])
def test_each_event_of_a_delivery_is_handled_once(world, heard, run, fan_out, has_own_session, atomic):
    barrier, provider = threading.Barrier(EVENTS), []
    keys = {str(event): hash_key("", "job", "p", str(event)) for event in range(EVENTS)}
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

    @world.app.post("/hook")
    def deliver():
        world.db.session.scalar(sa.select(1))  # leaves a transaction open
        return fan_out(lambda event: run(event, charge, event, atomic=atomic), list(keys))

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
    runs = []

    def call():
        with pytest.raises(NotAtomic, match=REFUSED):
            run("thread", runs.append, 1, atomic=atomic)
        return ""

    async def async_hook():
        return await asyncio.to_thread(call)

    hook = async_hook if is_async else lambda: in_threads([partial(copy_context().run, call)])[0]
    world.app.add_url_rule("/hook", "hook", hook, methods=["POST"])
    assert world.post("/hook", key=None).status_code == 200
    assert (runs, world.records()) == ([], [])


def test_idempotent_functions_that_a_view_calls_in_threads_are_never_confused(world, gate):
    """Each on a copy of the request's context: one of them has the response of the request."""

    def own_scope():
        entered.set()
        assert resume.wait(PATIENCE_SECONDS)
        return "p"

    slow = idempotent(name="slow", scope=own_scope)(lambda: {"is": "slow"})
    other = idempotent(name="other")(lambda: {"is": "other"})

    @world.app.post("/both")
    def both():
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(copy_current_request_context(slow))
            assert entered.wait(PATIENCE_SECONDS)
            with pytest.raises(ConfigurationError, match="a second idempotent function"):
                other()
            resume.set()
            return first.result()

    for _ in range(2):
        entered, resume = threading.Event(), threading.Event()
        assert world.post("/both").json == {"is": "slow"}
    assert world.sql("select name from idempotency_record") == [("slow",)]


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
    """A thread has no operation of its own accord; ``asyncio.to_thread`` takes it along."""

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
    assert sorted(record.name for record in world.records()) == ["job", "view"]


def test_an_exit_in_the_middle_of_an_operations_end_is_told_all_the_same(world, run, heard):
    """The signal of a server that stops may come at any place."""

    def fails():
        world.db.session.add(world.Payment(amount=1))
        world.db.session.flush()
        sa.event.listen(world.db.session, "after_transaction_end", leave)  # in the operation's own
        raise LookupError

    def leave(*_):
        raise SystemExit

    with world.app.app_context():
        with pytest.raises(SystemExit):
            run("key", fails)
        assert not current_operation
    assert [event.outcome for _, event in heard] == ["rolled_back"]
    world.assert_clean()
