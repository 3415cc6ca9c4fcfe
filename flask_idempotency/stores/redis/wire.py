"""How a script gets to Redis, and its reply back.

``Redis.eval`` of redis-py makes about 250 function calls, nearly all of them in its pool and in packing
the command. On a connection that is kept open, with a command packed here, there are about 45. The
connections themselves are redis-py's: it knows how to log in, TLS, Sentinels and both protocols.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from functools import cache, partial
from threading import Thread
from time import monotonic
from typing import Any

from redis import ConnectionError as RedisConnectionError
from redis import Redis, ResponseError
from redis import TimeoutError as RedisTimeoutError

from .client import Client

Reply = Callable[[], Any]

COMING = "an earlier connection is still being made"

UNLIMITED_SECONDS = 86400.0
"""How long a client without a time limit waits: a day. So each exchange has a limit to count from."""

BYTES_PER_SECOND = 1_000_000
"""What a reply in several pieces gets more time for. The lock's replies have some twenty bytes, the
records' of the store ``redis`` a whole response, for which a slow network needs that long."""


def wire_of(client: Client) -> KeptWire | ClientWire:
    """The fastest way that goes through a client.

    A cluster's client chooses a node, and a subclass or another package's may do anything besides
    sending.
    """
    return KeptWire(client) if type(client) is Redis else ClientWire(client)


