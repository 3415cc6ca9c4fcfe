"""Each kind of Redis, by URL and as a client of the application's own: it holds lock and marker."""

from __future__ import annotations

from urllib.parse import quote

import pytest
import redis
from redis.connection import parse_url
from redis.sentinel import Sentinel

import servers

# A user and a password that mean something else in a URL, and as a URL must have them.
USER, SECRET = "us:er@/", "p@ss:/w%rd#?"
LOGIN = f"{quote(USER, safe='')}:{quote(SECRET, safe='')}"


@pytest.fixture(scope="module")
def own_redis():
    """Not the session's: of one that the environment names, neither socket nor password are known."""
    with servers.Redis() as server:
        with redis.Redis.from_url(server.url) as client:
            client.execute_command("ACL", "SETUSER", USER, "on", f">{SECRET}", "~*", "+@all")
        yield server


class OneMaster(Sentinel):
    """As if its Sentinels had named this one."""

    def __init__(self, url):
        options = parse_url(url)
        self.address = options.pop("host"), options.pop("port")
        super().__init__([], **options)

    def discover_master(self, service_name):
        return self.address


URLS = {
    "another database": lambda server: server.url.removesuffix("/0") + "/3",
    "a Unix socket": lambda server: f"unix://:{server.password}@{server.data}/redis.sock?db=0",
    "an odd password": lambda server: f"redis://{LOGIN}@127.0.0.1:{server.port}/0",
}
CLIENTS = {
    "decoding": lambda url: redis.Redis.from_url(url, decode_responses=True),
    "RESP 3": lambda url: redis.Redis.from_url(url, protocol=3),
    "a Sentinel's master": lambda url: OneMaster(url).master_for("shop"),
    "a decoding cluster": lambda url: redis.RedisCluster.from_url(url, decode_responses=True),
}


@pytest.mark.parametrize("kind", [*URLS, *CLIENTS])
def test_lock_and_marker_are_in_redis(make_world, add_view, assert_replayed, request, kind):
    server = request.getfixturevalue("cluster" if "cluster" in kind else "own_redis")
    if kind in URLS:
        given = {"IDEMPOTENCY_REDIS_URL": URLS[kind](server)}
    else:
        given = {"init": {"redis": CLIENTS[kind](server.url)}}
    prefix = f"{kind.replace(' ', '-')}:"
    world = make_world(IDEMPOTENCY_REDIS_PREFIX=prefix, **given)
    database = 3 if kind == "another database" else 0
    with redis.Redis(port=server.port, password=server.password, db=database, protocol=2) as behind:
        during = []

        def held():
            return [behind.get(key) for key in behind.keys(f"{prefix}*")]

        runs = add_view(world, during=lambda: during.extend(held()))
        first = world.post()
        (lock,) = during
        assert lock.startswith(b"1:")
        assert lock != b"1:done"
        assert held() == [b"1:done"]
        assert_replayed(first, world.post())
    assert runs == [1]
