"""Proxies that pass bytes on: one that is asked with CONNECT, one that speaks SOCKS 5."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

Address = tuple[str, int]


class Proxy(ThreadingTCPServer):
    """Listens on a free port, and notes in ``seen`` where it was asked to connect to."""

    daemon_threads = True

    def __init__(self, handler: type[StreamRequestHandler], refusal: str = "") -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.address = f"127.0.0.1:{self.server_address[1]}"
        self.refusal = refusal
        self.seen: list[Address] = []


class Connect(BaseHTTPRequestHandler):
    """An HTTP proxy for CONNECT; it may refuse with a status and a reason."""

    server: Proxy

    def do_CONNECT(self) -> None:
        host, _, port = self.path.rpartition(":")
        self.server.seen.append((host, int(port)))
        if self.server.refusal:
            self.wfile.write(f"HTTP/1.1 {self.server.refusal}\r\nContent-Length: 0\r\n\r\n".encode())
            return
        self.wfile.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        pass_on(self.connection, (host, int(port)))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


class Socks(StreamRequestHandler):
    """A SOCKS 5 proxy without passwords, for addresses and names (RFC 1928). It may refuse."""

    server: Proxy
    rbufsize = 0  # what follows belongs to the target

    def handle(self) -> None:
        _version, methods = self.rfile.read(2)
        self.rfile.read(methods)
        if self.server.refusal:
            self.wfile.write(b"\x05\xff")
            return
        self.wfile.write(b"\x05\x00")
        kind = self.rfile.read(4)[3]
        host = (
            socket.inet_ntoa(self.rfile.read(4))
            if kind == 1
            else self.rfile.read(self.rfile.read(1)[0]).decode()
        )
        [port] = struct.unpack(">H", self.rfile.read(2))
        self.server.seen.append((host, port))
        self.wfile.write(b"\x05\x00\x00\x01" + bytes(6))
        pass_on(self.connection, (host, port))


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
def running(handler: type[StreamRequestHandler], refusal: str = "") -> Iterator[Proxy]:
    """A proxy, until the block ends."""
    with Proxy(handler, refusal) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
