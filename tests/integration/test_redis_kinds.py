"""Each kind of Redis, by URL and as a client of the application's own: what it is to hold is there."""

from urllib.parse import quote

import pytest
import redis
from redis.connection import parse_url
from redis.sentinel import Sentinel

import servers
from flask_idempotency.core.records import StoredResponse
from flask_idempotency.stores.redis import RedisRecords
from tests.contract.claims import a_claim

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


def test_each_node_of_a_cluster_is_asked_for_its_own_records(cluster, tmp_path):
    with redis.RedisCluster.from_url(cluster.url, decode_responses=True) as client:
        records = RedisRecords(client, f"{tmp_path.name}:")
        claims = [a_claim(lease=60) for _ in range(20)]
        for claim in claims:
            lease = records.claim(claim)
            lease.record("ü", b"1")
            lease.complete(StoredResponse(201, (), b"\xff\x00"))
        lines = records.admin().lines(50, state="completed")
        assert {line.key for line in lines} == {claim.key[:8].hex() for claim in claims}
        assert {(each.operation, each.status, each.bytes) for each in lines} == {("pay", 201, 2)}
        assert list(records.admin().notes(claims[0].key)[0]) == ["ü"]
