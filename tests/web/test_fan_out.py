"""Several operations at once in one request, or in one application context: each is its own."""

import asyncio
import json
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa
from flask import copy_current_request_context, current_app, stream_with_context

from flask_idempotency import (
    IdempotencyError,
    NotAtomic,
    RequestInProgress,
    current_operation,
    idempotent,
)
from flask_idempotency.core.keys import SHOWN, derive_key, hash_key
from tests.conftest import PATIENCE_SECONDS
from tests.web import greenlets

EVENTS = 5
TRIES = 3

KINDS = pytest.mark.parametrize("atomic", [True, False])


def in_copies_of_the_request(handle, events):
    return in_threads([copy_current_request_context(handle) for _ in events], events)


def in_contexts_of_their_own(handle, events):
    app = current_app._get_current_object()

    def in_its_own(event):
        with app.app_context():
            return handle(event)

    return in_threads([in_its_own] * len(events), events)


def in_copies_of_the_context(handle, events):
    return in_threads([partial(copy_context().run, handle) for _ in events], events)


def in_threads(handlers, events):
    with ThreadPoolExecutor(len(events)) as pool:
        return [each.result() for each in [*map(pool.submit, handlers, events)]]


async def in_tasks(handle, events):
    return await asyncio.gather(*(asyncio.to_thread(handle, event) for event in events))


def in_tasks_of_the_context(handle, events):
    return asyncio.run(in_tasks(handle, events))


@pytest.fixture
def provider():
    """Whom the handlers call: it notes each call's key."""
    return []


@pytest.fixture
def meet():
    """Waits until all events are in their handlers."""
    barrier = threading.Barrier(EVENTS)
    return lambda: barrier.wait(PATIENCE_SECONDS)


@pytest.fixture(params=[True, False], ids=["own session", "the context's"])
def handle(request, world, provider, meet, atomic):
    """Handles an event in an operation of its own."""

    def charge(event):
        with world.app.app_context() if request.param else nullcontext():
            meet()
            payment = world.Payment(amount=1, note=event)
            world.db.session.add(payment)
            world.db.session.commit()
            key = current_operation.derive_key("charge")
            if atomic:
                provider.append(key)
            else:
                current_operation.step("charge", provider.append, key)
            meet()
            return [event, current_operation.key, current_operation.scope, key]

    def handle(event):
        return world.idempotency.run(event, charge, event, scope="p", name="charge", atomic=atomic)

    return handle


def read(world):
    """Leaves a transaction open in the session of the context."""
    world.db.session.scalar(sa.select(sa.func.count(world.Payment.id)))


def expected(event):
    return [event, event, "p", derive_key(hash_key("", "charge", "p", event), "charge")]


def assert_each_ran_once(world, heard, provider, deliveries):
    events = [event for delivery in deliveries for event in delivery]
    assert sorted(provider) == sorted(expected(event)[3] for event in events)
    assert world.sql("select note from payment order by note") == [(e,) for e in sorted(events)]
    told = Counter((name, event.id) for name, event in heard if event.outcome is not None)
    digits = [hash_key("", "charge", "p", event).hex()[:SHOWN] for event in events]
    names = ("operation_executed", "operation_replayed")
    assert told == dict.fromkeys(((name, each) for name in names for each in digits), 1)


@KINDS
@pytest.mark.parametrize("fan_out", [in_copies_of_the_request, in_contexts_of_their_own])
def test_each_event_of_a_webhook_is_handled_once(world, heard, provider, handle, fan_out):
    @world.app.post("/hook/<int:number>")
    def hook(number):
        read(world)
        return fan_out(handle, deliveries[number])

    deliveries = [[f"{number}-{event}" for event in range(EVENTS)] for number in range(TRIES)]
    for number, events in enumerate(deliveries):
        for _ in range(2):
            assert world.post(f"/hook/{number}", key=None).json == [*map(expected, events)]
    assert_each_ran_once(world, heard, provider, deliveries)


@KINDS
def test_so_is_each_in_threads_of_a_script(world, heard, provider, handle):
    deliveries = [[f"{number}-{event}" for event in range(EVENTS)] for number in range(TRIES)]
    with world.app.app_context():
        for events in deliveries:
            for _ in range(2):
                read(world)
                assert in_contexts_of_their_own(handle, events) == [*map(expected, events)]
    assert_each_ran_once(world, heard, provider, deliveries)


def refused(world, runs, atomic):
    with pytest.raises(
        NotAtomic, match=r"in a thread or task that shares .* `with app.app_context\(\):`"
    ):
        world.idempotency.run("thread", runs.append, 1, scope="p", name="charge", atomic=atomic)


@KINDS
@pytest.mark.parametrize("is_async", [True, False])
def test_a_thread_that_shares_the_context_of_a_request_is_refused(world, atomic, is_async):
    runs = []
    call = partial(refused, world, runs, atomic)
    if is_async:

        @world.app.post("/hook")
        async def hook():
            await asyncio.to_thread(call)
            return ""
    else:

        @world.app.post("/hook")
        def hook():
            in_threads([partial(copy_context().run, lambda _: call())], [0])
            return ""

    assert world.post("/hook", key=None).status_code == 200
    assert (runs, world.records()) == ([], [])


