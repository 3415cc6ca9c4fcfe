"""Clients that send when a request is due, whatever became of those before: an open loop.

A client that waits for each reply before its next request sends fewer to a slow server, and does not
see how long the others would have waited. Here latency counts from the moment a request is due, so a
server that stalls delays every request that was due meanwhile. They run in a process of their own.
"""

from __future__ import annotations

import json
import random
import re
import select
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from .paths import new_keys

if TYPE_CHECKING:
    from typing_extensions import Self

PATIENCE_SECONDS = 10.0
"""How long a reply is waited for after the last request was due."""

MOST_WAITING = 900
"""Requests on their way at once: ``select`` takes 1024 files. Others get no reply."""

USES = 20
"""Requests on one connection: few, so that no worker has more than its share of them for long."""

NO_REPLY = "no reply"

_LENGTH = re.compile(rb"(?i)content-length: *(\d+)")


@dataclass(frozen=True)
class Replies:
    """What became of the requests of one plan.

    Attributes:
        milliseconds: from the moment a request was due until its reply, of those that got one.
        kinds: how many got which: ``"201"``, ``"201 replayed"``, ``"409"``, ``"no reply"``.
        seconds: from the beginning until the last reply.
        late: the most milliseconds that a request was sent after it was due; 1 % were later.
    """

    milliseconds: list[float]
    kinds: dict[str, int]
    seconds: float
    late: float

    @property
    def per_second(self) -> float:
        """Replies a second."""
        return len(self.milliseconds) / self.seconds

    def percentile(self, percent: float) -> float:
        """The milliseconds that so many percent of the replies took at most."""
        return percentile(self.milliseconds, percent)


def percentile(milliseconds: list[float], percent: float) -> float:
    """The value that so many percent are at most: of few the greatest, of none all our patience."""
    ordered = sorted(milliseconds) or [PATIENCE_SECONDS * 1000]
    return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)]


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """When clients send who know nothing of each other, ``rate`` of them a second."""
    rng = random.Random(seed)  # noqa: S311 -- to be repeated
    return sorted(rng.uniform(0, seconds) for _ in range(round(rate * seconds)))


class Clients:
    """The process of the clients, as a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        self.pid = self._process.pid

    def send(
        self,
        port: int,
        path: str,
        due: list[float],
        *,
        keys: list[str] | None = None,
        keep_alive: bool = True,
    ) -> Replies:
        """Send a request at each of these seconds, with a new key or the next of ``keys``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        plan = {"port": port, "path": path, "due": due, "keys": keys, "keep_alive": keep_alive}
        print(json.dumps(plan), file=self._process.stdin, flush=True)
        return Replies(**json.loads(self._process.stdout.readline()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # closes its input, at which it ends


class Exchange:
    """A connection, and the request that is on its way there."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.close = self._socket.close
        self.fileno = self._socket.fileno
        self.uses = 0

    def send(self, request: bytes, due: float) -> None:
        """Send the request; ``due`` is when it should have been."""
        self.request, self.due, self.received = request, due, b""
        self.uses += 1
        self._socket.sendall(request)

    def receive(self) -> bool:
        """Take what has come; whether more may come."""
        try:
            data = self._socket.recv(65536)
        except OSError:
            return False
        self.received += data
        return bool(data)

    @property
    def reply(self) -> str | None:
        """Its kind, once it is complete."""
        head, end, body = self.received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not end or length is None or len(body) < int(length[1]):
            return None
        return head[9:12].decode() + " replayed" * (b"idempotent-replayed" in head.lower())

    @property
    def is_reusable(self) -> bool:
        """Whether another request may follow."""
        return self.uses < USES and b"connection: close" not in self.received.lower()


class Run:
    """The requests of one plan; called once."""

    def __init__(
        self, port: int, path: str, due: list[float], keys: list[str] | None, keep_alive: bool
    ) -> None:
        self._port, self._due = port, deque(due)
        self._keys = cycle(keys) if keys else new_keys()
        persistence = "keep-alive" if keep_alive else "close"
        self._request = (
            f"POST {path} HTTP/1.1\r\nHost: bench\r\nConnection: {persistence}\r\n"
            "Content-Type: application/json\r\nContent-Length: 13\r\n"
            'Idempotency-Key: {}\r\n\r\n{{"amount": 5}}'
        )
        self._idle: deque[Exchange] = deque()
        self._waiting: dict[int, Exchange] = {}
        self._kinds: Counter[str] = Counter()
        self._milliseconds: list[float] = []
        self._late: list[float] = []

    def __call__(self) -> Replies:
        end = self._due[-1] + PATIENCE_SECONDS
        self._start = time.perf_counter()
        while (self._due or self._waiting) and self._now() < end:
            while self._due and self._due[0] <= self._now():
                self._send(self._due.popleft())
            pause = (self._due[0] if self._due else end) - self._now()
            # Not epoll, which rounds the pause up to whole milliseconds.
            for file in select.select(self._waiting, (), (), max(pause, 0))[0]:
                self._receive(self._waiting.pop(file))
        seconds = self._now()
        self._kinds[NO_REPLY] += len(self._waiting) + len(self._due)
        for exchange in (*self._waiting.values(), *self._idle):
            exchange.close()
        return Replies(self._milliseconds, dict(+self._kinds), seconds, percentile(self._late, 99))

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _send(self, due: float) -> None:
        self._late.append((self._now() - due) * 1000)
        if len(self._waiting) >= MOST_WAITING:
            self._kinds[NO_REPLY] += 1
        else:
            request = self._request.format(next(self._keys)).encode()
            self._send_on(self._idle.popleft() if self._idle else None, request, due)

    def _send_on(self, exchange: Exchange | None, request: bytes, due: float) -> None:
        try:
            exchange = exchange or Exchange(self._port)
            exchange.send(request, due)
        except OSError:
            self._kinds[NO_REPLY] += 1
        else:
            self._waiting[exchange.fileno()] = exchange

    def _receive(self, exchange: Exchange) -> None:
        is_open = exchange.receive()
        kind = exchange.reply
        if kind is None and is_open:
            self._waiting[exchange.fileno()] = exchange
            return
        if kind and exchange.is_reusable:
            self._idle.append(exchange)
        else:
            exchange.close()
        if kind:
            self._kinds[kind] += 1
            self._milliseconds.append((self._now() - exchange.due) * 1000)
        elif exchange.uses > 1 and not exchange.received:  # it was closed while idle
            self._send_on(None, exchange.request, exchange.due)
        else:
            self._kinds[NO_REPLY] += 1


def main() -> None:
    """The process: a plan in each line of input, its replies in a line of output."""
    for line in sys.stdin:
        print(json.dumps(asdict(Run(**json.loads(line))())), flush=True)


if __name__ == "__main__":
    main()
