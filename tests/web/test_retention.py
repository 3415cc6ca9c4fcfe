"""How long an answer is kept. After that the key is as new: ``tests/contract/suite.py``."""

import datetime as dt
import itertools
import time

import pytest

from flask_idempotency.core.keys import uuid7
from tests.stores import BOTH


@pytest.mark.parametrize(
    ("config", "options", "seconds"),
    [
        ({}, {}, 86400),
        ({"IDEMPOTENCY_TTL": dt.timedelta(days=7)}, {}, 7 * 86400),
        ({}, {"ttl": dt.timedelta(hours=2)}, 7200),
        ({"IDEMPOTENCY_TABLE": "shop_keys"}, {"ttl": 100}, 100),
        ({}, {"ttl": 100, "refuse_old_keys": "require"}, 700),
    ],
)
def test_how_long_is_a_setting_and_an_option(make_world, add_view, config, options, seconds):
    world = make_world(**config)
    add_view(world, **options)
    world.post(key=uuid7(round(time.time() * 1000) - 1, bytes(10)))
    table = config.get("IDEMPOTENCY_TABLE", "idempotency_record")
    ((kept,),) = world.sql(f"select expires_at - created_at from {table}")
    assert kept.total_seconds() == pytest.approx(seconds, abs=1)


@BOTH
@pytest.mark.parametrize("option", [{}, {"atomic": False}], ids=["atomic", "lease"])
def test_between_a_record_and_the_refusal_of_its_key_lies_no_time(
    world, add_view, monkeypatch, assert_problem, option
):
    """Whichever hosts answer, five minutes fast or slow, and however far the client is ahead."""

    def clock(shows):
        monkeypatch.setattr(time, "time", lambda: shows)

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
