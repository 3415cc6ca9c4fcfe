"""Each request to a protected view has one outcome; one event, one line and one number tell it.

Neither tells a key, a scope or a body, and none that fails changes a response.
"""

import logging
from collections import Counter
from contextlib import suppress
from functools import partial

import pytest
from prometheus_client import CollectorRegistry
from werkzeug.exceptions import RequestEntityTooLarge

import flask_idempotency
from flask_idempotency import (
    OperationInterrupted,
    Retryable,
    StoreUnavailable,
    after_commit,
    operation_executed,
)
from flask_idempotency.core.errors import RecordBroken
from flask_idempotency.core.keys import SHOWN
from flask_idempotency.integrations.prometheus import export_metrics
from tests.killed import Killed
from tests.log import ours
from tests.web.conftest import add

CHANGED = {"json": {"card": "canary-2"}}


def post(world, **sent):
    with suppress(Killed, SystemExit):
        return world.post(**{"key": "canary", "user": "canary", "json": {"card": "canary"}, **sent})


def ends(*results):
    """A view that raises or returns one after the other."""
    left = list(results)

    def view():
        result = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(result, int):
            return "canary", result
        raise result

    return view


EXECUTED, REPLAYED = ("executed", "executed", None), ("replayed", "replayed", None)
ROLLED_BACK = ("rejected", "rolled_back", None)
INTERRUPTED = ("interrupted", "interrupted", None)
FAILED = ("executed", "executed", "operation-failed")
LEASED = {"atomic": False}


def rejected(problem):
    return ("rejected", "rejected", problem)


OUTCOMES = {
    "a retry": ([201], {}, [{}, {}], [EXECUTED, REPLAYED]),
    "an error": ([RuntimeError("canary"), 201], {}, [{}, {}], [ROLLED_BACK, EXECUTED]),
    "503": ([503], {}, [{}], [ROLLED_BACK]),
    "not stored": ([201], {"store": lambda _: False}, [{}], [ROLLED_BACK]),
    "an exit": ([SystemExit()], {}, [{}], [ROLLED_BACK]),
    "no key": ([201], {}, [{"key": None}], [rejected("key-required")]),
    "a malformed key": ([201], {}, [{"key": "a,canary"}], [rejected("key-malformed")]),
    "nobody": ([201], {}, [{"user": ""}], [rejected("scope-unknown")]),
    "a changed request": ([201], {}, [{}, CHANGED], [EXECUTED, rejected("key-reused")]),
    "a forbidden replay": (
        [201], {"authorize_replay": lambda _: False}, [{}, {}],
        [EXECUTED, rejected("replay-forbidden")],
    ),
    "a problem that the view raises": (
        [StoreUnavailable()], {}, [{}], [rejected("store-unavailable")],
    ),
    "one that is stored": ([OperationInterrupted()], {}, [{}, {}], [EXECUTED, REPLAYED]),
    "too long": ([201], {}, [{"json": "x" * 2000}], [rejected("body-too-large")]),
    "no key is required": (
        [201], {"required": False}, [{"key": None}], [("unprotected", "unprotected", None)],
    ),
    "leased, released": ([Retryable()], LEASED, [{}], [("rejected", "released", None)]),
    "leased, dies": ([Killed()], LEASED, [{}], [INTERRUPTED]),
    "leased, exits": ([SystemExit()], LEASED, [{}], [INTERRUPTED]),
    "leased, fails": ([RuntimeError("canary")], LEASED, [{}, {}], [FAILED, REPLAYED]),
}  # fmt: skip


@pytest.mark.parametrize("situation", OUTCOMES)
def test_each_request_has_one_outcome_in_an_event_and_a_line(make_world, heard, caplog, situation):
    results, options, requests, expected = OUTCOMES[situation]
    caplog.set_level(logging.DEBUG, "flask_idempotency")
    world = make_world(PROPAGATE_EXCEPTIONS=False, MAX_CONTENT_LENGTH=1000)
    add(world, ends(*results), **options)
    registry = CollectorRegistry()
    export_metrics(world.app, registry=registry)
    for sent in requests:
        post(world, **sent)
    told = [(name, event) for name, event in heard if event.outcome]
    assert [(name[10:], each.outcome, each.problem) for name, each in told] == expected
    events, lines = [event for _, event in told], [r for r in caplog.records if hasattr(r, "outcome")]
    assert [(line.operation, line.outcome) for line in lines] == [("pay", e.outcome) for e in events]
    samples = [each for metric in registry.collect() for each in metric.samples if each.value]
    counted = {
        (each.labels["outcome"], each.labels["problem"] or None): each.value
        for each in samples
        if each.name == "idempotency_requests_total"
    }
    assert counted == Counter((event.outcome, event.problem) for event in events)
    digits = {record.key.hex()[:SHOWN] for record in world.records()}
    for event, line in zip(events, lines, strict=True):
        assert (event.operation, event.seconds > 0) == ("pay", True)
        if event.problem and event.outcome == "rejected":
            assert getattr(event.error, "type", event.problem) == event.problem
            assert line.error == type(event.error).__name__
            assert event.status == getattr(event.error, "status", None)
        if event.problem == "body-too-large":  # the application's own
            assert isinstance(event.error, RequestEntityTooLarge)
        if event.id is not None:
            assert {event.id} == digits
            assert (line.id, event.decided_by) == (event.id, "records")
    assert "canary" not in repr([vars(each) for each in ours(caplog, logging.DEBUG)])
    assert situation == "a problem that the view raises" or "canary" not in repr(
        [{**vars(event), "error": None} for event in events]
    )


