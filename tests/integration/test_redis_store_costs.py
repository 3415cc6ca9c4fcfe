"""The store ``redis`` reads what it needs: counted in bytes and in round trips, on a real server."""

from __future__ import annotations

import contextlib

import pytest
import redis

from flask_idempotency.core.records import StoredResponse
from flask_idempotency.stores.redis import RedisRecords
from tests.contract.claims import a_claim, again, stored_record


class CountingConnection(redis.Connection):
    """Counts what is sent at once."""

    sent = 0

    def send_packed_command(self, *args, **kwargs):
        CountingConnection.sent += 1
        return super().send_packed_command(*args, **kwargs)


@pytest.fixture
def client(redis_server):
    options = {"connection_class": CountingConnection, "socket_timeout": 1}
    pool = redis.ConnectionPool.from_url(redis_server.url, **options)
    with redis.Redis(connection_pool=pool) as client:
        client.ping()
        yield client


@contextlib.contextmanager
def cost(client):
    """What the server has sent meanwhile, in bytes, and how many round trips there were."""
    measured = {"bytes": -client.info("stats")["total_net_output_bytes"]}
    own = len(repr(client.info("stats")))  # about what one INFO costs; the bounds are far from it
    before = CountingConnection.sent
    yield measured
    measured["trips"] = CountingConnection.sent - before
    measured["bytes"] += client.info("stats")["total_net_output_bytes"] - 2 * own


def test_a_step_is_one_look_and_one_change_and_all_results_come_together(client, tmp_path):
    records, claim = RedisRecords(client, f"{tmp_path.name}:"), a_claim(lease=60)
    with cost(client) as claimed:
        lease = records.claim(claim)
    results = {f"step {number}": b"1" for number in range(20)}
    with cost(client) as recorded:
        for name, result in results.items():
            lease.record(name, result)
    lease.release()
    second = records.take_over(again(claim), stored_record(records, claim))
    with cost(client) as fetched:
        assert second.steps() == results
    assert [each["trips"] for each in (claimed, recorded, fetched)] == [2, 40, 1]


def test_the_operators_lists_take_few_round_trips(client, tmp_path):
    records = RedisRecords(client, f"{tmp_path.name}:")
    for _ in range(1000):
        records.claim(a_claim(lease=60)).complete(StoredResponse(200, (), b"x" * 1000))
    admin = records.admin()
    for ask in lambda: admin.overview().total == 1000, lambda: len(admin.lines(50)) == 50:
        with cost(client) as measured:
            assert ask()
        total = client.dbsize()  # SCAN passes everybody's keys
        assert measured["trips"] <= 10 + 2 * total / 1000
        assert measured["bytes"] < 1000 * 600, "not the responses"


def test_each_node_of_a_cluster_is_asked_for_its_own_records(cluster, tmp_path):
    with redis.RedisCluster.from_url(cluster.url, decode_responses=True) as client:
        records = RedisRecords(client, f"{tmp_path.name}:")
        claims = [a_claim(lease=60) for _ in range(20)]
        for claim in claims:
            lease = records.claim(claim)
            lease.record("ü", b"1")
            lease.complete(StoredResponse(201, (), b""))
        lines = records.admin().lines(50, state="completed")
        assert {line.key for line in lines} == {claim.key[:8].hex() for claim in claims}
        assert {(each.operation, each.status, each.bytes) for each in lines} == {("pay", 201, 0)}
        assert list(records.admin().notes(claims[0].key)[0]) == ["ü"]
