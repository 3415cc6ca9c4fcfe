"""The store ``redis``: round trips of a step, and the nodes of a cluster."""

from __future__ import annotations

from itertools import pairwise

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


def test_a_step_is_one_look_and_one_change_and_all_results_come_together(redis_server, tmp_path):
    options = {"connection_class": CountingConnection, "socket_timeout": 1}
    pool = redis.ConnectionPool.from_url(redis_server.url, **options)
    with redis.Redis(connection_pool=pool) as client:
        client.ping()
        records, claim = RedisRecords(client, f"{tmp_path.name}:"), a_claim(lease=60)
        taken = [CountingConnection.sent]
        lease = records.claim(claim)
        taken.append(CountingConnection.sent)
        results = {f"step {number}": b"1" for number in range(20)}
        for name, result in results.items():
            lease.record(name, result)
        taken.append(CountingConnection.sent)
        lease.release()
        second = records.take_over(again(claim), stored_record(records, claim))
        before = CountingConnection.sent
        assert second.steps() == results
        assert CountingConnection.sent - before == 1
    claimed, recorded = (after - was for was, after in pairwise(taken))
    assert (claimed, recorded) == (2, 40)


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
