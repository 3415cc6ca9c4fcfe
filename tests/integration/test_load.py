"""The bench's clients count right: an open loop, whose latency begins when a request is due."""

from __future__ import annotations

import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from bench.load import Clients, arrivals
from bench.trivial import trivial_server

pytestmark = pytest.mark.of_tests

STALL_SECONDS = 0.3
RATE = 200

REPLY = b"HTTP/1.1 %s\r\nContent-Length: 2\r\n%s\r\n{}"


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    with Clients() as clients:
        yield clients


@contextmanager
def serving(reply: Callable[[str, int], bytes]) -> Iterator[int]:
    """A server's port. ``reply`` gets a request's key, and its number on its connection, from 1 on.

    One request is served at a time; for an empty reply the connection is closed.
    """
    one_at_a_time = threading.Lock()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            number = 0
            while b"Idempotency-Key" in (head := self._head()):
                self.rfile.read(13)
                number += 1
                with one_at_a_time:
                    answer = reply(head.decode().split("Idempotency-Key: ")[1].strip(), number)
                self.wfile.write(answer)
                if not answer:
                    return

        def _head(self) -> bytes:
            lines = iter(self.rfile.readline, b"")
            return b"".join(iter(lambda: next(lines, b"\r\n"), b"\r\n"))

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 1000

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield server.server_address[1]
        server.shutdown()


def test_a_stall_delays_every_request_that_was_due_meanwhile(clients: Clients) -> None:
    """A closed loop would see one slow request; here 60 are due in 0.3 s, and 40 wait over 0.1 s."""
    stalls = iter([STALL_SECONDS])
    served: Counter[str] = Counter()

    def reply(key: str, _number: int) -> bytes:
        served[key] += 1
        if len(served) == RATE // 2:
            time.sleep(next(stalls))
        return REPLY % (b"201 CREATED", b"")

    due = [number / RATE for number in range(RATE)]
    with serving(reply) as port:
        replies = clients.send(port, "/", due)
    assert replies.kinds == {"201": RATE}
    assert len(served) == RATE, "each has a key of its own"
    assert set(served.values()) == {1}, "none was sent twice"
    assert replies.percentile(99) > 280
    assert sum(each > 100 for each in replies.milliseconds) >= 35
    assert replies.percentile(50) < 100
    assert due[-1] <= replies.seconds < due[-1] + STALL_SECONDS + 1
    assert replies.per_second == RATE / replies.seconds


def test_the_planned_rate_is_kept_and_the_same_for_the_same_seed(clients: Clients) -> None:
    due = arrivals(400, 0.5, seed=7)
    assert due == arrivals(400, 0.5, seed=7) != arrivals(400, 0.5, seed=8)
    assert len(due) == 200
    assert 0 <= min(due) < max(due) < 0.5
    with trivial_server() as port:
        for keep_alive in (True, False):
            replies = clients.send(port, "/", due, keep_alive=keep_alive)
            assert replies.kinds == {"201": 200}
            assert max(due) <= replies.seconds


def test_replies_are_counted_by_kind(clients: Clients) -> None:
    replies_by_key = {
        "first": REPLY % (b"201 CREATED", b""),
        "replay": REPLY % (b"201 CREATED", b"Idempotent-Replayed: true\r\n"),
        "duplicate": REPLY % (b"409 CONFLICT", b""),
        "silent": b"",
    }
    keys = ["first", "first", "first", "replay", "replay", "duplicate", "silent"]
    with serving(lambda key, _: replies_by_key[key]) as port:
        replies = clients.send(port, "/", [0.0] * len(keys), keys=keys)
    assert replies.kinds == {"201": 3, "201 replayed": 2, "409": 1, "no reply": 1}
    assert len(replies.milliseconds) == 6


def test_a_connection_closed_while_idle_costs_no_reply(clients: Clients) -> None:
    """Servers close idle connections whenever they like: the request goes out on a new one."""
    with serving(lambda _, number: REPLY % (b"201 CREATED", b"") if number == 1 else b"") as port:
        replies = clients.send(port, "/", arrivals(100, 0.5, seed=1))
    assert replies.kinds == {"201": 50}
