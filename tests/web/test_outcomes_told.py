"""Each request to a protected view has exactly one outcome, and one event that tells it."""

import logging
from contextlib import suppress

import pytest

from flask_idempotency import (
    KeyReused,
    OperationInterrupted,
    Retryable,
    StoreUnavailable,
    current_operation,
    idempotent,
)
from flask_idempotency.core.errors import RecordBroken
from flask_idempotency.core.keys import SHOWN
from flask_idempotency.web.routes import app_state
from tests.killed import Killed


def outcomes(heard):
    return [(name, event.outcome) for name, event in heard if event.outcome is not None]


def only(heard):
    (event,) = [event for _, event in heard if event.outcome is not None]
    return event


def add(world, function, **options):
    world.app.add_url_rule("/payments", "pay", idempotent(**options)(function), methods=["POST"])


def fail():
    raise RuntimeError


def test_an_executed_and_a_replayed_one(world, heard):
    add(world, lambda: ("", 201))
    world.post()
    world.post()
    assert outcomes(heard) == [("operation_executed", "executed"), ("operation_replayed", "replayed")]
    executed, replayed = (event for _, event in heard)
    for event in executed, replayed:
        assert (event.operation, event.attempt, event.status, event.problem) == ("pay", 1, 201, None)
    assert executed.id == replayed.id == world.records()[0].key.hex()[:SHOWN]
    assert executed.decided_by == replayed.decided_by == "records"
    assert executed.seconds > 0
    assert replayed.seconds > 0


@pytest.mark.parametrize(
    ("response", "options"),
    [(fail, {}), (lambda: ("", 503), {}), (lambda: "", {"store": lambda _: False})],
)
def test_one_that_was_rolled_back(world, heard, response, options):
    add(world, response, **options)
    world.post()
    assert outcomes(heard) == [("operation_rejected", "rolled_back")]
    assert only(heard).attempt == 1
    assert isinstance(only(heard).error, RuntimeError) == (response is fail)


def test_one_whose_worker_is_told_to_exit_was_rolled_back(world, heard):
    def leave():
        raise SystemExit

    add(world, leave)
    with pytest.raises(SystemExit):
        world.post()
    assert outcomes(heard) == [("operation_rejected", "rolled_back")]


def test_rejected_ones(world, heard):
    add(world, lambda: ("", 201), authorize_replay=lambda _operation: False)
    world.post()
    heard.clear()
    for request in ({"key": None}, {"key": "a,b"}, {"user": ""}, {"json": {"other": 1}}, {}):
        world.post(**request)
    assert outcomes(heard) == [("operation_rejected", "rejected")] * 5
    assert [(event.problem, event.status, event.id is None) for _, event in heard] == [
        ("key-required", 400, True),
        ("key-malformed", 400, True),
        ("scope-unknown", 401, True),
        ("key-reused", 422, False),
        ("replay-forbidden", 403, False),
    ]
    assert all(event.attempt is None and event.error.type == event.problem for _, event in heard)


def test_a_view_that_raises_a_problem_itself_is_rejected_and_not_also_rolled_back(world, heard):
    def view():
        raise StoreUnavailable

    add(world, view)
    world.post()
    assert outcomes(heard) == [("operation_rejected", "rejected")]


def test_a_problem_that_a_view_raises_and_that_is_stored_is_an_execution(world, heard):
    def hold():
        raise OperationInterrupted

    add(world, hold)
    assert [world.post().status_code for _ in range(2)] == [409, 409]
    assert outcomes(heard) == [("operation_executed", "executed"), ("operation_replayed", "replayed")]


def test_the_applications_own_413_has_a_problem_in_its_event_as_where_it_is_observed(world, heard):
    add(world, lambda: "")
    world.app.config["MAX_CONTENT_LENGTH"] = 5
    assert world.post(json={"amount": 5}).status_code == 413
    assert outcomes(heard) == [("operation_rejected", "rejected")]
    assert (only(heard).problem, only(heard).error.code) == ("body-too-large", 413)


def test_a_record_that_cannot_be_read_has_a_problem_in_its_event_as_where_it_is_observed(
    world, heard, caplog
):
    """So it can be told from what the application's own functions reject, and alert somebody.

    The log names the record at ERROR, once for each retry.
    """
    add(world, lambda: ("", 201))
    world.app.post("/observed", endpoint="observed")(idempotent(enforce=False)(lambda: ("", 201)))
    world.post()
    world.post("/observed")
    heard.clear()
    world.sql("update idempotency_record set status = 99")
    world.app.config["PROPAGATE_EXCEPTIONS"] = False
    assert world.post().status_code == 500
    assert outcomes(heard) == [("operation_rejected", "rejected")]
    assert (only(heard).problem, only(heard).status) == ("record-unreadable", 500)
    assert isinstance(only(heard).error, RecordBroken)
    [line] = [each for each in caplog.records if each.name == "flask_idempotency"]
    assert (line.levelname, line.id) == ("ERROR", only(heard).id)
    heard.clear()
    assert world.post("/observed").status_code == 201
    assert (only(heard).would, only(heard).problem) == ("rejected", "record-unreadable")


