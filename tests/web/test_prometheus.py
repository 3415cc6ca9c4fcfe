"""What Prometheus is told of requests: how many, and how long. Never whose."""

import builtins
import importlib
import sys

import pytest
from flask import Flask, request
from prometheus_client import CollectorRegistry, generate_latest

import servers
from flask_idempotency import (
    ConfigurationError,
    Retryable,
    current_operation,
    idempotent,
)
from flask_idempotency.integrations.prometheus import export_metrics
from tests.stores import BOTH


@pytest.fixture
def registry(world):
    registry = CollectorRegistry()
    export_metrics(world.app, registry=registry)
    return registry


@pytest.fixture
def value(registry):
    """One number, by its name and labels; None if nobody has told it."""

    def get(name, **labels):
        return registry.get_sample_value(f"idempotency_{name}", labels)

    return get


@pytest.fixture
def requests(value):
    def get(outcome, problem="", operation="pay"):
        return value("requests_total", operation=operation, outcome=outcome, problem=problem)

    return get


def add(world, function, **options):
    world.app.add_url_rule("/payments", "pay", idempotent(**options)(function), methods=["POST"])


def fail():
    raise RuntimeError


def fail_for_now():
    raise Retryable


@BOTH
def test_requests_are_counted_by_operation_and_outcome(world, add_view, requests):
    add_view(world)
    world.post()
    assert [requests("executed"), requests("replayed"), requests("rejected", "key-reused")] == [
        1,
        0,
        None,
    ]
    world.post()
    world.post()
    world.post(json={"amount": 6})
    assert [requests("executed"), requests("replayed"), requests("rejected", "key-reused")] == [1, 2, 1]
    world.post(key=None)
    assert requests("rejected", "key-required") == 1


def test_a_stored_failure_is_told_from_a_success(world, requests):
    add(world, fail, atomic=False)
    world.post(), world.post()
    assert [requests("executed", "operation-failed"), requests("executed"), requests("replayed")] == [
        1,
        0,
        1,
    ]


def test_an_outcome_that_has_not_happened_is_counted_from_the_first_request_on(
    world, add_view, requests
):
    """Otherwise its first time would be no increase."""
    add_view(world)
    world.post()
    assert requests("rolled_back") == requests("interrupted") == requests("unprotected") == 0
    assert requests("unprotected", "store-unavailable") == 0


def test_an_attempt_and_a_replay_are_timed_apart(world, add_view, value):
    add_view(world)
    world.post()
    assert value("execution_seconds_count", operation="pay") == 1
    assert value("response_seconds_count", operation="pay") == 0
    assert 0 < value("execution_seconds_sum", operation="pay") < 10
    world.post()
    world.post(json={"amount": 6})
    assert value("execution_seconds_count", operation="pay") == 1
    assert value("response_seconds_count", operation="pay") == 2


def test_observed_requests_are_counted_by_what_they_would_have_been(world, requests, value):
    statuses = iter([201, 201, 500])
    add(world, lambda: ("", next(statuses)), enforce=False)
    for _ in range(3):
        world.post()
    assert requests("observed") == 3

    def would(outcome, status):
        return value("observed_total", operation="pay", would=outcome, problem="", status=status)

    assert would("executed", "") == 1
    assert would("replayed", "same") == would("replayed", "other") == 1
    assert value("execution_seconds_count", operation="pay") == 0


def test_the_problem_of_a_request_counts_as_a_rejection_only_where_it_was_one(world, requests, value):
    add(world, lambda: (request.get_data(), 201), enforce=False)
    world.post()
    world.post(json={"amount": 6})
    assert requests("observed") == 2
    labels = {"operation": "pay", "would": "rejected", "problem": "key-reused", "status": ""}
    assert value("observed_total", **labels) == 1


def test_a_take_over_is_counted(world, value):
    def fail_first():
        if current_operation.attempt == 1:
            raise RuntimeError
        return ""

    add(world, fail_first)
    world.post()
    assert value("takeovers_total", operation="pay") == 0
    world.post()
    assert value("takeovers_total", operation="pay") == 1


@pytest.mark.parametrize("works", [True, False])
def test_a_redis_that_fails_is_counted(make_world, redis_server, add_view, works):
    url = redis_server.url if works else f"redis://127.0.0.1:{servers.free_port()}"
    world, registry = make_world(IDEMPOTENCY_REDIS_URL=url), CollectorRegistry()
    export_metrics(world.app, registry=registry)
    add_view(world)
    world.post()
    failures = registry.get_sample_value("idempotency_store_failures_total", {"part": "lock"})
    assert failures == (0 if works else 1)


def test_no_label_says_whose_a_key_is(world, registry, add_view):
    add_view(world)
    for key in ("canary-key", "canary-key", None, "canary\x00"):
        world.post(key=key, user="canary-user", json={"amount": "canary"})
    (record,) = world.records()
    text = generate_latest(registry).decode()
    assert "canary" not in text
    assert record.key.hex()[:8] not in text


def test_two_applications_share_the_series_of_one_registry(make_world, add_view):
    registry = CollectorRegistry()
    for _ in range(2):
        world = make_world()
        export_metrics(world.app, registry=registry)
        add_view(world)
        world.post()
    counted = {"operation": "pay", "outcome": "executed", "problem": ""}
    assert registry.get_sample_value("idempotency_requests_total", counted) == 2


def test_metrics_before_init_app_are_refused():
    with pytest.raises(ConfigurationError, match=r"call idempotency\.init_app"):
        export_metrics(Flask("shop"), registry=CollectorRegistry())


def test_metrics_that_are_exported_twice_are_counted_once(world, registry, add_view):
    export_metrics(world.app, registry=registry)
    add_view(world)
    world.post()
    counted = {"operation": "pay", "outcome": "executed", "problem": ""}
    assert registry.get_sample_value("idempotency_requests_total", counted) == 1


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    name = "flask_idempotency.integrations.prometheus"
    really = builtins.__import__

    def without(module, *rest):
        if module == "prometheus_client":
            raise ImportError("No module named 'prometheus_client'")
        return really(module, *rest)

    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'flask-idempotency\[prometheus\]'"):
        importlib.import_module(name)
