"""A Redis that a test may stop, and an application that uses it."""

from __future__ import annotations

import pytest

import servers


@pytest.fixture
def own_redis():
    with servers.Redis() as server:
        yield server


@pytest.fixture
def redis_world(make_world, own_redis):
    return make_world(IDEMPOTENCY_REDIS_URL=own_redis.url)
