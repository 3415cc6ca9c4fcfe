"""A server on this machine that fails on purpose, and notes every request that reaches it."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

OUTAGE_SECONDS = 10
RUNNING_SECONDS = 5

DONE = b'{"id": "pi_1", "object": "payment_intent", "tasks": []}'
"""What Stripe's and AWS's clients also take for a success."""

RESET = struct.pack("ii", 1, 0)
"""Lingering for no time: closing the socket sends a reset."""


@dataclass
class Attempt:
    """A request that has arrived; ``number`` is from 1, ``seconds`` are since the first one."""

    number: int
    seconds: float
    key: str
    connection: socket.socket

    def respond(self, status: int, body: bytes = DONE, **headers: str) -> None:
        """Send a whole response."""
        kind = "application/problem+json" if b'"type"' in body else "application/json"
        all_headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Connection": "close"}
        all_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in all_headers.items())]
        self.connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)

    def reset(self) -> None:
        """Drop the connection without a response."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    def break_body(self) -> None:
        """Send a success and half of its body."""
        self.connection.sendall(b"HTTP/1.1 201 X\r\nContent-Length: 60\r\n\r\n" + DONE[:20])

    def break_headers(self) -> None:
        """Send a success and half of its headers."""
        self.connection.sendall(b"HTTP/1.1 201 X\r\nContent-Type: application/json\r\nContent-Le")

    def hang(self) -> None:
        """Send nothing until the client has gone."""
        while self.connection.recv(1024):
            pass


def problem(name: str) -> bytes:
    """The body of a rejection by an application with Flask-Idempotency."""
    return json.dumps({"type": f"urn:idempotency:{name}"}).encode()


Fault = Callable[[Attempt], None]


def once(fault: Fault) -> Fault:
    """Fail the first request; the next is served."""
    return lambda attempt: fault(attempt) if attempt.number == 1 else attempt.respond(201)


def while_running(attempt: Attempt) -> None:
    """The first attempt is still running, as far as the server knows."""
    if attempt.seconds < RUNNING_SECONDS:
        attempt.respond(409, problem("request-in-progress"), Retry_After="1")
    else:
        attempt.respond(201)


FAULTS: dict[str, Fault] = {
    "503 at once, for ever": lambda attempt: attempt.respond(503, b"{}"),
    "refused, for ever": Attempt.hang,  # not even that: nobody listens
    f"refused for {OUTAGE_SECONDS} s": lambda attempt: attempt.respond(201),
    "no response, once": once(Attempt.hang),
    "500, once": once(lambda attempt: attempt.respond(500, b"{}")),
    "429 with `Retry-After: 2`, once": once(
        lambda attempt: attempt.respond(429, b"{}", Retry_After="2")
    ),
    "connection reset after the request, once": once(Attempt.reset),
    "body breaks off, once": once(Attempt.break_body),
    "headers break off, once": once(Attempt.break_headers),
    f"409 `request-in-progress` for {RUNNING_SECONDS} s": while_running,
    "409 of the application": lambda attempt: attempt.respond(409, b"{}"),
    "422 `key-reused`": lambda attempt: attempt.respond(422, problem("key-reused")),
    "500 `operation-failed`": lambda attempt: attempt.respond(500, problem("operation-failed")),
}
"""What the server does with a request, by the name in the table."""


@dataclass
class Server:
    """The server for one call of one client. ``attempts`` are those that reached it."""

    fault: str
    attempts: list[Attempt] = field(default_factory=list)

    def begin(self) -> None:
        """The call begins, and with it an outage that will end."""
        self._has_begun.set()

    def __enter__(self) -> Self:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._has_begun, self._is_over = threading.Event(), threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        self._socket.close()

    def _serve(self) -> None:
        """Listen, but not during an outage."""
        if self.fault.startswith("refused"):
            self._has_begun.wait()
            self._is_over.wait(None if "ever" in self.fault else OUTAGE_SECONDS)
        if self._is_over.is_set():
            return
        self._socket.listen()
        while not self._is_over.is_set():
            try:
                connection, _address = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=[connection], daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            received = _request(connection)
            now = time.monotonic()
            self._began = now if not self.attempts else self._began
            number = len(self.attempts) + 1
            attempt = Attempt(number, now - self._began, _key(received), connection)
            self.attempts.append(attempt)
            FAULTS[self.fault](attempt)


def _request(connection: socket.socket) -> bytes:
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
        head, end, body = received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        if end and len(body) >= int(length[1] if length else 0):
            break
    return received


def _key(request: bytes) -> str:
    """The header, or what stands for it in the body of a call to AWS."""
    found = re.search(rb'(?i)\r\nidempotency-key: *([^\r]+)|"clientToken": *"([^"]+)', request)
    return (found[1] or found[2]).decode() if found else ""
