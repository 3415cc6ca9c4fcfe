"""A retry and a purge when a record just expires: the view has run once, or its old key is refused."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from flask import request

from flask_idempotency import idempotent
from flask_idempotency.core.keys import uuid7
from tests.integration.commands.purging import purged
from tests.stores import BOTH

TTL = 60
KEYS = 60
AROUND = 0.006
"""Seconds before the end of a record in which its retry and a purge begin; or a third of it behind."""


@pytest.fixture(params=[{}, {"atomic": False}], ids=["atomic", "lease"])
def raced(request, make_world, monkeypatch):
    """A function that pays with new keys, and again when each record ends; how often which answer came.

    By then each key is too old, by the clock of the host.
    """
    real = time.time

    def race(refuse):
        world = make_world(IDEMPOTENCY_REFUSE_OLD_KEYS=refuse)
        add_view(world, **request.param)
        told = Counter()
        with ThreadPoolExecutor(2) as pool:
            for _ in range(KEYS):
                with monkeypatch.context() as patch:
                    patch.setattr(time, "time", lambda: real() - TTL - 1)
                    key = uuid7(round(time.time() * 1000), secrets.token_bytes(10))
                    assert world.post(key=key).status_code == 201
                end = time.time() + 2 * AROUND
                world.sql("update idempotency_record set expires_at = to_timestamp(:end)", end=end)
                together = threading.Barrier(2)
                retry = pool.submit(meet, together, end, lambda key=key: world.post(key=key))
                deleted = pool.submit(meet, together, end, lambda: purged(world))
                told[answer_of(retry.result())] += 1
                deleted.result()
        return world, told

    return race


def add_view(world, **options):
    @world.app.post("/payments")
    @idempotent(ttl=TTL, **options)
    def pay():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        return {"key": request.headers["Idempotency-Key"]}, 201


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
    assert world.count() == KEYS


def test_without_the_setting_some_run_twice(raced):
    """So the race is one that could be lost."""
    world, told = raced(refuse=False)
    assert told["second run"] > 0
    assert world.count() == KEYS + told["second run"]
