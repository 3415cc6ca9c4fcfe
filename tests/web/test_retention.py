"""How long an answer is kept, and that afterwards the key is as new."""

import datetime as dt
import itertools
import time

import pytest

from flask_idempotency.core.keys import uuid7
from tests.stores import BOTH


@pytest.fixture
def clock(monkeypatch):
    """Sets what the clock of the application's host shows."""
    return lambda shows: monkeypatch.setattr(time, "time", lambda: shows)


def expire(world):
    world.sql("update idempotency_record set expires_at = clock_timestamp() - interval '1 second'")


def test_after_its_time_a_key_is_as_new(world, add_view):
    runs = add_view(world)
    assert world.post().json["run"] == 1
    expire(world)
    renewed = world.post(json={"amount": 6})
    assert (renewed.status_code, renewed.json["run"]) == (201, 2)
    assert "Idempotent-Replayed" not in renewed.headers
    assert world.post(json={"amount": 6}).headers["Idempotent-Replayed"] == "true"
    assert world.post().status_code == 422
    assert runs == [1, 1]
    assert len(world.records()) == 1


@BOTH
def test_an_operation_that_outlives_its_time_still_counts_once(
    app, world, add_view, gate, background, assert_problem
):
    runs = add_view(world, ttl=1, during=gate)
    first = background(world.post)
    gate.wait_until_reached()
    with app.app_context(), world.db.engine.connect() as connection:
        row = connection.exec_driver_sql(
            "select pg_sleep_until(max(expires_at) + interval '10 ms') from idempotency_record"
        )
        assert row.rowcount == 1
    assert_problem(world.post(), 409, "request-in-progress", retry=True)
    gate.open()
    assert first.result().status_code == 201
    assert world.post().headers["Idempotent-Replayed"] == "true"
    assert runs == [1]


@pytest.mark.parametrize("ttl", [7200, 7200.0, dt.timedelta(hours=2)], ids=repr)
def test_how_long_is_an_option(world, add_view, ttl):
    add_view(world, ttl=ttl)
    world.post()
    record = world.records()[0]
    kept = record.expires_at - record.created_at
    assert round(kept / dt.timedelta(hours=1), 3) == 2


def test_how_long_is_a_setting_of_a_day(make_world, add_view):
    for config, days in ({}, 1), ({"IDEMPOTENCY_TTL": dt.timedelta(days=7)}, 7):
        world = make_world(**config)
        add_view(world)
        world.post()
        record = world.records()[0]
        kept = record.expires_at - record.created_at
        assert round(kept / dt.timedelta(days=1), 3) == days


def test_another_table_is_a_setting(make_world, add_view):
    world = make_world(IDEMPOTENCY_TABLE="shop_keys")
    add_view(world)
    assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert world.count("shop_keys") == 1


@BOTH
@pytest.mark.parametrize("option", [{}, {"atomic": False}], ids=["atomic", "lease"])
def test_between_a_record_and_the_refusal_of_its_key_lies_no_time(
    world, add_view, clock, assert_problem, option
):
    """Whichever hosts answer, five minutes fast or slow, and however far the client is ahead."""
    runs, real = add_view(world, ttl=1000, refuse_old_keys=True, **option), time.time()
    for first, client in itertools.product([-299, 0, 299], [-99, 0, 299, 3600, 86000]):
        key = uuid7(round((real + client) * 1000), bytes(10))
        clock(real + first)
        assert world.post(key=key).status_code == 201
        end = world.records()[-1].expires_at.timestamp()
        clock(end + 299)  # at its last moment, by the fastest host
        assert world.post(key=key).headers["Idempotent-Replayed"] == "true"
        world.sql("delete from idempotency_record")
        clock(end - 299)  # just after it, by the slowest
        assert_problem(world.post(key=key), 409, "key-expired")
    assert len(runs) == 15


@pytest.mark.parametrize(("option", "longer"), [(False, 0), (True, 600), ("require", 600)])
def test_where_old_keys_are_refused_a_record_lives_ten_minutes_longer(world, add_view, option, longer):
    add_view(world, ttl=100, refuse_old_keys=option)
    world.post(key=uuid7(round(time.time() * 1000) - 1, bytes(10)))
    (record,) = world.records()
    assert round((record.expires_at - record.created_at).total_seconds(), 1) == 100 + longer
