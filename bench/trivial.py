"""A server that only answers: how many requests the clients can send."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ANSWER = b"HTTP/1.1 201 CREATED\r\nContent-Length: 2\r\n\r\n{}"


class Answering(asyncio.Protocol):
    """Each request arrives in one piece, since the clients send it so."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, _data: bytes) -> None:
        assert isinstance(self._transport, asyncio.WriteTransport)
        self._transport.write(ANSWER)


@contextmanager
def trivial_server() -> Iterator[int]:
    """Its port; it runs in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.communicate()  # closes its input, at which it ends


async def main() -> None:
    """The process: print the port, then serve until the input ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Answering, "127.0.0.1", 0, backlog=1000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
