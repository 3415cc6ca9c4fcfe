"""What the commands say of routes and records that are only observed."""

from __future__ import annotations

import json

import pytest

from flask_idempotency import idempotent
from flask_idempotency.core.keys import SHOWN
from flask_idempotency.operate.find import admin
from flask_idempotency.web.routes import app_state
from tests.integration.commands.running import not_ok, runner
from tests.killed import Killed

LEASED = {"atomic": False}


pytestmark = pytest.mark.usefixtures("patient_observing")


@pytest.fixture
def config(store):
    return {"IDEMPOTENCY_ENFORCE": False}


@pytest.fixture
def world(make_world, config, redis_server):
    return make_world(**config, IDEMPOTENCY_REDIS_URL=redis_server.url)


def add(world, view=lambda: ("", 201), **options):
    world.app.add_url_rule("/payments", "pay", idempotent(**options)(view), methods=["POST"])


def listed(world, *arguments):
    return json.loads(runner(world.app)("list", "--json", *arguments).output)


def die():
    raise Killed


def test_check_names_what_is_only_observed(world):
    add(world)
    world.app.add_url_rule(
        "/orders", "order", idempotent(enforce=True)(lambda: "order"), methods=["POST"]
    )
    checked = runner(world.app)("check")
    assert not_ok(checked).keys() <= {"Redis memory", "synchronous"}
    assert (
        "2 of 2 endpoints that change something are protected; 1 only observed: pay" in checked.output
    )


@pytest.mark.parametrize(
    ("store", "options"), [("postgres", {}), ("hybrid", LEASED), ("redis", LEASED)], indirect=["store"]
)
def test_a_record_is_observed_whatever_became_of_it(world, options):
    add(world, **options)
    world.post(key="key-1")
    world.app.view_functions["pay"] = idempotent(**options)(die)
    with pytest.raises(Killed):
        world.post(key="key-2")
    assert [line["state"] for line in listed(world)] == ["observed", "observed"]
    assert len(listed(world, "--state", "observed")) == 2
    assert listed(world, "--state", "interrupted") == []
    assert "2 records in all: 2 observed" in runner(world.app)("list").output
    with world.app.app_context():
        overview = admin(app_state(world.app)).overview()
    assert overview.interrupted == 0
    (row,) = json.loads(runner(world.app)("forget", "--scope", "alice", "--yes", "--json").output)
    assert row == {"erased": 2, "in_progress": 0, "interrupted": 0}


@pytest.mark.parametrize("store", ["redis"], indirect=True)
def test_a_record_that_is_observed_expires_in_redis_whatever_became_of_it(world):
    add(world, die, **LEASED, ttl=60)
    with pytest.raises(Killed):
        world.post()
    records = app_state(world.app).records
    (name,) = records.client.scan_iter(match=f"{records.prefix}*")
    assert 0 < records.client.pttl(name) <= 60_000


@pytest.mark.parametrize("store", ["postgres", "redis"], indirect=True)
def test_what_is_only_observed_is_not_released(world):
    add(world, die, **LEASED)
    with pytest.raises(Killed):
        world.post()
    (line,) = listed(world)
    result = runner(world.app)("release", "--why=asked", line["key"])
    assert result.exit_code == 1
    assert f"{line['key']} is observed" in result.output


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_a_key_finds_the_record_that_was_only_observed(world):
    add(world)
    world.post()
    (line,) = listed(world, "--key", "key-1", "--operation", "pay", "--scope", "alice")
    assert line["key"] == world.records()[0].key.hex()[:SHOWN]
    assert line["state"] == "observed"


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_a_purge_deletes_what_was_observed_and_never_ended(world):
    add(world, die, **LEASED)
    with pytest.raises(Killed):
        world.post()
    world.sql("update idempotency_record set expires_at = clock_timestamp() - interval '1 second'")
    runner(world.app)("purge")
    assert world.records() == []
