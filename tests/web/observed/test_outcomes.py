"""What is told of observed requests, while their clients notice nothing."""

import logging
import time

import pytest
from flask import abort, request

import flask_idempotency
from flask_idempotency import Retryable, current_operation, idempotent
from flask_idempotency.core.keys import SHOWN, uuid7
from tests.stores import BOTH
from tests.web.observed.heard import of, only

POSTGRES = pytest.mark.parametrize("store", ["postgres"], indirect=True)
STORES = pytest.mark.parametrize("store", ["postgres", "hybrid", "sql"], indirect=True)
pytestmark = pytest.mark.usefixtures("patient_observing")


@pytest.fixture
def world(make_world, store, tmp_path):
    file = {"SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path}/shop.db"} if store == "sql" else {}
    return make_world(IDEMPOTENCY_ENFORCE=False, **file)


def add(world, function=lambda: ("", 201), **options):
    world.app.add_url_rule("/payments", "pay", idempotent(**options)(function), methods=["POST"])


@STORES
def test_a_retry_runs_again_and_would_have_been_replayed(world, heard, add_view):
    runs = add_view(world)
    first, second = world.post(), world.post()
    assert (first.status_code, second.status_code) == (201, 201)
    assert runs == [0, 0]
    assert "Idempotent-Replayed" not in second.headers
    executed, replayed = of(heard)
    assert (executed.would, executed.attempt, executed.status) == ("executed", 1, 201)
    assert (replayed.would, replayed.first_status, replayed.status) == ("replayed", 201, 201)
    assert executed.id == replayed.id
    assert executed.seconds > 0


@STORES
@pytest.mark.parametrize("options", [{}, {"atomic": False}])
def test_what_was_begun_too_often_would_have_been_held(world, heard, options):
    add(world, lambda: ("", 403), max_attempts=2, **options)
    assert [world.post().status_code for _ in range(4)] == [403] * 4
    free = "released" if options else "rolled_back"
    assert [event.would for event in of(heard)] == [free, free, "rejected", "rejected"]
    assert {event.problem for event in of(heard)[2:]} == {"operation-interrupted"}


@POSTGRES
def test_a_retry_that_gets_another_response_is_a_warning(world, heard, caplog):
    statuses = iter([201, 409])
    add(world, lambda: ("", next(statuses)))
    with caplog.at_level(logging.INFO, "flask_idempotency"):
        world.post()
        assert caplog.records == []
        world.post()
    assert (of(heard)[1].first_status, of(heard)[1].status) == (201, 409)
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert "operation pay would have been replayed: " in line.getMessage()
    assert "status 409, first_status 201" in line.getMessage()


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        ({"key": None}, "key-required"),
        ({"key": "a,b"}, "key-malformed"),
        ({"user": ""}, "scope-unknown"),
        ({"json": {"amount": 6}}, "key-reused"),
        ({"data": b"x" * 2000}, "body-too-large"),
    ],
)
def test_what_would_have_been_rejected_gets_its_response(make_world, heard, caplog, sent, problem):
    world = make_world(IDEMPOTENCY_ENFORCE=False, IDEMPOTENCY_MAX_REQUEST_BYTES=1000)
    add(world, lambda: (request.get_data(), 201))
    world.post()
    heard.clear()
    with caplog.at_level(logging.INFO, "flask_idempotency"):
        assert world.post(**sent).status_code == 201
    assert (only(heard).would, only(heard).problem, only(heard).status) == ("rejected", problem, 201)
    levels = [line.levelno for line in caplog.records]
    assert levels == ([] if problem == "key-required" else [logging.INFO])


def test_a_body_must_be_json_only_where_it_is_compared_as_json(world, heard):
    add(world, lambda: (request.get_data(), 201), fingerprint="json")
    response = world.post(data=b"{", headers={"Content-Type": "application/json"})
    assert (response.status_code, response.data) == (201, b"{")
    assert (only(heard).would, only(heard).problem) == ("rejected", "body-malformed")


def test_a_duplicate_would_have_been_rejected_while_the_first_runs(world, heard, gate, background):
    statuses = iter([201, 202])

    def view():
        if (status := next(statuses)) == 201:
            gate()
        return "", status

    add(world, view)
    first = background(world.post)
    gate.wait_until_reached()
    assert world.post().status_code == 202
    assert (only(heard).would, only(heard).problem) == ("rejected", "request-in-progress")
    gate.open()
    assert first.result().status_code == 201
    assert of(heard)[1].would == "executed"


