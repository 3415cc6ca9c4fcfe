"""How a script gets to Redis, and its reply back.

``Redis.eval`` of redis-py makes about 250 function calls, nearly all of them in its pool and in packing
the command. On a connection that is kept open, with a command packed here, there are about 45. The
connections themselves are redis-py's: it knows how to log in, TLS, Sentinels and both protocols.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol

from redis import ConnectionError as RedisConnectionError
from redis import Redis, ResponseError

from .client import Client

Reply = Callable[[], Any]


class Wire(Protocol):
    """Sends scripts that read and write one key."""

    def send(self, script: str, key: bytes, *arguments: bytes) -> Reply:
        """Send a script. The returned function waits for its reply; call it once, or never.

        The script must bear being run twice: it is sent again if its connection turns out to be closed.
        """
        ...


def wire_of(client: Client) -> Wire:
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
        """See :class:`Wire`."""
        command = "EVAL", script, 1, key, *arguments
        return partial(self._client.execute_command, *command, NEVER_DECODE=True)


class KeptWire:
    """On connections of its own, beside the pool, which other parts of the application may need.

    **No reply is ever read as that of another command.** A conversation has its connection to itself,
    and the connection is idle again only after its one reply was read in full. Whatever ends a
    conversation before (an error, ``SystemExit``, a greenlet killed, nobody asking for the reply)
    takes the connection with it.
    """

    def __init__(self, client: Redis) -> None:
        self._pool = client.connection_pool
        self._idle: deque[Any] = deque()

    def send(self, script: str, key: bytes, *arguments: bytes) -> Reply:
        """See :class:`Wire`."""
        command = _packed(script, key, *arguments)
        connection = self._kept()
        if connection is None:
            return self._on_a_new_one(command)
        try:
            connection.send_packed_command(command, check_health=False)
        except RedisConnectionError:
            return self._on_a_new_one(command)
        return partial(self._reply, connection, command)

    def _kept(self) -> Any:
        pid = os.getpid()
        try:
            # The parent of a forked process goes on using its connections, and would get our replies.
            while (connection := self._idle.pop()).pid != pid:
                pass
        except IndexError:
            return None
        return connection

    def _on_a_new_one(self, command: list[bytes]) -> Reply:
        connection = self._pool.connection_class(**self._pool.connection_kwargs)
        connection.connect()  # sending would, too, but without asking Sentinels for the primary
        connection.send_packed_command(command, check_health=False)
        return partial(self._reply, connection)

    def _reply(self, connection: Any, to_repeat: list[bytes] | None = None) -> Any:
        """The reply. ``to_repeat`` is the command, if its connection is an old one.

        That may have been closed by now, or lead to what is no longer the primary: older servers
        do not say so with an error of its own. After a time-out nothing is sent again.
        """
        try:
            reply = connection.read_response(disable_decoding=True)
        except (RedisConnectionError, ResponseError):
            connection.disconnect()
            if to_repeat is None:
                raise
            return self._on_a_new_one(to_repeat)()
        except BaseException:
            connection.disconnect()
            raise
        self._idle.append(connection)
        return reply


def _packed(script: str, *arguments: bytes) -> list[bytes]:
    """``EVAL`` as it is sent: how many words follow, then each with its length in bytes."""
    return [b"*%d\r\n%b%b" % (len(arguments) + 3, _start(script), _words(*arguments))]


@cache
def _start(script: str) -> bytes:
    return _words(b"EVAL", script.encode(), b"1")


def _words(*words: bytes) -> bytes:
    return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])
