"""A Redis that a test may stop, and ways to it."""

import pytest
import redis

import servers


@pytest.fixture
def own_redis():
    with servers.Redis() as server:
        yield server


@pytest.fixture
def behind(own_redis):
    with redis.Redis.from_url(own_redis.url) as client:
        yield client


@pytest.fixture
def proxy(own_redis):
    with servers.FaultProxy(own_redis.url) as proxy:
        yield proxy
