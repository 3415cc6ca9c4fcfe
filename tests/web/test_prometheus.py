"""What Prometheus is told of requests and records: how many, and how long. Never whose."""

import logging
import math
import threading
from unittest.mock import Mock

import pytest
from flask import Flask
from prometheus_client import CollectorRegistry, generate_latest

import servers
from flask_idempotency import ConfigurationError
from flask_idempotency.integrations import prometheus
from flask_idempotency.integrations.opentelemetry import instrument_app
from flask_idempotency.integrations.prometheus import FRESH_SECONDS, RecordsCollector, export_metrics
from tests.log import ours
from tests.waiting import wait_until
from tests.web.conftest import add


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def value(registry):
    """One number, by its name and labels; None if nobody has told it."""
    return lambda name, **labels: registry.get_sample_value(f"idempotency_{name}", labels)


def add_ends(world, *statuses, **options):
    left = list(statuses)

    def pay():
        status = left.pop(0)
        if status is SystemExit:
            raise status
        return "", status

    add(world, pay, **options)


class TestRequests:
    @pytest.fixture
    def requests(self, value):
        return lambda outcome, problem="": value(
            "requests_total", operation="pay", outcome=outcome, problem=problem
        )

    def test_they_are_timed_and_what_has_not_happened_is_0(self, world, registry, requests, value):
        """Later it is an increase. Which outcomes are counted as what: ``test_outcomes_told.py``."""
        export_metrics(world.app, registry=registry)
        export_metrics(world.app, registry=registry)  # counted once all the same
        add_ends(world, 500, 201)
        world.post(key="canary")
        assert requests("executed") == requests("interrupted") == requests("unprotected") == 0
        assert value("takeovers_total", operation="pay") == 0
        world.post(key="canary"), world.post(key="canary")
        assert requests("executed") == requests("replayed") == 1
        counted = {"takeovers_total": 1, "execution_seconds_count": 2, "response_seconds_count": 1}
        assert {name: value(name, operation="pay") for name in counted} == counted
        assert 0 < value("execution_seconds_sum", operation="pay") < 10
        text = generate_latest(registry).decode()
        assert "canary" not in text
        assert world.records()[0].key.hex()[:8] not in text

    def test_observed_ones_are_counted_by_what_they_would_have_been(
        self, world, registry, requests, value
    ):
        """Their problems count as rejections only there: alerts are about those that were."""
        export_metrics(world.app, registry=registry)
        add_ends(world, 201, 201, 500, 201, enforce=False)
        for sent in {}, {}, {}, {"json": {"amount": 6}}:
            world.post(**sent)
        assert requests("observed") == 4
        for would, problem, status in (
            ("executed", "", ""),
            ("replayed", "", "same"),
            ("replayed", "", "other"),
            ("rejected", "key-reused", ""),
        ):
            labels = {"operation": "pay", "would": would, "problem": problem, "status": status}
            assert value("observed_total", **labels) == 1
        assert value("execution_seconds_count", operation="pay") == 0

    @pytest.mark.parametrize("works", [True, False])
    def test_a_redis_that_fails_is_counted(self, make_world, redis_server, registry, value, works):
        url = redis_server.url if works else f"redis://127.0.0.1:{servers.free_port()}"
        world = make_world(IDEMPOTENCY_REDIS_URL=url)
        export_metrics(world.app, registry=registry)
        add_ends(world, 201)
        world.post()
        assert value("store_failures_total", part="lock") == (not works)