@pytest.mark.parametrize("enforce", [True, False])
def test_a_record_that_cannot_be_read_is_told_and_named_at_error(world, heard, caplog, enforce):
    """So it can be told from what the application's own functions reject, and alert somebody."""
    world.app.config["PROPAGATE_EXCEPTIONS"] = False
    add(world, ends(201), enforce=enforce)
    post(world)
    heard.clear()
    world.sql("update idempotency_record set status = 99")
    assert post(world).status_code == (500 if enforce else 201)
    ((_, event),) = heard
    assert (event.outcome if enforce else event.would) == "rejected"
    assert (event.problem, type(event.error)) == ("record-unreadable", RecordBroken)
    if enforce:
        [line] = [each for each in caplog.records if each.name == "flask_idempotency"]
        assert (line.levelname, line.id) == ("ERROR", event.id)


def test_a_duplicate_says_that_the_lock_decided(world, heard, gate, background):
    add(world, lambda: (gate(), ("", 201))[1])
    first = background(post, world)
    gate.wait_until_reached()
    post(world)
    ((_, event),) = heard
    assert (event.outcome, event.problem) == ("rejected", "request-in-progress")
    assert event.decided_by == "lock"
    gate.open()
    first.result()
    assert heard[-1][1].outcome == "executed"


def test_receivers_hear_after_the_commit_unless_they_are_muted_and_whatever_others_do(
    world, add_view, caplog
):
    counts = []

    def fails(_app, event):
        counts.append(world.count())
        raise LookupError

    receivers = fails, partial(fails)
    for receiver in receivers:
        operation_executed.connect(receiver, world.app)
    add_view(world)
    with operation_executed.muted():
        world.post(key="muted")
    assert counts == []
    assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert counts == [2, 2]
    failures = [each for each in ours(caplog) if "a receiver of operation-executed" in each.message]
    assert [each.exc_info[0] for each in failures] == [LookupError] * 2


@pytest.mark.usefixtures("failing_log")
def test_logging_that_fails_changes_no_response(make_world, add_view, assert_replayed, assert_problem):
    """Of an application whose Redis is away, where each kind of line is written."""
    world = make_world(IDEMPOTENCY_REDIS_URL="redis://127.0.0.1:1/0")

    def refuse(*_, **__):
        raise LookupError

    runs = add_view(world, during=lambda: after_commit(refuse))
    with flask_idempotency.operation_executed.connected_to(refuse, world.app):
        first = world.post()
    assert (first.status_code, world.count()) == (201, 1)
    assert_replayed(first, world.post())
    assert_problem(world.post(json={"amount": 6}), 422, "key-reused")
    assert_problem(world.post(key=None), 400, "key-required")
    assert runs == [1]


def test_neither_key_nor_body_is_logged_by_anybody(make_world, heard, caplog):
    """All that goes wrong at once, at the finest level of logging."""
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "flask_idempotency")  # where an application of another test set one
    world = make_world(IDEMPOTENCY_ON_STORE_ERROR="allow", PROPAGATE_EXCEPTIONS=False)

    def pay():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.flush()  # never committed, so it is undone
        return "canary-answer", 409, {"X-Secret": "canary-header"}

    add(world, pay)
    post(world), post(world, **CHANGED), post(world, key="canary,2")
    world.sql("update idempotency_record set fingerprint_version = 99")
    post(world)
    world.sql("drop table idempotency_record")
    post(world, key="canary-4")
    assert "fingerprint was made in another way" in caplog.text
    assert "idempotency_record is missing" in caplog.text
    assert "canary" not in caplog.text + repr(heard)
