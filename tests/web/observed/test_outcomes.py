"""What is told of observed requests, while their clients notice nothing."""

import logging
import time

import pytest
from flask import request
from werkzeug.exceptions import Forbidden

from flask_idempotency import KeyReused, current_operation, idempotent
from flask_idempotency.core.keys import SHOWN, uuid7
from tests.log import ours

STORES = pytest.mark.parametrize("store", ["hybrid", "sql"], indirect=True)
pytestmark = pytest.mark.usefixtures("patient_observing")

BODY = {"amount": 5, "card": "canary"}
OTHER = {"json": {"amount": 6, "card": "canary"}}
BROKEN = {"data": b"{canary", "content_type": "application/json"}
OLD = {"key": uuid7(round((time.time() - 3600) * 1000), bytes(10))}


def responds(*results):
    """A view that ends so, one time after the other, and then as the last time."""
    left = list(results)

    def view():
        assert not current_operation
        result = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(result, int):
            return request.get_data() and "canary", result
        raise result

    return view


def fails(*_):
    raise LookupError("canary")


async def asynchronous():
    return "canary", 201


LEASED = {"atomic": False}
AGAIN = {**LEASED, "on_interrupted": "retry"}
HELD = ("rejected", "operation-interrupted")
SITUATIONS = {
    "a retry": ({}, [201], [{}, {}], ["executed", "replayed"]),
    "an async view": ({}, None, [{}, {}], ["executed", "replayed"]),
    "no key": ({}, [201], [{"key": None}], [("rejected", "key-required")]),
    "a malformed key": ({}, [201], [{"key": "a,canary"}], [("rejected", "key-malformed")]),
    "nobody": ({}, [201], [{"user": ""}], [("rejected", "scope-unknown")]),
    "changed": ({}, [201], [{}, OTHER], ["executed", ("rejected", "key-reused")]),
    "too long": ({}, [201], [{"data": b"x" * 2000}], [("rejected", "body-too-large")]),
    "no JSON": ({"fingerprint": "json"}, [201], [BROKEN], [("rejected", "body-malformed")]),
    "no key is required": ({"required": False}, [201], [{"key": None}], ["unprotected"]),
    "an old key": (
        {"refuse_old_keys": True, "ttl": 60}, [201], [OLD, {}],
        [("rejected", "key-expired"), "executed"],
    ),
    "a forbidden replay": (
        {"authorize_replay": lambda _: False}, [201], [{}, {}],
        ["executed", ("rejected", "replay-forbidden")],
    ),
    "403": ({}, [Forbidden()], [{}, {}], ["rolled_back"] * 2),
    "an error": ({}, [LookupError("canary")], [{}, {}], ["rolled_back"] * 2),
    "a problem of ours": ({}, [KeyReused()], [{}], ["executed"]),
    "an exit": ({}, [SystemExit(), 201], [{}, {}], ["rolled_back", "executed"]),
    "leased, 500": (LEASED, [500], [{}, {}], ["executed", "replayed"]),
    "leased, an error": (LEASED, [LookupError("canary")], [{}, {}], ["executed", "replayed"]),
    "leased, 403": (LEASED, [403], [{}, {}], ["released"] * 2),
    "leased, an exit": (LEASED, [SystemExit(), 201], [{}, {}], ["interrupted", HELD]),
    "leased, retried": (AGAIN, [SystemExit(), 201], [{}, {}], ["interrupted", "executed"]),
    "too often": ({"max_attempts": 1}, [403], [{}, {}], ["rolled_back", HELD]),
    "leased, too often": ({"max_attempts": 1, **LEASED}, [403], [{}, {}], ["released", HELD]),
    "another status": ({}, [201, 409], [{}, {}], ["executed", "replayed"]),
    **{
        f"{name} fails": ({name: fails, **options}, [201], [{}], [("rejected", None)])
        for name in ("scope", "key", "fingerprint")
        for options in ({}, LEASED)
    },
}  # fmt: skip
LEVELS = {
    "no key": [],  # clients that know of no keys yet: too many for lines
    "changed": [logging.INFO],
    "a retry": [logging.INFO],
    "another status": [logging.WARNING],
    "scope fails": [logging.WARNING],
}


