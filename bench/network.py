"""A network between the applications and their servers: it counts round trips, and may be slow.

Proxies on 127.0.0.1, one for each server, in a process of their own, so that they take no time from the
measured one. A client that sends again after it has received something begins a round trip.
What clients send is held back, what servers send is passed on at once: so each round trip
takes the delay longer, and what a client sends without waiting for a reply is not held back twice.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from .calls import WARM_UP

if TYPE_CHECKING:
    from typing_extensions import Self

    from .paths import Send

QUIET_SECONDS = 0.05
"""How long a message may be on its way that nobody waits for."""

COUNTED = 10


class Network:
    """The proxies of the servers that ``urls`` name, as a context manager.

    ``delay`` is the seconds by which each round trip is held back; ``pid`` is the process.
    """

    def __init__(self, *urls: str, delay: float = 0.0) -> None:
        self._targets = [_target(url) for url in urls]
        command = [sys.executable, "-m", __name__, str(delay), json.dumps(self._targets)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        self.pid = self._process.pid
        self._ports = self._hear()

    def through(self, url: str) -> str:
        """The URL of the same database by way of its server's proxy."""
        parts = urlsplit(url)
        login = "".join(parts.netloc.rpartition("@")[:2])
        port = self._ports[self._targets.index(_target(url))]
        return parts._replace(netloc=f"{login}127.0.0.1:{port}").geturl()

    def round_trips(self) -> list[int]:
        """How many there were so far, by server, in the order of ``urls``."""
        time.sleep(QUIET_SECONDS)
        assert self._process.stdin is not None
        print("how many?", file=self._process.stdin, flush=True)
        return self._hear()

    def _hear(self) -> list[int]:
        assert self._process.stdout is not None
        numbers: list[int] = json.loads(self._process.stdout.readline())
        return numbers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # closes its input, at which it ends


def count_round_trips(network: Network, send: Send) -> list[float]:
    """The round trips of one ``send()`` by server, warm: the mean of some requests."""
    for _ in range(WARM_UP):  # a driver may prepare a statement when it comes for the sixth time
        send()
    before = network.round_trips()
    for _ in range(COUNTED):
        send()
    after = network.round_trips()
    return [(b - a) / COUNTED for a, b in zip(before, after, strict=True)]


def _target(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    usual_port = 6379 if parts.scheme.startswith("redis") else 5432
    return parts.hostname or "127.0.0.1", parts.port or usual_port


class Link:
    """One client's connection, passed on to the server by three threads."""

    def __init__(self, client: socket.socket, server: socket.socket, delay: float) -> None:
        self.round_trips = 0
        self._client, self._server, self._delay = client, server, delay
        self._answered = True
        self._waiting: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for work in (self._receive, self._send, self._reply):
            Thread(target=self._until_closed, args=(work,), daemon=True).start()

    def _until_closed(self, work: Send) -> None:
        with contextlib.suppress(OSError):
            work()
        for each in (self._client, self._server):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> None:
        """Take what the client sends; it is due at the server after the delay."""
        while data := self._client.recv(65536):
            if self._answered:  # before it is sent on: the reply may be here at once
                self._answered = False
                self.round_trips += 1
            self._waiting.put((time.monotonic() + self._delay, data))
        self._waiting.put((0.0, b""))

    def _send(self) -> None:
        while (item := self._waiting.get())[1]:
            due, data = item
            if (left := due - time.monotonic()) > 0:
                time.sleep(left)
            self._server.sendall(data)

    def _reply(self) -> None:
        while data := self._server.recv(65536):
            self._answered = True
            self._client.sendall(data)


class Proxy:
    """Listens on a free port for the clients of one server."""

    def __init__(self, target: tuple[str, int], delay: float) -> None:
        self._target, self._delay = target, delay
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._links: list[Link] = []
        Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            self._links.append(Link(client, socket.create_connection(self._target), self._delay))

    @property
    def round_trips(self) -> int:
        """How many there were so far."""
        return sum(link.round_trips for link in self._links)


def main() -> None:
    """The process: print the ports, then the counts for each line of input, until that ends."""
    proxies = [Proxy((host, port), float(sys.argv[1])) for host, port in json.loads(sys.argv[2])]
    print(json.dumps([proxy.port for proxy in proxies]), flush=True)
    for _ in sys.stdin:
        print(json.dumps([proxy.round_trips for proxy in proxies]), flush=True)


if __name__ == "__main__":
    main()
