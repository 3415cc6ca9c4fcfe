"""The store ``redis`` reads what it needs: counted in bytes and in round trips, on a real server."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import redis

import servers
from flask_idempotency.core.records import StoredResponse
from flask_idempotency.stores.redis.store import RedisRecords
from tests.contract.claims import a_claim, again, stored_record
from tests.waiting import wait_until

BIG = b"x" * 1_000_000
ANSWER = StoredResponse(201, (("Content-Type", "text/plain"),), b"paid")


class CountingConnection(redis.Connection):
    """Counts what is sent at once: each waits for its reply."""

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


@pytest.fixture
def records(client, tmp_path):
    return RedisRecords(lambda: client, f"{tmp_path.name}:")


@contextlib.contextmanager
def cost(client):
    """What the server has sent meanwhile, in bytes, and how many round trips there were."""
    measured = {"bytes": -client.info("stats")["total_net_output_bytes"]}
    own = len(repr(client.info("stats")))  # about what one INFO costs; the bounds are far from it
    before = CountingConnection.sent
    yield measured
    measured["trips"] = CountingConnection.sent - before
    measured["bytes"] += client.info("stats")["total_net_output_bytes"] - 2 * own


def test_a_replay_does_not_fetch_the_steps(client, records):
    claim = a_claim(lease=60)
    lease = records.claim(claim)
    for number in range(20):
        lease.record(f"step {number}", BIG)
    with cost(client) as before_the_end:
        assert records.look(claim.key).response is None
    lease.complete(ANSWER)
    with cost(client) as replay:
        assert stored_record(records, claim).response == ANSWER
    for measured in before_the_end, replay:
        assert measured["trips"] == 1
        assert measured["bytes"] < 20_000


@pytest.mark.parametrize(("steps", "trips"), [(0, 1), (100, 2), (4, 5)])
def test_large_steps_are_fetched_a_few_at_a_time(client, records, steps, trips):
    """So that the server answers each time before its client gives up; small ones come together."""
    claim = a_claim(lease=60)
    lease = records.claim(claim)
    results = {f"step {number}": BIG if steps == 4 else b"1" for number in range(steps)}
    for name, result in results.items():
        lease.record(name, result)
    lease.release()
    second = records.take_over(again(claim), stored_record(records, claim))
    with cost(client) as measured:
        assert second.steps() == results
    assert measured["trips"] == trips


@pytest.mark.parametrize("command", ["overview", "newest"])
def test_the_operators_lists_take_few_round_trips(client, records, command):
    for _ in range(1000):
        records.claim(a_claim(lease=60)).complete(StoredResponse(200, (), b"x" * 1000))
    admin = records.admin()
    with cost(client) as measured:
        if command == "overview":
            assert admin.overview().total == 1000
        else:
            assert len(admin.newest(None, None, 50)) == 50
    total = client.dbsize()  # SCAN passes everybody's keys
    assert measured["trips"] <= 10 + 2 * total / 1000
    assert measured["bytes"] < 1000 * 500


def test_a_cluster_and_a_client_that_decodes_list_the_same(tmp_path):
    """Of a cluster each node is asked for its own records."""
    with servers.Redis(settings={"cluster-enabled": "yes"}) as server:
        with redis.Redis.from_url(server.url) as node:
            node.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
            is_ready = "cluster_state:ok"
            wait_until(lambda: is_ready in str(node.execute_command("CLUSTER", "INFO")), is_ready)
        for options in {}, {"decode_responses": True}, {"protocol": 2}:
            with redis.RedisCluster.from_url(server.url, **options) as client:
                records = RedisRecords(lambda client=client: client, f"{tmp_path.name}{options}:")
                claims = [a_claim(lease=60) for _ in range(20)]
                for claim in claims:
                    lease = records.claim(claim)
                    lease.record("ü", b"1")
                    lease.complete(replace(ANSWER, body=b""))
                lines = records.admin().newest(None, "completed", 50)
                assert {line.key for line in lines} == {claim.key[:8].hex() for claim in claims}
                assert {(line.operation, line.status, line.bytes) for line in lines} == {
                    (claims[0].name, 201, 0)
                }
                assert [step.name for step in records.admin().steps(claims[0].key)] == ["ü"]
