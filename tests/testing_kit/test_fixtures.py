"""The plugin, the store with no servers, and the clock."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import fakeredis
import pytest

from flask_idempotency import current_operation
from flask_idempotency.stores.memory import MemoryRecords
from flask_idempotency.testing import (
    CRASH_POINTS,
    NotConcurrentWarning,
    assert_idempotent,
    crash_at,
    every_crash,
    memory_store,
)
from tests.testing_kit.conftest import Shop

ROOT = Path(__file__).parents[2]


def python(*arguments, **environment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def plugin():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    name, _, module = setup["options.entry_points"]["pytest11"].strip().partition(" = ")
    assert name == "flask_idempotency"
    assert module in setup["options"]["py_modules"].split()
    return module


def test_the_plugin_costs_nothing_until_it_is_used():
    said = python(
        "-c",
        f"import sys, pytest; before = set(sys.modules); import {plugin()};"
        "print(sorted(set(sys.modules) - before))",
    )
    assert said.stdout == f"['{plugin()}']\n", said.stderr


def test_the_plugin_gives_the_fixtures(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "def test_it(idempotency_memory, idempotency_clock):\n"
        "    idempotency_clock.advance(5)\n"
        "    assert idempotency_clock() == 5\n"
    )
    said = python(
        "-m", "pytest", "-q", "-p", plugin(), "-p", "no:cacheprovider", str(tmp_path),
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
    )  # fmt: skip
    assert "1 passed" in said.stdout, said.stdout


@pytest.mark.parametrize("store", ["hybrid", "sql"], indirect=True)
def test_any_application_may_have_its_records_in_memory(shop, idempotency_memory):
    def stored():
        with shop.app.app_context(), shop.db.engine.connect() as connection:
            return connection.exec_driver_sql("select count(*) from idempotency_record").scalar()

    before = stored()  # of other tests, on the same database
    idempotency_memory(shop.app)
    assert isinstance(shop.app.extensions["idempotency"].records, MemoryRecords)
    shop.view(shop.pay)
    for point in CRASH_POINTS:
        with crash_at(point):
            assert_idempotent(shop.client, "POST", "/payments", json={}, effects=shop.payments)
    assert stored() == before


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_the_lock_of_hybrid_needs_no_server_either(shop, idempotency_memory):
    redis = fakeredis.FakeRedis()
    idempotency_memory(shop.app, redis=redis)
    inside = []

    def view():
        values = redis.mget(redis.keys())
        inside.extend(value[:2] for value in values if value != b"1:done")
        return shop.pay()

    shop.view(view)
    for crash in every_crash():
        with crash:
            assert_idempotent(shop.client, "POST", "/payments", json={}, effects=shop.payments)
    assert set(inside) == {b"1:"}
    assert set(redis.mget(redis.keys())) == {b"1:done"}


@pytest.mark.parametrize("store", ["hybrid"], indirect=True)
def test_and_has_its_own_back_afterwards(shop):
    state = shop.app.extensions["idempotency"]
    before = state.records, state.lock, state.engine, state.settings
    with memory_store(shop.app):
        assert state.settings.store == "memory"
        assert state.records is not before[0]
    assert (state.records, state.lock, state.engine, state.settings) == before


@pytest.mark.parametrize("store", ["memory"], indirect=True)
class TestClock:
    def test_retention_ends_when_the_test_says_so(self, shop, idempotency_memory, idempotency_clock):
        idempotency_memory(shop.app)
        runs = []
        shop.view(lambda: (runs.append(1), shop.pay())[1], ttl=3600)
        post = lambda: shop.client.post("/payments", headers={"Idempotency-Key": "a"})  # noqa: E731
        post()
        idempotency_clock.advance(timedelta(minutes=59))
        assert "Idempotent-Replayed" in post().headers
        idempotency_clock.advance(61)
        assert "Idempotent-Replayed" not in post().headers
        assert len(runs) == 2

    def test_and_a_lease(self, shop, idempotency_memory, idempotency_clock):
        idempotency_memory(shop.app)
        inner = []

        def view():
            if current_operation.attempt == 1:
                inner.append(post().status_code)
                idempotency_clock.advance(61)
                inner.append(post().status_code)
            return {}, 201

        def post():
            return shop.app.test_client().post("/payments", headers={"Idempotency-Key": "a"})

        shop.view(view, atomic=False, on_interrupted="retry", lease=60)
        assert post().status_code == 409, "it was taken over"
        assert inner == [409, 201]


def test_in_one_shared_connection_duplicates_come_one_after_the_other(idempotency_memory):
    shop = Shop("memory", "sqlite://")
    idempotency_memory(shop.app)
    shop.view(shop.pay)
    request = (shop.client, "POST", "/payments")
    with pytest.warns(NotConcurrentWarning, match="one after the other"):
        assert_idempotent(*request, json={}, effects=shop.payments)
    for point in CRASH_POINTS:
        with crash_at(point):
            assert_idempotent(*request, json={}, effects=shop.payments, duplicates=0)
    with shop.app.app_context():
        shop.db.engine.dispose()
