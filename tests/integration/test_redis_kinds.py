"""Each kind of Redis, by URL and as a client of the application's own: it holds lock and marker."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
from redis.sentinel import Sentinel

import servers
from flask_idempotency import idempotent
from tests.certificates import self_signed

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
    """Redis in its other role. It has no password."""

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


@pytest.fixture(scope="module")
def old_redis() -> Iterator[Any]:
    """Like a Redis before version 6: it does not know HELLO, with which RESP 3 begins."""
    with servers.Redis(settings={"rename-command HELLO": ""}) as server:
        yield server


class TlsFront:
    """Speaks TLS with clients, and passes on what they say to a server that does not."""

    def __init__(self, port: int, certificate: Path) -> None:
        self._server = port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.trusted = f"ssl_ca_certs={certificate}&socket_timeout=2&socket_connect_timeout=2"
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                raw, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(raw,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        with contextlib.suppress(OSError):
            client = self._context.wrap_socket(raw, server_side=True)
            server = socket.create_connection(("127.0.0.1", self._server))
            with client, server:
                while True:
                    ready, _, _ = select.select([client, server], [], [])
                    for source in ready:
                        if not (data := source.recv(65536)):
                            return
                        (client if source is server else server).sendall(data)


@pytest.fixture
def tls_front(tmp_path: Path) -> Iterator[Callable[..., TlsFront]]:
    """Makes fronts with a certificate that only they know."""
    certificate, fronts = tmp_path / "front.pem", []
    certificate.write_bytes(self_signed())

    def make(port: int) -> TlsFront:
        front = TlsFront(port, certificate)
        fronts.append(front)
        return front

    yield make
    for front in fronts:
        front.close()


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
    url = f"unix://:{server.password}@{server.data}/redis.sock?db=0"
    return {"IDEMPOTENCY_REDIS_URL": url}, {}, server


def client(request: Any, **options: Any) -> Any:
    server = request.getfixturevalue("own_redis")
    return {}, {"redis": redis.Redis.from_url(server.url, **options)}, server


def decoding_client(request: Any) -> Any:
    return client(request, decode_responses=True)


def resp3_client(request: Any) -> Any:
    return client(request, protocol=3)


def cluster_client(request: Any) -> Any:
    server = request.getfixturevalue("cluster")
    return {}, {"redis": redis.RedisCluster.from_url(server.url)}, server


def decoding_cluster_client(request: Any) -> Any:
    server = request.getfixturevalue("cluster")
    return {}, {"redis": redis.RedisCluster.from_url(server.url, decode_responses=True)}, server


# With a user and a password that mean something else in a URL, and as a URL must have them.
USER, SECRET = "us:er@/", "p@ss:/w%rd#?"
LOGIN = f"{quote(USER, safe='')}:{quote(SECRET, safe='')}"


def with_user(server: Any) -> Any:
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", USER, "on", f">{SECRET}", "~*", "+@all")
    return server


def odd_password(request: Any) -> Any:
    server = with_user(request.getfixturevalue("own_redis"))
    url = f"redis://{LOGIN}@127.0.0.1:{server.port}/0"
    return {"IDEMPOTENCY_REDIS_URL": url}, {}, server


def tls(request: Any) -> Any:
    server = with_user(request.getfixturevalue("own_redis"))
    front = request.getfixturevalue("tls_front")(server.port)
    url = f"rediss://{LOGIN}@127.0.0.1:{front.port}/0?{front.trusted}"
    return {"IDEMPOTENCY_REDIS_URL": url}, {}, server


def without_hello(request: Any) -> Any:
    server = request.getfixturevalue("old_redis")
    return {"IDEMPOTENCY_REDIS_URL": server.url}, {}, server


def resp2_client_without_hello(request: Any) -> Any:
    server = request.getfixturevalue("old_redis")
    return {}, {"redis": redis.Redis.from_url(server.url, protocol=2)}, server


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
    cluster_client,
    decoding_cluster_client,
    sentinel_client,
    odd_password,
    tls,
    without_hello,
    resp2_client_without_hello,
]


@pytest.mark.parametrize("kind", KINDS)
def test_lock_and_marker_are_in_redis(
    make_world: Any, request: Any, kind: Callable[[Any], Any]
) -> None:
    config, init, server = kind(request)
    world = make_world(init=init, IDEMPOTENCY_REDIS_PREFIX=f"{kind.__name__}:", **config)
    database = 3 if kind is another_database else 0
    behind = redis.Redis(port=server.port, password=server.password, db=database, protocol=2)
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


def test_a_client_that_speaks_resp_3_to_an_old_server_costs_speed_and_shows_no_password(
    make_world: Any, request: Any, caplog: Any
) -> None:
    server = request.getfixturevalue("old_redis")
    world = make_world(init={"redis": redis.Redis.from_url(server.url, protocol=3)})

    @world.app.post("/payments")
    @idempotent
    def pay() -> Any:
        return {"paid": 1}, 201

    assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert "Redis failed" in caplog.text
    assert server.password not in caplog.text


def test_a_certificate_that_nobody_vouches_for_is_refused(
    make_world: Any, request: Any, caplog: Any
) -> None:
    config, _, _ = tls(request)
    # Slow enough for a handshake on a busy machine: a time-out would say nothing of the certificate.
    untrusted = re.sub(r"ssl_ca_certs=[^&]*&", "", config["IDEMPOTENCY_REDIS_URL"])
    world = make_world(IDEMPOTENCY_REDIS_URL=untrusted)

    @world.app.post("/payments")
    @idempotent
    def pay() -> Any:
        return {"paid": 1}, 201

    assert world.post().status_code == 201
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
    assert SECRET not in caplog.text
