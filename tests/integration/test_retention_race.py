"""A retry and a purge when a record just expires: the view has run once, or its old key is refused."""

import random
import secrets
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from flask_idempotency.core.keys import uuid7
from tests.integration.commands.purging import purged

TTL = 60
KEYS = 60
AROUND = 0.006
"""Seconds before the end of a record in which its retry and a purge begin; or a third of it behind."""


@pytest.mark.parametrize("refuse", [True, False], ids=["old keys are refused", "they are not"])
@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "lease"])
def test_a_view_runs_once_or_its_key_is_refused(make_world, add_view, monkeypatch, atomic, refuse):
    """Each key has become too old by the clock of the host when its record ends."""
    real = time.time
    world = make_world(IDEMPOTENCY_REFUSE_OLD_KEYS=refuse)
    add_view(world, ttl=TTL, atomic=atomic)
    told = Counter()

    def meet(together, end, act):
        together.wait()
        time.sleep(max(0.0, end - real() + random.uniform(-AROUND, AROUND / 3)))  # noqa: S311
        return act()

    with ThreadPoolExecutor(2) as pool:
        for _ in range(KEYS):
            with monkeypatch.context() as patch:
                patch.setattr(time, "time", lambda: real() - TTL - 1)
                key = uuid7(round(time.time() * 1000), secrets.token_bytes(10))
                assert world.post(key=key).status_code == 201
            end = real() + 2 * AROUND
            world.sql("update idempotency_record set expires_at = to_timestamp(:end)", end=end)
            together = threading.Barrier(2)
            retry = pool.submit(meet, together, end, lambda key=key: world.post(key=key))
            deleted = pool.submit(meet, together, end, lambda: purged(world))
            response = retry.result()
            deleted.result()
            if response.status_code != 201:
                told[response.json["type"].rpartition(":")[2]] += 1
            elif "Idempotent-Replayed" not in response.headers:
                told["second run"] += 1
    assert world.count() == KEYS + told["second run"]
    if refuse:
        assert told.keys() <= {"key-expired"}
    else:
        assert told["second run"] > 0, "so the race is one that could be lost"