@pytest.mark.parametrize("respond", [lambda: ("", 503), lambda: abort(403), lambda: 1 / 0])
def test_what_would_not_have_been_stored_is_free_again(world, heard, respond):
    add(world, respond)
    world.app.config["PROPAGATE_EXCEPTIONS"] = False
    world.post()
    world.post()
    assert [event.would for event in of(heard)] == ["rolled_back", "rolled_back"]
    assert [event.attempt for event in of(heard)] == [1, 2]


def test_an_error_that_is_propagated_is_told_at_the_end_of_the_request(world, heard):
    add(world, lambda: 1 / 0)
    world.app.testing = True
    with pytest.raises(ZeroDivisionError):
        world.post()
    assert only(heard).would == "rolled_back"
    assert isinstance(only(heard).error, ZeroDivisionError)
    assert only(heard).status is None


def raise_(error):
    raise error


@pytest.mark.parametrize(
    ("respond", "options", "would"),
    [
        (lambda: ("", 500), {}, "executed"),
        (lambda: 1 / 0, {}, "executed"),
        (lambda: ("", 403), {}, "released"),
        (lambda: raise_(Retryable()), {}, "executed"),
        (lambda: raise_(SystemExit()), {}, "interrupted"),
    ],
)
def test_what_is_not_atomic_is_judged_by_its_own_rules(world, heard, respond, options, would):
    add(world, respond, atomic=False, **options)
    try:
        world.post()
    except SystemExit:
        assert would == "interrupted"
    assert only(heard).would == would
    assert only(heard).error is None or would != "executed", "its response is stored"


@pytest.mark.parametrize(
    ("options", "would", "problem"),
    [
        ({}, "executed", None),
        ({"atomic": False}, "rejected", "operation-interrupted"),
        ({"atomic": False, "on_interrupted": "retry"}, "executed", None),
    ],
)
def test_after_a_crash_the_route_says_what_would_have_been(world, heard, options, would, problem):
    exits = [SystemExit()]
    add(world, lambda: raise_(exits.pop()) if exits else ("", 201), **options)
    with pytest.raises(SystemExit):
        world.post()
    heard.clear()
    assert world.post().status_code == 201
    assert (only(heard).would, only(heard).problem) == (would, problem)


def test_of_two_views_in_one_request_the_first_is_observed(world, heard):
    inner = idempotent(name="inner")(lambda: ("inner", 201))
    add(world, inner, name="outer")
    assert world.post().data == b"inner"
    assert only(heard).operation == "outer"


def test_without_a_key_where_none_is_required_it_would_have_run_unprotected(world, heard):
    add(world, required=False)
    world.post(key=None)
    assert only(heard).would == "unprotected"


def test_what_protect_skips_is_not_observed(world, heard):
    world.app.add_url_rule("/payments", "pay", lambda: "", methods=["POST"])
    world.idempotency.protect(world.app, skip=lambda request: True)
    assert world.post().status_code == 200
    assert of(heard) == []


CALLABLES = ["scope", "key", "fingerprint", "authorize_replay"]


@pytest.mark.parametrize("option", CALLABLES)
@pytest.mark.parametrize("atomic", [True, False])
def test_a_callable_that_fails_would_have_failed_and_the_view_runs(
    make_world, heard, caplog, option, atomic
):
    def broken(*_):
        raise LookupError("canary")

    world = make_world(IDEMPOTENCY_ENFORCE=False)
    add(world, atomic=atomic, **{option: broken})
    assert world.post().status_code == 201
    assert world.post().status_code == 201
    failed = ("rejected", None)
    first = ("executed", None) if option == "authorize_replay" else failed
    assert [(event.would, event.problem) for event in of(heard)] == [first, failed]
    assert any(isinstance(event.error, LookupError) for event in of(heard))
    assert {record.levelno for record in caplog.records} >= {logging.WARNING}
    assert "canary" not in caplog.text


def test_a_route_may_be_enforced_where_the_application_observes(world, heard):
    add(world, enforce=True)
    world.post()
    assert world.post().headers["Idempotent-Replayed"] == "true"
    assert of(heard) == []


def test_what_was_observed_does_not_count_once_it_is_enforced(make_world, heard, add_view):
    world = make_world(IDEMPOTENCY_ENFORCE=False)
    runs = add_view(world)
    world.post()
    config = {"SQLALCHEMY_DATABASE_URI": world.app.config["SQLALCHEMY_DATABASE_URI"]}
    enforcing = make_world(**config)
    again = add_view(enforcing)
    enforcing.post()
    assert enforcing.post().headers["Idempotent-Replayed"] == "true"
    assert (runs, again) == ([0], [1])


@POSTGRES
def test_a_record_of_it_has_the_status_alone(world, heard):
    add(world, lambda: ("canary", 201, {"X-Canary": "canary"}))
    world.post()
    (record,) = world.records()
    assert record.owner.startswith("observed:")
    assert (record.state, record.status, bytes(record.body)) == ("completed", 201, b"")
    assert record.key.hex()[:SHOWN] == only(heard).id
    assert "canary" not in str(record)


