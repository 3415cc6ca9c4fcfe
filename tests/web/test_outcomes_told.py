"""Each request to a protected view has one outcome; one event, one line and one number tell it.

Neither tells a key, a scope or a body, and none that fails changes a response.
"""

import logging
import time
from collections import Counter
from contextlib import suppress
from functools import partial

import pytest
from flask import request
from prometheus_client import CollectorRegistry
from werkzeug.exceptions import Forbidden, RequestEntityTooLarge

import flask_idempotency
from flask_idempotency import (
    ConfigurationError,
    KeyReused,
    OperationInterrupted,
    Retryable,
    StoreUnavailable,
    after_commit,
    operation_executed,
)
from flask_idempotency.core.errors import RecordBroken
from flask_idempotency.core.keys import SHOWN, uuid7
from flask_idempotency.integrations.prometheus import export_metrics
from tests.killed import Killed
from tests.log import ours
from tests.stores import on_sqlite
from tests.web.conftest import add

CHANGED = {"json": {"card": "canary-2"}}
BROKEN = {"data": b"{canary", "content_type": "application/json"}
OLD = {"key": uuid7(round((time.time() - 3600) * 1000), bytes(10))}


def post(world, **sent):
    body = {} if "data" in sent else {"json": {"card": "canary"}}
    with suppress(Killed, SystemExit):
        return world.post(**{"key": "canary", "user": "canary", **body, **sent})


def ends(*results):
    """A view that raises or returns one after the other."""
    left = list(results)

    def view():
        result = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(result, int):
            return request.get_data() and "canary", result
        raise result

    return view


async def asynchronous():
    return "canary", 201


def fails(*_):
    raise LookupError("canary")


def forbids(_operation):
    return False


LEASED = {"atomic": False}
AGAIN = {**LEASED, "on_interrupted": "retry"}
EXIT, ERROR, MISTAKE = SystemExit(), LookupError("canary"), ConfigurationError("wrong")
TWICE = [{}, {}]
NO_KEY, NOT_REQUIRED = [{"key": None}], {"required": False}
SITUATIONS = {
    "a retry": ({}, [201], TWICE, ["executed", "replayed"]),
    "an async view": ({}, None, TWICE, ["executed", "replayed"]),
    "another status": ({}, [201, 409], TWICE, ["executed", "replayed"]),
    "an error": ({}, [ERROR, 201], TWICE, ["rolled_back", "executed"]),
    "an exit": ({}, [EXIT, 201], TWICE, ["rolled_back", "executed"]),
    "403": ({}, [Forbidden()], TWICE, ["rolled_back"] * 2),
    "not stored": ({"store": lambda _: False}, [201], [{}], ["rolled_back"]),
    "no key": ({}, [201], NO_KEY, ["key-required"]),
    "no key is required": (NOT_REQUIRED, [201], NO_KEY, ["unprotected"]),
    "a malformed key": ({}, [201], [{"key": "a,canary"}], ["key-malformed"]),
    "nobody": ({}, [201], [{"user": ""}], ["scope-unknown"]),
    "a changed request": ({}, [201], [{}, CHANGED], ["executed", "key-reused"]),
    "too long": ({}, [201], [{"data": b"x" * 2000}], ["body-too-large"]),
    "no JSON": ({"fingerprint": "json"}, [201], [BROKEN], ["body-malformed"]),
    "an old key": (
        {"refuse_old_keys": True, "ttl": 60}, [201], [OLD, {}], ["key-expired", "executed"],
    ),
    "a forbidden replay": (
        {"authorize_replay": forbids}, [201], TWICE, ["executed", "replay-forbidden"],
    ),
    "too often": ({"max_attempts": 1}, [403], TWICE, ["rolled_back", "operation-interrupted"]),
    "a problem that the view raises": ({}, [StoreUnavailable()], [{}], ["store-unavailable"]),
    "one that is stored": ({}, [KeyReused()], TWICE, ["executed", "replayed"]),
    "one of a time": ({}, [OperationInterrupted(), 201], TWICE, ["try-again", "executed"]),
    "leased, 500": (LEASED, [500], TWICE, ["executed", "replayed"]),
    "leased, 403": (LEASED, [403], TWICE, ["released"] * 2),
    "leased, an error": (LEASED, [ERROR], TWICE, ["executed", "replayed"]),
    "leased, released": (LEASED, [Retryable()], [{}], ["released"]),
    "leased, an exit": (LEASED, [EXIT, 201], TWICE, ["interrupted", "operation-interrupted"]),
    "leased, a mistake": (LEASED, [MISTAKE, 201], TWICE, ["interrupted", "operation-interrupted"]),
    "leased, retried": (AGAIN, [EXIT, 201], TWICE, ["interrupted", "executed"]),
    "leased, too often": (
        {"max_attempts": 1, **LEASED}, [403], TWICE, ["released", "operation-interrupted"],
    ),
    **{
        f"{name} fails, atomic={atomic}": (
            {name: fails, "atomic": atomic}, [201], [{}], ["rejected"],
        )
        for name in ("scope", "key", "fingerprint") for atomic in (True, False)
    },
}  # fmt: skip
"""Options, how the view ends each time, the requests, and what is told: outcomes or problems."""