class TestRecords:
    @pytest.fixture
    def clock(self):
        """Seconds that go by when a test says so."""
        clock = Mock(return_value=0.0)
        clock.advance = lambda by: setattr(clock, "return_value", clock.return_value + by)
        return clock

    @pytest.fixture
    def collect(self, registry, clock):
        return lambda app: registry.register(RecordsCollector(app, clock=clock))

    @pytest.fixture
    def now(self, value, clock):
        """A number of a new scrape."""
        return lambda name, **labels: (clock.advance(FRESH_SECONDS), value(name, **labels))[1]

    def test_they_are_counted_by_operation_and_state_and_have_an_age(self, world, collect, now):
        collect(world.app)
        add_ends(world, 201, SystemExit, SystemExit, atomic=False)
        for name in "interrupted", "expired":
            assert now(f"records_{name}") == now(f"oldest_{name}_seconds") == 0
        world.post(key="one")
        for key in "two", "three":
            with pytest.raises(SystemExit):
                world.post(key=key)
        for change in (
            "created_at = now() - interval '1 hour'",
            "lease_expires_at = now() where status is null",
            "expires_at = now() - interval '1 hour' where status > 0",
        ):
            world.sql(f"update idempotency_record set {change}")
        assert now("records", operation="pay", state="interrupted") == 2
        for name, count in {"interrupted": 2, "expired": 1}.items():
            assert now(f"records_{name}") == count
            assert 3600 <= now(f"oldest_{name}_seconds") < 3660
        world.sql("update idempotency_record set expires_at = '-infinity' where status is not null")
        assert now("oldest_expired_seconds") == math.inf
        assert now("records_up") == 1

    @pytest.mark.parametrize("store", ["postgres", "redis"], indirect=True)
    def test_the_store_is_asked_no_more_often_than_every_ten_seconds(
        self, make_world, redis_server, collect, value, clock
    ):
        world = make_world(IDEMPOTENCY_REDIS_URL=redis_server.url)
        collect(world.app)
        add_ends(world, 201, atomic=False)
        labels = {"operation": "pay", "state": "completed"}
        assert value("records", **labels) is None
        world.post()
        clock.advance(FRESH_SECONDS - 1)
        assert value("records", **labels) is None
        clock.advance(1)
        assert value("records", **labels) == 1

    def test_a_scrape_does_not_fail_with_the_database(self, world, collect, now, caplog):
        """It asks the server to end what takes too long, before Prometheus gives it up after 10 s."""
        collect(world.app)
        world.sql("alter table idempotency_record rename to elsewhere")
        with caplog.at_level(logging.WARNING, "flask_idempotency"):
            assert now("records_up") == 0
            assert now("records_interrupted") is None
        said = "metrics: the records cannot be counted: ConfigurationError"
        assert [record.message for record in ours(caplog)] == [said]
        world.sql("alter table elsewhere rename to idempotency_record")
        assert (now("records_up"), now("records_interrupted")) == (1, 0)
        with world.app.app_context(), world.db.engine.begin() as connection:
            connection.exec_driver_sql("lock table idempotency_record")
            assert now("records_up") == 0

    def test_a_scrape_waits_for_a_silent_database_for_a_moment_only(
        self, make_world, postgres, collect, now, monkeypatch
    ):
        """And for no connection of the application's pool."""
        monkeypatch.setattr(prometheus, "PATIENCE_SECONDS", 0.2)
        options = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 30}
        with servers.FaultProxy(postgres.database("silent_scrape")) as proxy:
            world = make_world(SQLALCHEMY_DATABASE_URI=proxy.url, SQLALCHEMY_ENGINE_OPTIONS=options)
            collect(world.app)
            with world.app.app_context(), world.db.engine.connect():
                wait_until(lambda: now("records_up"), "a connection of its own")
            proxy.hang()
            threads = threading.active_count()
            assert [now("records_up") for _ in range(3)] == [0] * 3
            assert threading.active_count() == threads + 1, "a question that hangs is asked once"
            proxy.flow()
            wait_until(lambda: now("records_up"), "the records are told again")
            wait_until(lambda: threading.active_count() == threads, "the question has ended")


@pytest.mark.parametrize("tell", [export_metrics, RecordsCollector, instrument_app])
def test_without_init_app_the_message_says_what_to_do(tell):
    with pytest.raises(ConfigurationError, match=r"call idempotency\.init_app"):
        tell(Flask("shop"))
