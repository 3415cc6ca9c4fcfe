"""What Prometheus is told of the records, at each scrape."""

import logging
import math
import threading
from functools import partial

import pytest
from flask import Flask
from prometheus_client import CollectorRegistry

import servers
from flask_idempotency import ConfigurationError, idempotent
from flask_idempotency.integrations import prometheus
from flask_idempotency.integrations.prometheus import FRESH_SECONDS, RecordsCollector
from tests.docs.pages import ROOT, blocks
from tests.log import ours
from tests.waiting import wait_until


class Clock:
    """Seconds that go by when a test says so."""

    def __init__(self):
        self._seconds = 0.0

    def __call__(self):
        return self._seconds

    def advance(self, seconds):
        self._seconds += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def registry_of(clock):
    def make(app):
        registry = CollectorRegistry()
        registry.register(RecordsCollector(app, clock=clock))
        return registry

    return make


@pytest.fixture
def registry(world, registry_of):
    return registry_of(world.app)


@pytest.fixture
def value_in(clock):
    """One number of a registry now; None if there is none."""

    def get(registry, name, **labels):
        clock.advance(FRESH_SECONDS)
        return registry.get_sample_value(f"idempotency_{name}", labels)

    return get


@pytest.fixture
def value(registry, value_in):
    return partial(value_in, registry)


def test_records_are_counted_by_operation_and_state(world, add_view, value):
    add_view(world)
    assert value("records", operation="pay", state="completed") is None
    for key in ("one", "two"):
        world.post(key=key)
    assert value("records", operation="pay", state="completed") == 2
    assert value("records_up") == 1


def test_interrupted_operations_are_counted_and_have_an_age(world, value):
    assert value("records_interrupted") == value("oldest_interrupted_seconds") == 0
    interrupt(world, "one")
    interrupt(world, "two")
    world.sql("update idempotency_record set created_at = now() - interval '1 hour'")
    world.sql("update idempotency_record set lease_expires_at = now() - interval '1 second'")
    assert value("records_interrupted") == 2
    assert 3600 <= value("oldest_interrupted_seconds") < 3660
    assert value("records", operation="pay", state="interrupted") == 2


def interrupt(world, key):
    """Leave an operation whose worker was told to exit."""

    def leave():
        raise SystemExit

    if "pay" not in world.app.view_functions:
        world.app.add_url_rule("/payments", "pay", idempotent(atomic=False)(leave), methods=["POST"])
    with pytest.raises(SystemExit):
        world.post(key=key)


def test_what_waits_for_a_purge_is_counted_and_has_an_age(world, add_view, value):
    add_view(world)
    world.post()
    assert value("records_expired") == value("oldest_expired_seconds") == 0
    world.sql("update idempotency_record set expires_at = now() - interval '1 hour'")
    assert value("records_expired") == 1
    assert 3600 <= value("oldest_expired_seconds") < 3660
    world.sql("update idempotency_record set expires_at = '-infinity'")
    assert value("oldest_expired_seconds") == math.inf


def test_the_store_is_asked_no_more_often_than_every_ten_seconds(world, add_view, registry, clock):
    add_view(world)

    def count():
        labels = {"operation": "pay", "state": "completed"}
        return registry.get_sample_value("idempotency_records", labels)

    assert count() is None
    world.post()
    clock.advance(FRESH_SECONDS - 1)
    assert count() is None
    clock.advance(1)
    assert count() == 1


def test_a_scrape_does_not_fail_with_the_database(world, value, caplog):
    world.sql("alter table idempotency_record rename to elsewhere")
    with caplog.at_level(logging.WARNING, "flask_idempotency"):
        assert value("records_up") == 0
        assert value("records_interrupted") is None
    assert [record.message for record in ours(caplog)] == [
        "metrics: the records cannot be counted: ConfigurationError"
    ]
    world.sql("alter table elsewhere rename to idempotency_record")
    assert value("records_up") == 1
    assert value("records_interrupted") == 0


def test_a_scrape_asks_the_server_to_end_what_takes_too_long(world, value):
    """A lock on the table: the scrape is over long before Prometheus gives it up after 10 s."""
    with world.app.app_context(), world.db.engine.begin() as connection:
        connection.exec_driver_sql("lock table idempotency_record")
        assert value("records_up") == 0


def test_a_scrape_does_not_wait_for_another_one(world, value, registry, clock, background, monkeypatch):
    """It tells the last numbers, or the first time that there are none."""
    monkeypatch.setattr(prometheus, "PATIENCE_SECONDS", 30)

    def is_up():
        return registry.get_sample_value("idempotency_records_up")

    for last in (0, 1):
        with world.app.app_context(), world.db.engine.begin() as connection:
            connection.exec_driver_sql("lock table idempotency_record")
            first = background(value, "records_up")
            world.wait_until_blocked()
            clock.advance(2 * FRESH_SECONDS)
            assert [is_up() for _ in range(4)] == [last] * 4
        assert first.result() == 1


def test_a_scrape_waits_for_a_silent_database_no_longer_than_three_seconds(
    make_world, postgres, registry_of, value_in, monkeypatch
):
    assert prometheus.PATIENCE_SECONDS == 3
    monkeypatch.setattr(prometheus, "PATIENCE_SECONDS", 0.2)
    with servers.FaultProxy(postgres.database("silent_scrape")) as proxy:
        world = make_world(SQLALCHEMY_DATABASE_URI=proxy.url)
        value = partial(value_in, registry_of(world.app))
        assert value("records_up") == 1
        proxy.hang()
        threads = threading.active_count()
        assert [value("records_up") for _ in range(3)] == [0] * 3
        assert threading.active_count() == threads + 1, "a question that hangs is asked once"
        proxy.flow()
        wait_until(lambda: value("records_up"), "the records are told again")
        wait_until(lambda: threading.active_count() == threads, "the question has ended")


def test_a_full_pool_of_the_application_is_no_matter_to_a_scrape(make_world, registry_of, value_in):
    options = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 30}
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=options)
    with world.app.app_context(), world.db.engine.connect():
        assert value_in(registry_of(world.app), "records_up") == 1


def test_registering_asks_no_database(make_world):
    world = make_world()
    world.sql("drop table idempotency_record cascade")
    registry = CollectorRegistry(auto_describe=True)
    collector = RecordsCollector(world.app)
    registry.register(collector)
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(collector)


def test_the_pages_code_serves_a_factory_that_is_called_twice_in_one_process(make_world, add_view):
    [first, *_] = (b for b in blocks(ROOT / "docs/monitoring.md", "python") if "(app))" in b.text)
    for count in (1, 2):
        world = make_world()
        exec(first.source, {"app": world.app})  # noqa: S102
        add_view(world)
        for number in range(count):
            world.post(key=f"key-{number}")
        scrape = world.client.get("/metrics").text
        assert f'idempotency_records{{operation="pay",state="completed"}} {count}.0' in scrape
        assert "idempotency_requests_total{" in scrape


@pytest.mark.parametrize("store", ["redis"], indirect=True)
def test_the_records_in_redis_are_counted(make_world, redis_server, add_view):
    world = make_world(IDEMPOTENCY_REDIS_URL=redis_server.url)
    add_view(world, atomic=False)
    world.post()
    registry = CollectorRegistry()
    registry.register(RecordsCollector(world.app))
    labels = {"operation": "pay", "state": "completed"}
    assert registry.get_sample_value("idempotency_records", labels) == 1


def test_a_collector_before_init_app_is_refused():
    with pytest.raises(ConfigurationError, match=r"call idempotency\.init_app"):
        RecordsCollector(Flask("shop"))
