"""A real server that does to its clients what networks do, and three clients with one face."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
import requests
from anyio.from_thread import start_blocking_portal

import servers
from flask_idempotency.client import (
    AsyncIdempotentClient,
    AsyncIdempotentTransport,
    IdempotentClient,
    IdempotentSession,
    IdempotentTransport,
    RetryPolicy,
)

PROBLEM = "application/problem+json"


@dataclass(frozen=True)
class Seen:
    """A request as the server saw it."""

    method: str
    path: str
    key: str | None
    body: bytes


class Server:
    """Does one piece of work for each key, and follows a script: one act for each request.

    When the script is at its end, it works and responds. ``work`` gives the response of the first time
    again, as a server with idempotency keys does.
    """

    def __init__(self) -> None:
        self.port = servers.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.seen: list[Seen] = []
        self.done: list[str | None] = []
        self.script: deque[Callable[[Handler], None]] = deque()
        self.let_go = threading.Event()
        self._http: ThreadingHTTPServer | None = None
        self._thread = threading.Thread(target=self._serve)

    @property
    def keys(self) -> list[str | None]:
        """The key of each request, in their order."""
        return [request.key for request in self.seen]

    def start(self, tls: ssl.SSLContext | None = None) -> None:
        handler = type("Handler", (Handler,), {"world": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self._http.daemon_threads = True
        self._thread.start()

    def _serve(self) -> None:
        assert self._http is not None
        self._http.serve_forever(poll_interval=0.01)

    def stop(self) -> None:
        self.let_go.set()
        if self._http is not None:
            self._http.shutdown()
            self._thread.join()
            self._http.server_close()

    def work(self, key: str | None) -> tuple[int, dict[str, str], bytes]:
        """Do the work, unless it was done for this key; the response."""
        replayed = key is not None and key in self.done
        if not replayed:
            self.done.append(key)
        body = json.dumps({"id": self.done.index(key) + 1}).encode()
        headers = {"Content-Type": "application/json"}
        return 201, headers | ({"Idempotent-Replayed": "true"} if replayed else {}), body


class Handler(BaseHTTPRequestHandler):
    """Reads a request, notes it, and does what the script says."""

    world: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # 40 ms a response

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
    """Work and respond."""
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


def stall(handler: Handler) -> None:
    """Work, begin to respond, and never end."""
    handler.respond(*handler.world.work(handler.key), short=3)
    handler.world.let_go.wait(10)
    handler.close_connection = True


def hang(handler: Handler) -> None:
    """Work, and never respond."""
    handler.world.work(handler.key)
    handler.world.let_go.wait(10)
    handler.close_connection = True


def duplicate(handler: Handler) -> None:
    """Get the request twice, as if a proxy had sent it again; the response is the second one."""
    handler.world.work(handler.key)
    handler.respond(*handler.world.work(handler.key))


def respond(status: int, problem: str = "", **headers: str) -> Callable[[Handler], None]:
    """Answer without work; ``problem`` is the last part of its type."""
    body = json.dumps({"type": f"urn:flask-idempotency:problem:{problem}"}).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: handler.respond(status, {"Content-Type": PROBLEM} | named, body)


def written(text: str, *, stays_open: bool = False) -> Callable[[Handler], None]:
    """Work, and write this instead of a response."""

    def act(handler: Handler) -> None:
        handler.world.work(handler.key)
        handler.wfile.write(text.encode())
        handler.close_connection = not stays_open

    return act


def trickle(status: str, headers: str, first: bytes = b"") -> Callable[[Handler], None]:
    """Write the body a byte at a time after its ``first`` ones, for two seconds."""

    def act(handler: Handler) -> None:
        handler.wfile.write(f"HTTP/1.1 {status}\r\n{headers}\r\n\r\n".encode() + first)
        piece = b"1\r\n.\r\n" if "chunked" in headers else b"."
        for _ in range(100):
            handler.wfile.write(piece)
            handler.world.let_go.wait(0.02)
        handler.close_connection = True

    return act


@pytest.fixture
def stopped() -> Iterator[Server]:
    """A server that does not listen yet."""
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def server(stopped: Server) -> Server:
    stopped.start()
    return stopped


@dataclass
class Time:
    """A clock that only waiting moves, and the waits. ``chance`` stands for the random number."""

    now: float = 0.0
    chance: float = 1.0
    waits: list[float] = field(default_factory=list)
    at_wait: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds
        self.at_wait()

    def policy(self, **options: Any) -> RetryPolicy:
        own = {"sleep": self.sleep, "clock": lambda: self.now, "random": lambda: self.chance}
        return RetryPolicy(**(own | {"backoff": 0.5} | options))


@pytest.fixture
def time() -> Time:
    return Time()


@dataclass(frozen=True)
class Reply:
    """What a client gave; ``response`` is its own."""

    status: int
    body: bytes
    response: Any

    @property
    def key(self) -> str:
        return self.response.request.headers["Idempotency-Key"]


Caller = Callable[..., Reply]
LOST = (requests.ConnectionError, requests.Timeout, httpx.TransportError)
"""What the clients raise where no response came."""


def with_requests(time: Time, timeout: float = 5, **options: Any) -> Caller:
    session = IdempotentSession(time.policy(**options), timeout=timeout)
    session.trust_env = False

    def call(method: str, url: str, *, content: Any = None, **kwargs: Any) -> Reply:
        with session:
            response = session.request(method, url, data=content, **kwargs)
            return Reply(response.status_code, response.content, response)

    return call


def with_httpx(time: Time, timeout: float = 5, **options: Any) -> Caller:
    network = httpx.HTTPTransport(verify=False)  # saves reading certificates
    policy = time.policy(**options)
    client = IdempotentClient(policy=policy, transport=network, timeout=timeout, follow_redirects=True)

    def call(method: str, url: str, **kwargs: Any) -> Reply:
        response = client.request(method, url, **kwargs)
        return Reply(response.status_code, response.content, response)

    call.close = client.close  # type: ignore[attr-defined]
    return call


def with_async_httpx(time: Time, timeout: float = 5, **options: Any) -> Caller:
    async def sleep(seconds: float) -> None:
        time.sleep(seconds)

    async def send(method: str, url: str, **kwargs: Any) -> Reply:
        network = httpx.AsyncHTTPTransport(verify=False)
        policy = time.policy(**options)
        client = AsyncIdempotentClient(policy=policy, sleep=sleep, transport=network, timeout=timeout)
        async with client:
            response = await client.request(method, url, follow_redirects=True, **kwargs)
            return Reply(response.status_code, response.content, response)

    return lambda *args, **kwargs: asyncio.run(send(*args, **kwargs))


@pytest.fixture(params=[with_requests, with_httpx, with_async_httpx], ids=lambda f: f.__name__[5:])
def make_caller(request: pytest.FixtureRequest, time: Time) -> Iterator[Callable[..., Caller]]:
    """A function that makes a client; a test that uses it runs with each."""
    made: list[Any] = []

    def make(**options: Any) -> Caller:
        made.append(request.param(time, **options))
        return made[-1]

    yield make
    for caller in made:
        getattr(caller, "close", lambda: None)()


@pytest.fixture
def call(make_caller: Callable[..., Caller]) -> Caller:
    """The usual client."""
    return make_caller()


@dataclass(frozen=True)
class Kind:
    """httpx without or with async: the classes, and how a function of theirs is run."""

    Client: Any
    Transport: Any
    Plain: Any
    Network: Any
    time: Time
    run: Callable[..., Any] = lambda function, *args, **kwargs: function(*args, **kwargs)

    @property
    def is_async(self) -> bool:
        return self.Plain is httpx.AsyncClient

    def ours(self, policy: Any = None, **options: Any) -> dict[str, Any]:
        """What makes a client or a transport of ours quick: its policy, and its ``sleep``."""

        async def sleep(seconds: float) -> None:
            self.time.sleep(seconds)

        own = {"sleep": sleep} if self.is_async else {}
        return {"policy": policy or self.time.policy(), **own, **options}

    def client(self, **options: Any) -> Any:
        """Our client, or httpx' own where ``transport`` is ours."""
        if isinstance(options.get("transport"), self.Transport):
            return self.Plain(**options)
        return self.Client(**self.ours(**options))

    def post(self, client: Any, url: str, **options: Any) -> httpx.Response:
        """Open the client, post, and close it."""

        async def asynchronous() -> httpx.Response:
            async with client:
                return await client.post(url, **options)

        if self.is_async:
            return self.run(asynchronous)
        with client:
            return client.post(url, **options)

    def close(self, client: Any) -> None:
        self.run(client.aclose if self.is_async else client.close)


@pytest.fixture(params=["sync", "asyncio", "trio"])
def kind(request: pytest.FixtureRequest, time: Time) -> Iterator[Kind]:
    """Httpx without async, and with it in two event loops; a test that uses it runs with each."""
    if request.param == "sync":
        yield Kind(IdempotentClient, IdempotentTransport, httpx.Client, httpx.HTTPTransport, time)
        return
    twins = AsyncIdempotentClient, AsyncIdempotentTransport, httpx.AsyncClient, httpx.AsyncHTTPTransport
    with start_blocking_portal(request.param) as portal:
        yield Kind(*twins, time, lambda *args, **kwargs: portal.call(partial(*args, **kwargs)))


@pytest.fixture
def client(kind: Kind) -> Iterator[Any]:
    """A client of ours for httpx."""
    client = kind.client(transport=kind.Network(verify=False), timeout=5)
    yield client
    kind.close(client)