def test_current_operation_says_that_an_observed_view_has_none(world, heard):
    said = []

    def view():
        assert not current_operation
        with pytest.raises(RuntimeError) as raised:
            current_operation.key  # noqa: B018
        said.append(str(raised.value))
        return "", 201

    add(world, view)
    world.post()
    assert "only observed" in said[0]


def test_each_request_has_one_outcome_also_where_the_view_raises_a_problem_of_ours(world, heard):
    add(world, lambda: raise_(flask_idempotency.KeyReused()))
    assert world.post().status_code == 422
    assert [(name, event.outcome) for name, event in heard if event.outcome] == [
        ("operation_observed", "observed")
    ]


def test_an_enforced_function_that_an_observed_view_calls_is_enforced(world, heard):
    inner = idempotent(enforce=True, name="inner")(lambda: ("inner", 201))
    add(world, inner)
    world.post()
    world.post()
    assert [event.outcome for _, event in heard if event.outcome] == [
        "executed", "observed", "replayed", "observed",
    ]  # fmt: skip


@pytest.mark.parametrize("store", ["redis"], indirect=True)
def test_an_option_that_the_store_does_not_support_is_no_matter_while_observed(
    make_world, redis_server, heard, caplog
):
    world = make_world(IDEMPOTENCY_ENFORCE=False, IDEMPOTENCY_REDIS_URL=redis_server.url)
    atomic = idempotent(lambda: ("", 201))
    world.app.add_url_rule("/payments", "pay", atomic, methods=["POST"])

    def order():
        return atomic()

    world.app.add_url_rule("/orders", "order", order, methods=["POST"])
    assert world.post().status_code == world.post("/orders").status_code == 201
    assert "operation pay: pay is atomic, which the store 'redis' cannot be" in caplog.text


NOWHERE = "redis://127.0.0.1:1/0"


@pytest.mark.parametrize(("store", "would"), [("hybrid", "executed"), ("redis", "unknown")])
def test_a_redis_that_is_away_matters_only_to_the_store_redis(make_world, heard, store, would):
    world = make_world(
        IDEMPOTENCY_ENFORCE=False,
        IDEMPOTENCY_STORE=store,
        IDEMPOTENCY_REDIS_URL=NOWHERE,
    )
    add(world, atomic=False)
    assert world.post().status_code == 201
    assert only(heard).would == would
    assert [name for name, _ in heard].count("store_failed") == (would == "unknown")


async def _async_view():
    return "", 201


def test_an_async_view_is_observed(world, heard):
    add(world, _async_view)
    world.post()
    assert world.post().status_code == 201
    assert [event.would for event in of(heard)] == ["executed", "replayed"]


def test_a_mistake_in_the_set_up_is_logged_and_not_raised(world, heard, caplog):
    world.app.add_url_rule("/payments", "pay", lambda: ("", 201), methods=["POST"])
    protected = idempotent(world.app.view_functions["pay"])
    assert protected
    assert world.post().status_code == 201
    assert "is not protected by its @idempotent" in caplog.text


@BOTH
def test_neither_key_nor_scope_nor_body_is_in_any_line(world, heard, caplog):
    add(world, lambda: ("canary", 201))
    with caplog.at_level(logging.DEBUG, "flask_idempotency"):
        for _ in range(2):
            world.post(key="canary", user="canary", json={"canary": "canary"})
        world.post(key="canary", user="canary", json={"canary": "other"})
    assert len(caplog.records) >= 3
    for record in caplog.records:
        assert "canary" not in str(vars(record)), record


@STORES
@pytest.mark.parametrize("atomic", [True, False])
def test_an_old_key_would_have_been_refused_and_leaves_nothing(world, heard, add_view, atomic):
    runs = add_view(world, ttl=60, refuse_old_keys=True, atomic=atomic)
    old = uuid7(round((time.time() - 61) * 1000), bytes(10))
    assert [world.post(key=old).status_code for _ in range(2)] == [201, 201]
    assert len(runs) == 2
    assert [(event.would, event.problem) for event in of(heard)] == [("rejected", "key-expired")] * 2
    assert world.records() == []
    world.post(key="order-1")
    assert of(heard)[-1].would == "executed", "the store is not left alone after a refusal"


@STORES
def test_a_birth_that_is_missing_would_have_been_asked_for(world, heard, add_view):
    add_view(world, refuse_old_keys="require")
    assert world.post().status_code == 201
    assert (only(heard).would, only(heard).problem) == ("rejected", "key-malformed")
