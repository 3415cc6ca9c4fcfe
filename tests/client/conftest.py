"""A real server that does to its clients what networks do, and three clients with one face."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest
import requests

import servers
from flask_idempotency.client import IdempotentSession, IdempotentTransport

PROBLEM = "application/problem+json"


@dataclass(frozen=True)
class Seen:
    """A request as the server saw it."""

    method: str
    path: str
    key: str | None
    body: bytes


class Server:
    """Follows a script, one act a request; after its end it does one piece of work for each key."""

    def __init__(self) -> None:
        self.port = servers.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.seen: list[Seen] = []
        self.done: list[str | None] = []
        self.script: deque[Callable[[Handler], None]] = deque()
        self.let_go = threading.Event()
        self.connections: list[socket.socket] = []
        self._http: ThreadingHTTPServer | None = None

    @property
    def keys(self) -> list[str | None]:
        return [request.key for request in self.seen]

    def start(self, tls: ssl.SSLContext | None = None) -> None:
        handler = type("Handler", (Handler,), {"world": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=[0.01])
        self._thread.start()

    def stop(self) -> None:
        self.let_go.set()
        if self._http is not None:
            self._http.shutdown()
            self._thread.join()
            self._http.server_close()
        for connection in self.connections:  # or a client would find them at the next server's port
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def work(self, key: str | None) -> tuple[int, dict[str, str], bytes]:
        replayed = key is not None and key in self.done
        if not replayed:
            self.done.append(key)
        body = json.dumps({"id": self.done.index(key) + 1}).encode()
        headers = {"Content-Type": "application/json"}
        return 201, headers | ({"Idempotent-Replayed": "true"} if replayed else {}), body


class Handler(BaseHTTPRequestHandler):
    world: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # 40 ms a response

    def setup(self) -> None:
        super().setup()
        self.world.connections.append(self.connection)

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle_one_request()

    def act(self) -> None:
        self.key = self.headers.get("Idempotency-Key")
        self.world.seen.append(Seen(self.command, self.path, self.key, self.read_body()))
        step = self.world.script.popleft() if self.world.script else work
        step(self)

    do_GET = do_HEAD = do_OPTIONS = do_POST = do_PUT = do_PATCH = do_DELETE = act  # noqa: N815

    def read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def respond(self, status: int, headers: dict[str, str], body: bytes, short: int = 0) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) - short])
        self.wfile.flush()

    def send_response(self, code: int, message: str | None = None) -> None:
        self.send_response_only(code, message)  # without a Date of its own

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


def work(handler: Handler) -> None:
    handler.respond(*handler.world.work(handler.key))


def drop_before(handler: Handler) -> None:
    """Lose the request."""
    handler.close_connection = True


def drop_after(handler: Handler) -> None:
    """Work, and lose the response."""
    handler.world.work(handler.key)
    handler.close_connection = True


def break_off(handler: Handler) -> None:
    """Work, and lose the end of the response."""
    handler.respond(*handler.world.work(handler.key), short=3)
    handler.close_connection = True


def hang(handler: Handler) -> None:
    """Work, and never respond."""
    handler.world.work(handler.key)
    handler.world.let_go.wait(10)
    handler.close_connection = True


def stall(handler: Handler) -> None:
    """Work, begin to respond, and never end."""
    break_off(handler)
    handler.world.let_go.wait(10)


def respond(status: int, problem: str = "", **headers: str) -> Callable[[Handler], None]:
    """Answer without work; ``problem`` is the last part of its type."""
    body = json.dumps({"type": f"urn:flask-idempotency:problem:{problem}"}).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: handler.respond(status, {"Content-Type": PROBLEM} | named, body)


def written(text: str) -> Callable[[Handler], None]:
    """Work, and write this instead of a response."""

    def act(handler: Handler) -> None:
        handler.world.work(handler.key)
        handler.wfile.write(text.encode())
        handler.close_connection = True

    return act


@pytest.fixture
def stopped() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def server(stopped: Server) -> Server:
    stopped.start()
    return stopped


@dataclass
class Time:
    """A clock that only the clients' waits move, and the waits. ``chance`` is their random number."""

    now: float = 0.0
    chance: float = 1.0
    waits: list[float] = field(default_factory=list)
    at_wait: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds
        self.at_wait()

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    for name, value in {
        "attempts.monotonic": lambda: time.now,
        "attempts.random": lambda: time.chance,
        "session.sleep": time.sleep,
        "transport.sleep": time.sleep,
        "transport.anyio": SimpleNamespace(sleep=time.sleep_async),
    }.items():
        monkeypatch.setattr(f"flask_idempotency.client.{name}", value)
    return time


@pytest.fixture
def real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients' real time, and no wait by chance."""
    monkeypatch.setattr("flask_idempotency.client.attempts.random", lambda: 0.0)


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes
    response: Any

    @property
    def key(self) -> str:
        return self.response.request.headers["Idempotency-Key"]

    @property
    def is_replay(self) -> bool:
        return self.response.headers.get("Idempotent-Replayed") == "true"


Caller = Callable[..., Reply]
LOST = (requests.ConnectionError, requests.Timeout, httpx.TransportError)
"""What the clients raise where no response came."""
LIMIT = 5


def with_requests(**options: Any) -> Caller:
    def call(method: str, url: str, *, content: Any = None, **kwargs: Any) -> Reply:
        with IdempotentSession() as session:
            session.trust_env = False
            session.timeout = LIMIT
            vars(session).update(options)
            response = session.request(method, url, data=content, **kwargs)
            return Reply(response.status_code, response.content, response)

    return call


def with_httpx(timeout: float = LIMIT, **options: Any) -> Caller:
    def call(method: str, url: str, **kwargs: Any) -> Reply:
        transport = IdempotentTransport(httpx.HTTPTransport(verify=False))  # saves reading certificates
        vars(transport).update(options)
        with httpx.Client(transport=transport, timeout=timeout, follow_redirects=True) as client:
            response = client.request(method, url, **kwargs)
            return Reply(response.status_code, response.content, response)

    return call


def with_async_httpx(timeout: float = LIMIT, backend: str = "asyncio", **options: Any) -> Caller:
    async def send(method: str, url: str, kwargs: dict[str, Any]) -> Reply:
        transport = IdempotentTransport(httpx.AsyncHTTPTransport(verify=False))
        vars(transport).update(options)
        client = httpx.AsyncClient(transport=transport, timeout=timeout, follow_redirects=True)
        async with client:
            response = await client.request(method, url, **kwargs)
            return Reply(response.status_code, response.content, response)

    return lambda method, url, **kwargs: anyio.run(send, method, url, kwargs, backend=backend)


@pytest.fixture(params=[with_requests, with_httpx, with_async_httpx], ids=lambda f: f.__name__[5:])
def make_caller(request: pytest.FixtureRequest) -> Callable[..., Caller]:
    return request.param


@pytest.fixture
def call(make_caller: Callable[..., Caller]) -> Caller:
    return make_caller()