@pytest.mark.parametrize("store", ["hybrid"], indirect=True)
def test_a_duplicate_says_that_the_lock_decided(world, heard, gate, background):
    add(world, lambda: (gate(), ("", 201))[1])
    first = background(world.post)
    gate.wait_until_reached()
    world.post()
    assert (only(heard).problem, only(heard).decided_by) == ("request-in-progress", "lock")
    gate.open()
    first.result()
    expected = [("operation_rejected", "rejected"), ("operation_executed", "executed")]
    assert outcomes(heard) == expected


def test_one_without_a_key_where_none_is_required_ran_unprotected(world, heard):
    add(world, lambda: "", required=False)
    world.post(key=None)
    assert outcomes(heard) == [("operation_unprotected", "unprotected")]


@pytest.mark.parametrize(
    ("raised", "outcome"),
    [(Retryable, "released"), (Killed, "interrupted"), (SystemExit, "interrupted")],
)
def test_one_that_is_not_atomic_and_has_no_response(world, heard, raised, outcome):
    def view():
        raise raised

    add(world, view, atomic=False)
    with suppress(raised):
        world.post()
    signal = "operation_rejected" if outcome == "released" else "operation_interrupted"
    assert outcomes(heard) == [(signal, outcome)]


def test_one_that_failed_and_is_not_atomic_was_executed(world, heard):
    add(world, fail, atomic=False)
    world.post()
    assert outcomes(heard) == [("operation_executed", "executed")]
    assert only(heard).status == 500


def test_a_taken_over_one_is_told_on_the_way(world, heard):
    def view():
        if current_operation.attempt == 1:
            raise RuntimeError
        return "", 201

    add(world, view)
    world.post()
    world.post()
    assert [(name, event.outcome, event.attempt) for name, event in heard] == [
        ("operation_rejected", "rolled_back", 1),
        ("operation_taken_over", None, 2),
        ("operation_executed", "executed", 2),
    ]


def test_run_has_one_outcome_each_time(world, heard):
    with world.app.app_context():
        for payload in (1, 1, 2):
            with suppress(KeyReused):
                app_state(world.app)
                world.idempotency.run("k", lambda: 1, scope="a", name="job", payload=payload)
    assert [event.outcome for _, event in heard] == ["executed", "replayed", "rejected"]
    assert {event.operation for _, event in heard} == {"job"}


def test_each_outcome_is_one_line_of_the_log_with_its_facts(world, caplog):
    caplog.set_level(logging.DEBUG, "flask_idempotency")
    add(world, lambda: ("canary-response", 201))
    world.post(key="canary-key", user="canary-user", json={"canary": "body"})
    world.post(key="canary-key", user="canary-user", json={"canary": "other"})
    first, second = (each for each in caplog.records if hasattr(each, "outcome"))
    assert (first.levelname, first.outcome, first.operation, first.status) == (
        "DEBUG",
        "executed",
        "pay",
        201,
    )
    assert (second.outcome, second.problem, second.error) == ("rejected", "key-reused", "KeyReused")
    assert first.id == second.id == world.records()[0].key.hex()[:SHOWN]
    assert "operation pay executed: attempt 1, status 201, seconds 0." in caplog.text
    assert "canary" not in caplog.text + "".join(repr(vars(each)) for each in caplog.records)


def test_records_of_the_applications_own_with_such_attributes_change_no_response(
    world, caplog, monkeypatch, assert_replayed
):
    """What follows the commit must not fail: logging refuses to overwrite an attribute."""
    usual = logging.getLogRecordFactory()

    def make(*args, **kwargs):
        record = usual(*args, **kwargs)
        record.id = "of the application"
        return record

    monkeypatch.setattr(logging, "_logRecordFactory", make)
    caplog.set_level(logging.DEBUG, "flask_idempotency")
    add(world, lambda: ("", 201))
    first = world.post()
    assert first.status_code == 201
    assert_replayed(first, world.post())
    assert "operation pay executed" in caplog.text


def test_no_event_is_made_while_nobody_listens(world, monkeypatch, nobody_listens):
    monkeypatch.setattr("flask_idempotency.web.signals.Event", None)
    add(world, lambda: ("", 201))
    assert [world.post().status_code for _ in range(2)] == [201, 201]