@KINDS
def test_so_is_one_that_shares_the_context_of_another_run(world, background, gate, atomic):
    runs = []
    with world.app.app_context():
        here = copy_context()
        first = background(
            copy_context().run,
            partial(world.idempotency.run, "first", gate, scope="p", name="charge", atomic=atomic),
        )
        gate.wait_until_reached()
        here.run(refused, world, runs, atomic)
        gate.open()
        first.result()
        assert (runs, [record.name for record in world.records()]) == ([], ["charge"])
        world.idempotency.run("then", runs.append, 1, scope="p", name="charge", atomic=atomic)
    assert runs == [1]


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_so_is_each_in_greenlets(world):
    command = [sys.executable, greenlets.__file__, world.app.config["SQLALCHEMY_DATABASE_URI"]]
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=60,
    )
    found = json.loads(done.stdout)
    names = []
    for first, again in found["results"]:
        assert first == again
        for event, key, derived in first:
            assert (event, derived) == (key, derive_key(hash_key("", "charge", None, key), "charge"))
            names.append(event)
    assert len(set(names)) == len(names) == greenlets.TRIES * 2 * greenlets.EVENTS
    assert sorted(found["charged"]) == sorted(names)
    digits = [hash_key("", "charge", None, name).hex()[:SHOWN] for name in names]
    assert sorted(found["executed"]) == sorted(digits)


@KINDS
def test_a_copy_of_the_context_is_inside_the_operation_and_a_copy_of_the_request_is_not(world, atomic):
    """A thread has no operation of its own accord; ``asyncio.to_thread`` takes it along."""
    run = world.idempotency.run

    def look():
        return current_operation.key if current_operation else None

    def nested():
        with pytest.raises(IdempotencyError, match="inside the operation view"):
            run("inner", look, name="inner", scope=None)
        return look()

    @world.app.post("/payments", endpoint="view")
    @idempotent(atomic=atomic)
    def view():
        with ThreadPoolExecutor(1) as pool:
            return [
                nested(),
                pool.submit(copy_context().run, nested).result(),
                asyncio.run(asyncio.to_thread(nested)),
                pool.submit(copy_current_request_context(look)).result(),
                run_in(pool),
                look(),
            ]

    def run_in(pool):
        def in_thread():
            return run("of the thread", look, name="inner", scope=None, atomic=atomic), look()

        return pool.submit(copy_current_request_context(in_thread)).result()

    expected = ["key-1"] * 3 + [None, ["of the thread", None], "key-1"]
    for _ in range(2):
        assert world.post().json == expected
    assert sorted(record.name for record in world.records()) == ["inner", "view"]


@KINDS
def test_what_goes_on_after_the_end_has_no_operation(world, atomic):
    contexts = []

    def view():
        contexts.append(copy_context())
        return "", 201

    def is_there():
        with world.app.app_context():
            return bool(current_operation)

    world.app.add_url_rule("/payments", "pay", idempotent(atomic=atomic)(view), methods=["POST"])
    assert world.post().status_code == 201
    if atomic:
        with pytest.raises(NotAtomic, match="has ended"):
            contexts[0].run(is_there)
    else:
        assert not contexts[0].run(is_there)
    assert not is_there()


@pytest.mark.parametrize("is_caught", [True, False])
def test_what_run_rejects_in_a_view_is_told_once(world, heard, gate, background, is_caught):
    def slow():
        gate()

    def run():
        world.idempotency.run("key", slow, name="job", scope=None, atomic=False)

    @world.app.post("/hook")
    def hook():
        if not is_caught:
            run()
        with pytest.raises(RequestInProgress):
            run()
        return ""

    def elsewhere():
        with world.app.app_context():
            run()

    first = background(elsewhere)
    gate.wait_until_reached()
    response = world.post("/hook", key=None)
    gate.open()
    first.result()
    assert response.status_code == (200 if is_caught else 409)
    assert ("Retry-After" in response.headers) is not is_caught
    assert [event.outcome for _, event in heard] == ["rejected", "executed"]
    assert heard[0][1].problem == "request-in-progress"
    assert heard[0][1].operation == "job"


@KINDS
def test_a_run_in_an_observed_view_is_told_beside_the_observation(world, heard, atomic):
    @world.app.post("/payments", endpoint="view")
    @idempotent(enforce=False)
    def view():
        return [world.idempotency.run("k", lambda: 1, name="job", scope=None, atomic=atomic)]

    for _ in range(2):
        assert world.post().json == [1]
    told = [(event.operation, event.outcome, event.would) for _, event in heard]
    assert told == [
        ("job", "executed", None),
        ("view", "observed", "executed"),
        ("job", "replayed", None),
        ("view", "observed", "replayed"),
    ]


@KINDS
def test_what_a_generator_runs_while_it_is_sent_is_handled_once(world, heard, atomic):
    def job():
        return current_operation.key

    @world.app.post("/hook")
    def hook():
        def lines():
            for event in "ab":
                yield world.idempotency.run(event, job, name="job", scope=None, atomic=atomic)
                assert not current_operation

        return stream_with_context(lines())

    assert [world.post("/hook", key=None).text for _ in range(2)] == ["ab", "ab"]
    assert [event.outcome for _, event in heard] == ["executed"] * 2 + ["replayed"] * 2


def test_an_exit_in_the_middle_of_an_operations_end_is_told_all_the_same(world, heard):
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
            world.idempotency.run("key", fails, name="job", scope=None)
        assert not current_operation
    assert [event.outcome for _, event in heard] == ["rolled_back"]
    world.assert_clean()


def test_two_idempotent_functions_in_threads_of_one_view_are_two_operations(world):
    barrier = threading.Barrier(2)

    def scope():
        barrier.wait(PATIENCE_SECONDS)  # both have said which operation they are
        return "alice"

    functions = [
        idempotent(name=name, scope=scope)(lambda name=name: [name, current_operation.name])
        for name in ("first", "second")
    ]

    @world.app.post("/payments")
    def view():
        copies = [copy_current_request_context(function) for function in functions]
        with ThreadPoolExecutor(2) as pool:
            return [each.result().json for each in [*map(pool.submit, copies)]]

    for _ in range(2):
        assert world.post().json == [["first", "first"], ["second", "second"]]
