"""How long an answer is kept, and that afterwards the key is as new."""

import datetime as dt
import itertools
import time

import pytest

from flask_idempotency.core.keys import birth_of, uuid7
from tests.stores import BOTH


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
def test_a_record_lives_until_its_key_is_too_old(world, add_view, monkeypatch, option):
    """However wrong the clocks are, of a host within the tolerance: there is no time in between."""
    add_view(world, ttl=100, refuse_old_keys=True, **option)
    for host, client in itertools.product([-299, 0, 299], [-99, 0, 3600, 86000]):
        with monkeypatch.context() as patch:
            now = time.time()
            patch.setattr(time, "time", lambda now=now, host=host: now + host)
            key = uuid7(round((now + client) * 1000), bytes(10))
            assert world.post(key=key).status_code == 201
        assert world.records()[-1].expires_at.timestamp() >= birth_of(key) + 100, (host, client)


def test_a_key_without_an_age_has_the_usual_retention(world, add_view):
    add_view(world, ttl=100, refuse_old_keys=True)
    world.post()
    (record,) = world.records()
    assert round((record.expires_at - record.created_at).total_seconds(), 1) == 100


@pytest.mark.parametrize("option", [True, "require"])
def test_however_wrong_the_clock_of_a_host_is_an_old_key_does_not_run_again(
    world, add_view, monkeypatch, option
):
    runs = add_view(world, ttl=86400, refuse_old_keys=option)
    now = time.time()
    key = uuid7(round((now - 2 * 86400) * 1000), bytes(10))
    for days in -400, -2, -1.1, 2, 400:
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda days=days: now + days * 86400)
            assert world.post(key=key).status_code in ({409} if option is True else {409, 400})
    assert runs == []
