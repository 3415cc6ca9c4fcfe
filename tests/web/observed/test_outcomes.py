"""What is told of observed requests, beside the table of ``tests/web/test_outcomes_told.py``."""

import pytest

from flask_idempotency import idempotent
from flask_idempotency.core.keys import SHOWN
from tests.log import ours
from tests.web.conftest import add
from tests.web.test_outcomes_told import ends

STORES = pytest.mark.parametrize("store", ["hybrid", "sql"], indirect=True)
pytestmark = pytest.mark.usefixtures("patient_observing")


def test_the_events_tell_of_the_record_which_has_the_status_alone(world, observed, caplog):
    add(world, ends(201, 409))
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


def test_what_died_would_be_run_again_as_nothing_of_it_was_committed(world, observed):
    add(world)
    world.post()
    world.sql(
        "update idempotency_record set state = 'in_progress', status = null, completed_at = null,"
        " lease_expires_at = clock_timestamp()"
    )
    world.post()
    assert [(event.would, event.attempt) for event in observed()] == [("executed", 1), ("executed", 2)]


@STORES
def test_a_duplicate_would_have_been_rejected_while_the_first_runs(world, observed, gate, background):
    begun = []
    add(world, lambda: (begun.append(1), gate() if len(begun) == 1 else None, "")[2])
    first = background(world.post)
    gate.wait_until_reached()
    assert world.post().status_code == 200
    gate.open()
    assert first.result().status_code == 200
    assert [event.would for event in observed()] == ["rejected", "executed"]
    assert observed()[0].problem == "request-in-progress"


def test_an_error_that_is_propagated_is_told_at_the_end_of_the_request(world, observed):
    add(world, ends(LookupError()))
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
def test_each_view_is_observed_or_enforced_as_it_says(world, heard, options, inner, outcomes):
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
    make_world, heard, would, store, expected
):
    nowhere = {"IDEMPOTENCY_STORE": store, "IDEMPOTENCY_REDIS_URL": "redis://127.0.0.1:1/0"}
    world = make_world(IDEMPOTENCY_ENFORCE=False, **nowhere)
    add(world, atomic=False)
    assert world.post().status_code == 201
    assert would() == [expected]
    assert [name for name, _ in heard].count("store_failed") == (expected == "unknown")