@STORES
@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_client_gets_the_views_response_and_the_event_tells_what_would_have_been(
    world, add, observed, caplog, situation
):
    options, results, requests, expected = SITUATIONS[situation]
    caplog.set_level(logging.DEBUG, "flask_idempotency")
    world.app.config["PROPAGATE_EXCEPTIONS"] = False
    add(world, responds(*results) if results else asynchronous, **options)
    for sent in requests:
        body = {} if "data" in sent else {"json": BODY}
        try:
            response = world.post(**{"key": "canary", "user": "canary", **body, **sent})
        except SystemExit:
            continue
        assert "Idempotent-Replayed" not in response.headers
    found = [(event.would, event.problem) for event in observed()]
    assert found == [each if isinstance(each, tuple) else (each, None) for each in expected]
    levels = [line.levelno for line in caplog.records if line.levelno >= logging.INFO]
    assert levels == LEVELS.get(situation, levels)
    for line in ours(caplog, logging.DEBUG):
        assert "canary" not in str(vars(line)), line


def test_the_events_tell_of_the_record_which_has_the_status_alone(world, add, observed, caplog):
    add(world, responds(201, 409))
    world.post(), world.post()
    executed, replayed = observed()
    assert (executed.attempt, executed.status, executed.seconds > 0) == (1, 201, True)
    assert (replayed.first_status, replayed.status, replayed.id) == (201, 409, executed.id)
    (line,) = ours(caplog)
    assert "operation pay would have been replayed: " in line.getMessage()
    assert "status 409, first_status 201" in line.getMessage()
    (record,) = world.records()
    assert record.owner.startswith("observed:")
    assert (record.state, record.status, bytes(record.body)) == ("completed", 201, b"")
    assert record.key.hex()[:SHOWN] == executed.id
    assert "canary" not in str(record)


@STORES
def test_a_duplicate_would_have_been_rejected_while_the_first_runs(
    world, add, observed, gate, background
):
    begun = []
    add(world, lambda: (begun.append(1), gate() if len(begun) == 1 else None, "")[2])
    first = background(world.post)
    gate.wait_until_reached()
    assert world.post().status_code == 200
    gate.open()
    assert first.result().status_code == 200
    assert [event.would for event in observed()] == ["rejected", "executed"]
    assert observed()[0].problem == "request-in-progress"


def test_an_error_that_is_propagated_is_told_at_the_end_of_the_request(world, add, observed):
    add(world, responds(LookupError()))
    world.app.testing = True
    with pytest.raises(LookupError):
        world.post()
    (event,) = observed()
    assert (event.would, type(event.error), event.status) == ("rolled_back", LookupError, None)


@pytest.mark.parametrize(
    ("options", "inner", "outcomes"),
    [
        ({}, {}, ["observed"] * 2),
        ({}, {"enforce": True}, ["executed", "observed", "replayed", "observed"]),
        ({"enforce": True}, {}, ["executed", "replayed"]),
    ],
)
def test_each_view_is_observed_or_enforced_as_it_says(world, add, heard, options, inner, outcomes):
    """Of two that are observed in one request, the first is."""
    protected = idempotent(name="inner", **inner)(lambda: ("inner", 201))
    add(world, protected, name="outer", **options)
    assert [world.post().data for _ in range(2)] == [b"inner"] * 2
    assert [event.outcome for _, event in heard if event.outcome] == outcomes
    assert {event.operation for _, event in heard if event.outcome == "observed"} <= {"outer"}


def test_what_was_observed_does_not_count_once_it_is_enforced(make_world, world, add_view):
    runs = add_view(world)
    world.post()
    enforcing = make_world(SQLALCHEMY_DATABASE_URI=world.app.config["SQLALCHEMY_DATABASE_URI"])
    again = add_view(enforcing)
    replays = [enforcing.post().headers.get("Idempotent-Replayed") for _ in range(2)]
    assert (replays, runs, again) == ([None, "true"], [0], [1])


@pytest.mark.parametrize(("store", "expected"), [("hybrid", "executed"), ("redis", "unknown")])
def test_a_redis_that_is_away_matters_only_to_the_store_redis(
    make_world, add, heard, would, store, expected
):
    nowhere = {"IDEMPOTENCY_STORE": store, "IDEMPOTENCY_REDIS_URL": "redis://127.0.0.1:1/0"}
    world = make_world(IDEMPOTENCY_ENFORCE=False, **nowhere)
    add(world, atomic=False)
    assert world.post().status_code == 201
    assert would() == [expected]
    assert [name for name, _ in heard].count("store_failed") == (expected == "unknown")
