"""A TCP proxy on 127.0.0.1 whose faults are set while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from servers.find import free_port

if TYPE_CHECKING:
    from typing_extensions import Self

_CALL_SECONDS = 10.0  # a knob turns at once; longer means that the proxy's thread is dead
_SO_ATTACH_FILTER = 26  # Linux; Python has no name for it
_LINGER_ZERO = struct.pack("ii", 1, 0)  # makes a close send a reset instead of a farewell


class FaultProxy:
    """Passes bytes on between clients and one server, until told otherwise.

    ::

        with FaultProxy(pg.url) as proxy:   # clients use proxy.url
            proxy.delay = 0.2               # seconds, before each piece of data, both ways
            proxy.trickle = 0.08            # seconds, before each byte of an answer
            proxy.hang(); proxy.flow()      # connections stay up, nothing passes; and back
            proxy.vanish()                  # a host without power: nothing is even acknowledged
            proxy.forget()                  # the same for connections that are open, not for new ones
            proxy.cut()                     # TCP reset of every open connection
            proxy.refuse(); proxy.accept()  # new connections are refused; and back
            proxy.lose_answer(b"COMMIT")    # the next COMMIT arrives, its answer does not
            proxy.hold(b"COMMIT")           # the next COMMIT waits in the proxy, until …
            proxy.wait_until_held()
            proxy.let_go()                  # … it is passed on, or cut() drops it

    Attributes:
        url: the server's URL by way of the proxy.
        port: where the proxy listens, on 127.0.0.1.
        delay: seconds each piece of data is held back, both ways.
        trickle: seconds each byte of an answer is held back.
        connections: how many clients have connected so far.
        lost: how many answers ``lose_answer`` has lost so far.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        usual_port = 6379 if parts.scheme.startswith("redis") else 5432
        self._target = (parts.hostname or "127.0.0.1", parts.port or usual_port)
        self.port = free_port()
        login = "".join(parts.netloc.rpartition("@")[:2])
        self.url = parts._replace(netloc=f"{login}127.0.0.1:{self.port}").geturl()
        self.delay = 0.0
        self.trickle = 0.0
        self.connections = 0
        self.lost = 0
        self._pattern: bytes | None = None
        self._holds = False
        self._held = threading.Event()
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._let_go = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def hang(self) -> None:
        """A black hole: connections stay up, also new ones, and nothing passes until ``flow``."""
        self._call(self._flowing.clear)

    def flow(self) -> None:
        """End ``hang``; what was held back is passed on."""
        self._call(self._flowing.set)

    def vanish(self) -> None:
        """A host without power: packets are dropped, those of a connect too. Linux only."""
        self._call(lambda: _drop_packets([*self._sockets(), *getattr(self._listener, "sockets", ())]))

    def forget(self) -> None:
        """A firewall that knows the open connections no more: like ``vanish``, for those alone."""
        self._call(lambda: _drop_packets(self._sockets()))

    def cut(self) -> None:
        """Reset every open connection, to the client and to the server."""
        self._call(self._reset_all)

    def refuse(self) -> None:
        """Refuse new connections until ``accept``; open ones live on."""
        if self._listener is not None:
            self._call(self._listener.close)
            self._listener = None

    def accept(self) -> None:
        """Take connections, on the same port as before."""
        if self._listener is None:
            serving = asyncio.start_server(self._connected, "127.0.0.1", self.port)
            self._listener = asyncio.run_coroutine_threadsafe(serving, self._loop).result(_CALL_SECONDS)

    def lose_answer(self, pattern: bytes) -> None:
        """Once: pass on what a client sends with ``pattern`` in it, then lose the server's answer.

        The connection is reset when the answer comes, so the server has done its work by then.
        """
        self._pattern, self._holds = pattern, False

    def hold(self, pattern: bytes) -> None:
        """Once: keep what a client sends with ``pattern`` in it, until ``let_go`` or ``cut``.

        Other connections are not touched, and the server's side of this one stays up even if the
        client dies meanwhile.
        """
        self._held.clear()
        self._call(self._let_go.clear)
        self._pattern, self._holds = pattern, True

    def wait_until_held(self) -> None:
        """Return when ``hold`` has caught its data. Raises ``TimeoutError`` if it does not come."""
        if not self._held.wait(_CALL_SECONDS):
            raise TimeoutError("the data to hold did not come")

    def let_go(self) -> None:
        """Pass on what ``hold`` keeps."""
        self._call(self._let_go.set)

    def _call(self, turn: Callable[[], object]) -> None:
        """Run it in the proxy's thread and wait until it is done."""

        async def work() -> None:
            turn()

        asyncio.run_coroutine_threadsafe(work(), self._loop).result(_CALL_SECONDS)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: Python 3.11 prints a traceback when one that asyncio made is cancelled.
        task = self._loop.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        link = _Link(reader, writer, server_reader, server_writer)
        self._links.add(link)
        try:
            await asyncio.gather(self._pass_up(link), self._pass_down(link))
        except OSError:
            link.reset()
        finally:
            self._links.discard(link)
            link.close()

    async def _pass_up(self, link: _Link) -> None:
        tail = b""  # the pattern may come in two pieces
        while data := await link.client_reader.read(65536):
            await self._hold_back()
            if self._pattern is not None:
                if self._pattern in tail + data:
                    self._pattern = None
                    await self._meet(link)
                else:
                    tail = (tail + data)[1 - len(self._pattern) :]
            link.server_writer.write(data)
            await link.server_writer.drain()
        await self._flowing.wait()
        link.server_writer.write_eof()

    async def _meet(self, link: _Link) -> None:
        """Do with the data that has the pattern as was asked."""
        if self._holds:
            self._held.set()
            await self._let_go.wait()
        else:
            link.loses_answer = True

    async def _pass_down(self, link: _Link) -> None:
        while data := await link.server_reader.read(65536):
            await self._hold_back()
            if link.loses_answer:
                self.lost += 1
                link.reset()
                return
            for part in _bytes(data) if self.trickle else [data]:
                await asyncio.sleep(self.trickle)
                link.client_writer.write(part)
                await link.client_writer.drain()
        await self._flowing.wait()
        link.client_writer.write_eof()

    async def _hold_back(self) -> None:
        if self.delay:
            await asyncio.sleep(self.delay)
        await self._flowing.wait()

    def __enter__(self) -> Self:
        self._thread.start()
        self.flow()
        self.accept()
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_CALL_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_SECONDS)
        self._loop.close()

    def _reset_all(self) -> None:
        for link in self._links:
            link.reset()
        self._let_go.set()  # what was held has nowhere to go now

    def _sockets(self) -> Iterator[Any]:
        for link in self._links:
            yield link.client_writer.get_extra_info("socket")
            yield link.server_writer.get_extra_info("socket")

    async def _end(self) -> None:
        self._reset_all()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


@dataclass(eq=False)
class _Link:
    """A client's connection and the one to the server that belongs to it."""

    client_reader: asyncio.StreamReader
    client_writer: asyncio.StreamWriter
    server_reader: asyncio.StreamReader
    server_writer: asyncio.StreamWriter
    loses_answer: bool = False

    def reset(self) -> None:
        _reset(self.client_writer)
        _reset(self.server_writer)

    def close(self) -> None:
        self.client_writer.close()
        self.server_writer.close()


def _bytes(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):  # closed already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
    writer.transport.abort()


def _drop_packets(sockets: Iterable[Any]) -> None:
    """Let the kernel drop what comes for them, by a socket filter whose program keeps 0 bytes."""
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(instruction))
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