class ClientWire:
    """By the client's own command. It cannot send without waiting, so it sends when it is asked."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def send(self, script: str, key: bytes, *arguments: bytes) -> Reply:
        """See :class:`KeptWire`."""
        command = "EVAL", script, 1, key, *arguments
        return partial(self._client.execute_command, *command, NEVER_DECODE=True)


class KeptWire:
    """On connections of its own, beside the pool, which other parts of the application may need.

    **No reply is ever read as that of another command.** A conversation has its connection to itself,
    and the connection is idle again only after its one reply was read in full. Whatever ends a
    conversation before (an error, ``SystemExit``, a greenlet killed, nobody asking for the reply)
    takes the connection with it.

    **An exchange has one time limit**, the client's ``socket_timeout``, whatever pieces its reply comes
    in. If it has to connect, with the resolution of a name and the sign-in, it has
    ``socket_connect_timeout`` more. What the caller does before it asks for the reply is not counted.
    """

    def __init__(self, client: Redis) -> None:
        self._pool = client.connection_pool
        self._connection_class = _in_time(self._pool.connection_class)
        self._idle: deque[Any] = deque()
        self._late: Thread | None = None

    def send(self, script: str, key: bytes, *arguments: bytes) -> Reply:
        """Send a script that reads and writes one key.

        The returned function waits for the reply; call it once, or never. The script must bear being
        run twice: it is sent again if its connection turns out to be closed.
        """
        # How many words follow, then each with its length.
        command = [b"*%d\r\n%b%b" % (len(arguments) + 4, _start(script), _words(key, *arguments))]
        late = self._late
        is_coming = late is not None and late.is_alive()  # asked first: what comes meanwhile is kept
        connection = self._kept()
        if connection is None:
            if is_coming:
                raise RedisTimeoutError(COMING)
            return self._on_a_new_one(command)
        try:
            connection.send_packed_command(command, check_health=False)
        except RedisConnectionError:
            return self._on_a_new_one(command)
        return partial(self._reply, connection, to_repeat=command)

    def _kept(self) -> Any:
        pid = os.getpid()
        try:
            # The parent of a forked process goes on using its connections, and would get our replies.
            while (connection := self._idle.pop()).pid != pid:
                pass
        except IndexError:
            return None
        return connection

    def _on_a_new_one(self, command: list[bytes], seconds: float | None = None) -> Reply:
        connection = self._connection_class(**self._pool.connection_kwargs)
        limit = connection.socket_timeout or UNLIMITED_SECONDS
        # A Unix socket has no limit of its own for connecting.
        to_connect = getattr(connection, "socket_connect_timeout", None) or limit
        ends = monotonic() + to_connect + (limit if seconds is None else seconds)
        self._connect(connection, ends - monotonic())
        connection.send_packed_command(command, check_health=False)
        return partial(self._reply, connection, ends - monotonic())

    def _connect(self, connection: Any, seconds: float) -> None:
        """Connect, in a thread: nothing else bounds how long a name's resolution takes.

        A connection that comes later is kept for the next request. Until it comes, or has failed, no
        other is begun, so that no threads pile up. Raises what redis-py raises.
        """
        if self._late is not None and self._late.is_alive():
            raise RedisTimeoutError(COMING)
        connected: Future[None] = Future()
        thread = Thread(target=_tell, args=(connected, connection), name="redis-connect", daemon=True)
        thread.start()
        try:
            connected.result(seconds)
        except NotInTime:
            self._late = thread
            connected.add_done_callback(partial(self._keep, connection))
            raise RedisTimeoutError("connecting took too long") from None

    def _keep(self, connection: Any, connected: Future[None]) -> None:
        if connected.exception() is None:
            self._idle.append(connection)

    def _reply(
        self, connection: Any, seconds: float | None = None, to_repeat: list[bytes] | None = None
    ) -> Any:
        """The reply, for which there are ``seconds``, or the client's own.

        ``to_repeat`` is the command, if its connection is an old one. That may have been closed by now,
        or lead to what is no longer the primary: older servers do not say so with an error of its own.
        After a time-out nothing is sent again.
        """
        incoming, limit = connection.incoming, connection.socket_timeout or UNLIMITED_SECONDS
        ends = incoming.ends = monotonic() + (limit if seconds is None else seconds)
        incoming.has_all_its_time = seconds is None
        try:
            reply = connection.read_response(disable_decoding=True)
        except (RedisConnectionError, ResponseError):
            connection.disconnect()
            if to_repeat is None:
                raise
            return self._on_a_new_one(to_repeat, ends - monotonic())()
        except BaseException:
            connection.disconnect()
            raise
        self._idle.append(connection)
        return reply


def _tell(connected: Future[None], connection: Any) -> None:
    try:
        connection.connect()  # sending would, too, but without asking Sentinels for the primary
    except BaseException as error:
        connected.set_exception(error)
    else:
        connected.set_result(None)


def _in_time(connection_class: Any) -> Any:
    """The class with a socket that reads a whole reply in time."""

    class InTime(connection_class):  # type: ignore[misc]
        def _connect(self) -> Any:
            self.incoming = Incoming(super()._connect())
            return self.incoming

    return InTime


class Incoming:
    """A socket whose reply has one time limit. The socket's own is for each piece of it."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.sendall = inner, inner.sendall  # the rest goes through __getattr__
        self.ends: float | None = None  # while connecting, which has a limit of its own
        self.has_all_its_time = True  # then the socket's own limit will do for the first piece

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def recv(self, size: int) -> Any:
        """See ``socket``."""
        if self.has_all_its_time:
            self.has_all_its_time = self.ends is None
            return self._inner.recv(size)
        return self._in_time(self._inner.recv, size)

    def recv_into(self, buffer: Any) -> Any:
        """See ``socket``; hiredis calls it."""
        return self._in_time(self._inner.recv_into, buffer)

    def _in_time(self, receive: Callable[[Any], Any], argument: Any) -> Any:
        if self.ends is None:
            return receive(argument)
        usual, left = self._inner.gettimeout(), self.ends - monotonic()
        if left <= 0:
            raise TimeoutError
        self._inner.settimeout(left)
        try:
            received = receive(argument)
        finally:
            self._inner.settimeout(usual)
        self.ends += (received if isinstance(received, int) else len(received)) / BYTES_PER_SECOND
        return received


@cache
def _start(script: str) -> bytes:
    return _words(b"EVAL", script.encode(), b"1")


def _words(*words: bytes) -> bytes:
    return b"".join(map(b"$%d\r\n%b\r\n".__mod__, zip(map(len, words), words, strict=True)))
