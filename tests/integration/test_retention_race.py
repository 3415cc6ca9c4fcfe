"""A retry and a purge when a record just expires: the view has run once, or the key is refused."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
from flask import request

from flask_idempotency import KeyExpired, idempotent
from flask_idempotency.core.keys import uuid7
from flask_idempotency.stores.admin import purge_of
from flask_idempotency.testing.claims import RESPONSE, a_claim, again
from flask_idempotency.web.request import identity
from tests.drivers import EACH
from tests.stores import BOTH

TTL = 1  # the shortest
ROUNDS, KEYS = 3, 20
AROUND = 0.006
"""Seconds before the end of a record in which its retry and a purge begin; or a third of it behind."""


@pytest.fixture(params=[{}, {"atomic": False}], ids=["atomic", "lease"])
def raced(request, make_world, monkeypatch):
    """A function that pays with new keys, and again when each record ends; how often which answer came.

    The record ends when its key may no longer begin anything, to the few milliseconds between.
    """
    monkeypatch.setattr(identity, "TOLERANCE_SECONDS", 0.0)

    def race(refuse):
        world = make_world(IDEMPOTENCY_REFUSE_OLD_KEYS=refuse)
        add_view(world, **request.param)
        purge = purge_of(world.app.extensions["idempotency"].records)
        told = Counter()
        with ThreadPoolExecutor(2) as pool:
            for _ in range(ROUNDS):
                keys = [new_key() for _ in range(KEYS)]
                for key in keys:
                    assert world.post(key=key).status_code == 201
                for key, end in zip(keys, ends_of(world), strict=True):
                    together = threading.Barrier(2)
                    retry = pool.submit(meet, together, end, lambda key=key: world.post(key=key))
                    purged = pool.submit(meet, together, end, lambda: sum(purge(1000)))
                    told[answer_of(retry.result())] += 1
                    purged.result()
        return world, told

    return race


def add_view(world, **options):
    @world.app.post("/payments")
    @idempotent(ttl=TTL, **options)
    def pay():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        return {"key": request.headers["Idempotency-Key"]}, 201


def new_key():
    return uuid7(time.time_ns() // 1_000_000, secrets.token_bytes(10))


def ends_of(world):
    """When the newest records expire, in the order in which they were made."""
    ends = world.sql(
        "select extract(epoch from expires_at) from idempotency_record order by created_at"
    )
    return [float(end) for (end,) in ends[-KEYS:]]


def meet(together, end, act):
    together.wait()
    time.sleep(max(0.0, end - time.time() + random.uniform(-AROUND, AROUND / 3)))  # noqa: S311
    return act()


def answer_of(response):
    if response.status_code == 201:
        return "replay" if "Idempotent-Replayed" in response.headers else "second run"
    return response.json["type"].rpartition(":")[2]


@BOTH
def test_a_view_runs_once_or_its_key_is_refused(raced):
    world, told = raced(refuse=True)
    assert told.keys() | {"replay"} == {"replay", "key-expired"}
    assert world.count() == ROUNDS * KEYS


def test_without_the_setting_some_run_twice(raced):
    """So the race is one that could be lost."""
    world, told = raced(refuse=False)
    assert told["second run"] > 0
    assert world.count() == ROUNDS * KEYS + told["second run"]


@EACH
@BOTH
@pytest.mark.parametrize("lease", [None, 60.0])
def test_a_record_that_goes_while_its_retry_begins_does_not_let_it_begin(world, background, lease):
    """The retry's INSERT meets a record that lives, and waits for the transaction that deletes it."""
    records = world.app.extensions["idempotency"].records
    claim = a_claim(ttl=0.2, lease=lease)
    records.claim(claim).complete(RESPONSE)
    end = world.sql("select extract(epoch from expires_at)::float8 from idempotency_record")[0][0]
    with world.app.app_context(), world.db.engine.connect() as purge:
        purge.exec_driver_sql("delete from idempotency_record")
        retry = background(records.claim, replace(again(claim), begins_until=end))
        world.wait_until_blocked()
        purge.exec_driver_sql("select pg_sleep_until(to_timestamp(%s) + interval '1 ms')", (end,))
        purge.commit()
    # On a slow machine it may have waited for as long as it may: then there is no hold either.
    with suppress(KeyExpired):
        assert retry.result() is None
