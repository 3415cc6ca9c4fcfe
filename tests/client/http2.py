"""A small HTTP/2 server without TLS: one response for each request, as a script says."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from socketserver import BaseRequestHandler, ThreadingTCPServer

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import RequestReceived, StreamEnded

Act = Callable[[H2Connection, int], None]


class Http2Server(ThreadingTCPServer):
    """Notes the key of each request in ``keys``; after its script, it responds with 201."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.keys: list[str] = []
        self.script: deque[Act] = deque()


class _Connection(BaseRequestHandler):
    server: Http2Server
    request: socket.socket

    def handle(self) -> None:
        h2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        h2.initiate_connection()
        self.request.sendall(h2.data_to_send())
        while data := self.request.recv(65536):
            for event in h2.receive_data(data):
                if isinstance(event, RequestReceived):
                    self.server.keys.append(dict(event.headers)["idempotency-key"])
                elif isinstance(event, StreamEnded):
                    act = self.server.script.popleft() if self.server.script else respond(201)
                    act(h2, event.stream_id)
            self.request.sendall(h2.data_to_send())


def respond(status: int) -> Act:
    """Respond without a length: frames say where a body ends."""

    def act(h2: H2Connection, stream: int) -> None:
        h2.send_headers(stream, [(":status", str(status))])
        h2.send_data(stream, b"{}", end_stream=True)

    return act


def refuse(h2: H2Connection, stream: int) -> None:
    """Reset the stream."""
    h2.reset_stream(stream, ErrorCodes.REFUSED_STREAM)


def break_off(h2: H2Connection, stream: int) -> None:
    """Begin the response, and reset the stream."""
    h2.send_headers(stream, [(":status", "201")])
    h2.send_data(stream, b"{")
    h2.reset_stream(stream, ErrorCodes.INTERNAL_ERROR)


def go_away(h2: H2Connection, stream: int) -> None:
    """Close the connection."""
    h2.close_connection()