FAILED = [("executed", "operation-failed"), ("replayed", None)]
ENFORCED = {"leased, 500": FAILED, "leased, an error": FAILED}
OBSERVED = {  # where an error is a response like others
    "a problem that the view raises": [("rolled_back", None)],
    "leased, released": [("executed", None)],
    "one of a time": [("executed", None), ("replayed", None)],
    "leased, a mistake": [("executed", None), ("replayed", None)],
}
OUTCOMES = {"executed", "replayed", "rolled_back", "released", "interrupted", "unprotected", "rejected"}
LEVELS = {
    "no key": [],  # clients that know of no keys yet: too many for lines
    "a changed request": [logging.INFO],
    "a retry": [logging.INFO],
    "another status": [logging.WARNING],
    "scope fails, atomic=True": [logging.WARNING],
}
"""Of lines about observed requests, from INFO on."""


@pytest.fixture
def told_of(make_world, store, caplog):
    """Brings a situation about, enforced or observed; returns its world and the responses."""

    def told_of(situation, **config):
        options, results, requests, _ = SITUATIONS[situation]
        caplog.set_level(logging.DEBUG, "flask_idempotency")
        file = on_sqlite(make_world) if store == "sql" else {}
        world = make_world(PROPAGATE_EXCEPTIONS=False, MAX_CONTENT_LENGTH=1000, **file, **config)
        add(world, ends(*results) if results else asynchronous, **options)
        registry = CollectorRegistry()
        export_metrics(world.app, registry=registry)
        return world, registry, [post(world, **sent) for sent in requests]

    return told_of


def expected(situation, other):
    """Outcomes and problems."""
    *_, told = SITUATIONS[situation]
    usual = [(each, None) if each in OUTCOMES else ("rejected", each) for each in told]
    return other.get(situation, usual)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_each_request_has_one_outcome_in_an_event_and_a_line(told_of, heard, caplog, situation):
    world, registry, _ = told_of(situation)
    told = [(name, event) for name, event in heard if event.outcome]
    events, lines = [event for _, event in told], [r for r in caplog.records if hasattr(r, "outcome")]
    facts = [(event.outcome, event.problem) for event in events]
    assert facts == expected(situation, ENFORCED)
    for name, event in told:
        is_undone = event.outcome in ("rolled_back", "released")
        assert name == f"operation_{'rejected' if is_undone else event.outcome}"
    assert [(line.operation, line.outcome) for line in lines] == [("pay", e.outcome) for e in events]
    samples = [each for metric in registry.collect() for each in metric.samples if each.value]
    counted = {
        (each.labels["outcome"], each.labels["problem"] or None): each.value
        for each in samples
        if each.name == "idempotency_requests_total"
    }
    assert counted == Counter(facts)
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
            assert event.id in digits or event.problem == "key-expired"
            assert (line.id, event.decided_by) == (event.id, "records")
    assert "canary" not in repr([vars(each) for each in ours(caplog, logging.DEBUG)])
    assert situation == "a problem that the view raises" or "canary" not in repr(
        [{**vars(event), "error": None} for event in events]
    )


@pytest.mark.usefixtures("patient_observing")
@pytest.mark.parametrize("store", ["hybrid", "sql"], indirect=True)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_of_an_observed_request_the_same_is_told_and_its_client_notices_nothing(
    told_of, heard, caplog, situation
):
    _, _, responses = told_of(situation, IDEMPOTENCY_ENFORCE=False)
    found = [(event.would, event.problem) for name, event in heard if name == "operation_observed"]
    assert found == expected(situation, OBSERVED)
    for response in filter(None, responses):
        assert "Idempotent-Replayed" not in response.headers
        assert response.text == "canary" or response.status_code != 201
    levels = [line.levelno for line in ours(caplog, logging.INFO)]
    assert levels == LEVELS.get(situation, levels)
    for line in ours(caplog, logging.DEBUG):
        assert "canary" not in str(vars(line)), line


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
