"""Each kind of Redis, by URL and as a client of the application's own: it holds lock and marker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis.sentinel import Sentinel

import servers
from flask_idempotency import idempotent

pytestmark = pytest.mark.parametrize("store", ["hybrid"], indirect=True)

MASTER = "main"


@pytest.fixture(scope="module")
def own_redis() -> Iterator[Any]:
    """Not the session's: of one that the environment names, neither socket nor password are known."""
    with servers.Redis() as server:
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of one node, which has all slots."""
    with servers.Redis(settings={"cluster-enabled": "yes"}) as server:
        with redis.Redis.from_url(server.url) as client:
            client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
            wait_until(lambda: "cluster_state:ok" in raw(client, "CLUSTER", "INFO"))
        yield server


class SentinelServer(servers.Redis):
    """Redis in its other role. It has no password: the library's URL has none for Sentinels."""

    def __init__(self) -> None:
        super().__init__(settings={"requirepass": ""})
        self.password = ""

    def _command(self) -> list[str]:
        return [*super()._command(), "--sentinel"]


@pytest.fixture(scope="module")
def sentinel(own_redis: Any) -> Iterator[Any]:
    """One Sentinel that knows the other Redis as its master."""
    with SentinelServer() as server:
        with redis.Redis(port=server.port) as client:
            client.sentinel_monitor(MASTER, "127.0.0.1", own_redis.port, 1)
            client.sentinel_set(MASTER, "auth-pass", own_redis.password)
            where = ("127.0.0.1", own_redis.port)
            wait_until(lambda: Sentinel([("127.0.0.1", server.port)]).discover_master(MASTER) == where)
        yield server


def raw(client: Any, *command: str) -> str:
    answer = client.execute_command(*command)
    return answer.decode() if isinstance(answer, bytes) else str(answer)


def wait_until(condition: Callable[[], bool]) -> None:
    """A server does this by itself, and tells nobody when it has."""
    deadline = time.monotonic() + 10
    while True:
        try:
            if condition():
                return
        except redis.ConnectionError:
            pass
        assert time.monotonic() < deadline, "the server does not become ready"
        time.sleep(0.01)


# Each gives the settings and the arguments of init_app, and the server that must hold the lock.


def password_in_the_url(request: Any) -> Any:
    server = request.getfixturevalue("own_redis")
    assert f":{server.password}@" in server.url
    return {"IDEMPOTENCY_REDIS_URL": server.url}, {}, server


def another_database(request: Any) -> Any:
    server = request.getfixturevalue("own_redis")
    return {"IDEMPOTENCY_REDIS_URL": server.url.removesuffix("/0") + "/3"}, {}, server


def unix_socket(request: Any) -> Any:
    server = request.getfixturevalue("own_redis")
    url = f"unix://:{server.password}@{server.folder}/redis.sock?db=0"
    return {"IDEMPOTENCY_REDIS_URL": url}, {}, server


def client(request: Any, **options: Any) -> Any:
    server = request.getfixturevalue("own_redis")
    return {}, {"redis": redis.Redis.from_url(server.url, **options)}, server


def decoding_client(request: Any) -> Any:
    return client(request, decode_responses=True)


def resp3_client(request: Any) -> Any:
    return client(request, protocol=3)


def cluster_url(request: Any) -> Any:
    server = request.getfixturevalue("cluster")
    url = f"redis+cluster://:{server.password}@127.0.0.1:{server.port}"
    return {"IDEMPOTENCY_REDIS_URL": url}, {}, server


def cluster_client(request: Any) -> Any:
    server = request.getfixturevalue("cluster")
    return {}, {"redis": redis.RedisCluster.from_url(server.url)}, server


def decoding_cluster_client(request: Any) -> Any:
    server = request.getfixturevalue("cluster")
    return {}, {"redis": redis.RedisCluster.from_url(server.url, decode_responses=True)}, server


def sentinel_url(request: Any) -> Any:
    server, port = request.getfixturevalue("own_redis"), request.getfixturevalue("sentinel").port
    # The second one does not answer: it is asked only if the first does not.
    hosts = f"127.0.0.1:{port},127.0.0.1:{servers.free_port()}"
    url = f"redis+sentinel://:{server.password}@{hosts}/{MASTER}/0"
    return {"IDEMPOTENCY_REDIS_URL": url}, {}, server


def sentinel_client(request: Any) -> Any:
    server, port = request.getfixturevalue("own_redis"), request.getfixturevalue("sentinel").port
    master = Sentinel([("127.0.0.1", port)]).master_for(MASTER, password=server.password)
    return {}, {"redis": master}, server


KINDS = [
    password_in_the_url,
    another_database,
    unix_socket,
    client,
    decoding_client,
    resp3_client,
    cluster_url,
    cluster_client,
    decoding_cluster_client,
    sentinel_url,
    sentinel_client,
]


@pytest.mark.parametrize("kind", KINDS)
def test_lock_and_marker_are_in_redis(
    make_world: Any, request: Any, kind: Callable[[Any], Any]
) -> None:
    config, init, server = kind(request)
    world = make_world(init=init, IDEMPOTENCY_REDIS_PREFIX=f"{kind.__name__}:", **config)
    database = 3 if kind is another_database else 0
    behind = redis.Redis(port=server.port, password=server.password, db=database)
    during: list[bytes | None] = []

    def held() -> list[bytes | None]:
        return [behind.get(key) for key in behind.keys(f"{kind.__name__}:*")]

    @world.app.post("/payments")
    @idempotent
    def pay() -> Any:
        during.extend(held())
        world.db.session.add(world.Payment(amount=1))
        world.db.session.commit()
        return {"paid": 1}, 201

    with behind:
        first = world.post()
        (lock,) = during
        assert lock is not None
        assert lock.startswith(b"1:")
        assert lock != b"1:done"
        assert held() == [b"1:done"]
        again = world.post()
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert again.data == first.data
    assert world.count() == 1


@pytest.mark.parametrize("alive", [True, False], ids=["one-of-two", "none"])
def test_dead_sentinels_hold_no_request_up(make_world: Any, request: Any, *, alive: bool) -> None:
    nodes = [f"127.0.0.1:{servers.free_port()}" for _ in range(2)]
    if alive:
        nodes[1] = f"127.0.0.1:{request.getfixturevalue('sentinel').port}"
    password = request.getfixturevalue("own_redis").password
    url = f"redis+sentinel://:{password}@{','.join(nodes)}/{MASTER}"
    world = make_world(IDEMPOTENCY_REDIS_URL=url)

    @world.app.post("/payments")
    @idempotent
    def pay() -> Any:
        return {"paid": 1}, 201

    started = time.monotonic()
    assert world.post().status_code == 201
    assert time.monotonic() - started < 1.5, "a time-out each, and nothing is asked twice"
