"""An HTTP proxy that passes bytes on: it is asked with CONNECT."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

Address = tuple[str, int]


class Proxy(ThreadingTCPServer):
    """Listens on a free port, and notes in ``seen`` where it was asked to connect to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Connect)
        self.address = f"127.0.0.1:{self.server_address[1]}"
        self.seen: list[Address] = []


class Connect(BaseHTTPRequestHandler):
    server: Proxy

    def do_CONNECT(self) -> None:
        host, _, port = self.path.rpartition(":")
        self.server.seen.append((host, int(port)))
        self.wfile.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        pass_on(self.connection, (host, int(port)))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


def pass_on(client: socket.socket, target: Address) -> None:
    """Pass bytes on in both directions until both are done."""
    with socket.create_connection(target, timeout=10) as server:
        back = threading.Thread(target=_pump, args=(server, client), daemon=True)
        back.start()
        _pump(client, server)
        back.join(10)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(65536):
            sink.sendall(piece)
        sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def running() -> Iterator[Proxy]:
    """A proxy, until the block ends."""
    with Proxy() as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
