"""The client of Redis that an application's URL names, and how a script gets there.

Any ready client runs a script and waits. On a client that we made, a script can be sent now and its
reply read later, so that PostgreSQL commits meanwhile.
"""

from __future__ import annotations

import codecs
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import TIMEOUT_MAX
from typing import Any
from urllib.parse import SplitResult, urlsplit

from redis import ConnectionError as RedisConnectionError
from redis import Redis, RedisError, ResponseError
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

from flask_idempotency.core.errors import ConfigurationError

TIMEOUT_SECONDS = 0.05
"""For connecting, and for a reply. Redis replies in a tenth of a millisecond; a request that waits
longer than this would be faster without it. ``?socket_timeout=`` in the URL wins."""

SCHEMES = ("redis", "rediss", "unix")
"""What ``IDEMPOTENCY_REDIS_URL`` may begin with; ``rediss`` is with TLS."""

_OPTIONS: dict[str, Any] = {
    "socket_timeout": TIMEOUT_SECONDS,
    "socket_connect_timeout": TIMEOUT_SECONDS,
    # redis-py's default retries would block a request for seconds.
    "retry": Retry(NoBackoff(), 0),
    # Every Redis speaks RESP 2. For RESP 3, redis-py's default, it must be version 6.
    "protocol": 2,
}

_parse: Any = parse_url  # redis-py leaves it without types

Client = Any  # Redis | RedisCluster; their common interface has no type of its own
Reply = Callable[[], Any]


class OwnRedis(Redis):
    """The client that we made: a command can be sent now, and its reply read later.

    **No reply is ever read as that of another command.** Between the two a connection belongs to its
    command alone. It is kept for the next one only after its reply was read; whatever happens before
    (an error, ``SystemExit``, nobody asking for the reply) takes the connection with it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._kept: deque[Any] = deque()

    def send(self, *command: Any) -> Reply:
        """Send a command. The returned function waits for its reply; call it once, or never.

        The command must bear being run twice: if its connection has been idle, and turns out to be
        closed or to lead to what is no longer the primary, it is sent again on a new one.
        """
        connection = self._idle_one()
        if connection is None:
            return self._send_on_a_new_one(command)
        try:
            connection.send_command(*command)
        except RedisConnectionError:
            return self._send_on_a_new_one(command)
        return partial(self._reply, connection, to_repeat=command)

    def _idle_one(self) -> Any:
        """A connection that is kept; not one of a parent process, which goes on using it."""
        try:
            while (connection := self._kept.pop()).pid != os.getpid():
                pass
        except IndexError:
            return None
        return connection

    def _send_on_a_new_one(self, command: tuple[Any, ...]) -> Reply:
        pool = self.connection_pool
        connection = pool.connection_class(**pool.connection_kwargs)
        connection.send_command(*command)
        return partial(self._reply, connection)

    def _reply(self, connection: Any, to_repeat: tuple[Any, ...] | None = None) -> Any:
        try:
            reply = connection.read_response(disable_decoding=True)
        except (RedisConnectionError, ResponseError):  # a time-out is neither
            connection.disconnect()
            if to_repeat is None:
                raise
            return self._send_on_a_new_one(to_repeat)()
        except BaseException:
            connection.disconnect()
            raise
        self._kept.append(connection)
        return reply


def send_script(client: Client, script: str, key: bytes, *arguments: bytes) -> Reply:
    """Send a script that reads and writes one key; the returned function gives its reply.

    Only a client that we made sends it now. Another cannot send without waiting, so it does both when
    it is asked: a cluster's chooses a node, and a subclass may do anything besides sending.
    """
    command = "EVAL", script.encode(), b"1", key, *arguments  # redis-py takes long with other types
    if isinstance(client, OwnRedis):
        return client.send(*command)
    return partial(client.execute_command, *command, NEVER_DECODE=True)


def client_from_url(url: str) -> Callable[[], Client]:
    """A function that makes the client for ``IDEMPOTENCY_REDIS_URL``; it connects at its first use.

    Options are those of redis-py's ``from_url``. Raises ``ConfigurationError`` for a URL that the first
    request would find to be wrong; no message quotes it.
    """
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator or scheme not in SCHEMES:
        raise _unusable("its scheme is not known" if separator else "it has no scheme")
    url = f"{scheme}://{rest}"
    with _reading("it"):
        parts = urlsplit(url)
    _check_encoded(url, parts)
    if scheme == "unix" and (parts.path in ("", "/") or parts.netloc.rpartition("@")[2]):
        raise _unusable("the path of its socket is missing, which begins with /")
    with _reading("its database"):
        if scheme != "unix" and int(parts.path.strip("/") or 0) < 0:
            raise ValueError
    with _reading("its host, its port or one of its options"):
        _check_options(url)
        OwnRedis.from_url(url, **_OPTIONS).connection_pool.make_connection()
        client = OwnRedis.from_url(url, **_OPTIONS)
    return lambda: client


def _check_encoded(url: str, parts: SplitResult) -> None:
    """Refuse a password that ends early in the URL: the rest would count as a host, which logs show."""
    options = parts.query.split("&") if parts.query else []
    behind_host = f"{parts.path}?{parts.query}"
    if "#" in url or "@" in behind_host or not all("=" in option for option in options):
        raise _unusable(
            "there is a #, an @ behind the host, or an option without =, so perhaps a special character"
            ' is not percent-encoded: write the password as urllib.parse.quote(password, safe="")'
            " gives it, and the user, the path and the options likewise"
        )


def _check_options(url: str) -> None:
    """Raise ``ValueError`` or ``LookupError`` for what redis-py would find at the first request."""
    options = _parse(url)
    if options.get("db", 0) < 0:
        raise ValueError
    for name in ("socket_timeout", "socket_connect_timeout"):
        if not 0 < options.get(name, TIMEOUT_SECONDS) <= TIMEOUT_MAX:  # nor is nan
            raise ValueError
    codecs.lookup(options.get("encoding", "utf-8"))
    codecs.lookup_error(options.get("encoding_errors", "strict"))


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except (LookupError, RedisError, TypeError, ValueError):  # they may quote the password
        raise _unusable(f"{what} cannot be read") from None


def _unusable(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"IDEMPOTENCY_REDIS_URL cannot be used: {why}. Allowed are redis://user:password@host:port/0,"
        " rediss://… for TLS and unix:///path?db=0; special characters in user and password are"
        " percent-encoded. For a cluster or Sentinels, give init_app a ready client as redis="
    )


def cause(error: Exception) -> str:
    """An error of redis-py in words, which its ``repr`` lacks, and the fix if they do not name it.

    Redis quotes the arguments of a command that it does not know; HELLO's are a user and a password.
    """
    words = f"{type(error).__name__}: {error}".partition(", with args beginning with")[0]
    if re.search("hello|noproto", words, re.IGNORECASE):
        words += (
            ". This server does not speak RESP 3: give protocol=2 to the redis-py client, or take"
            " ?protocol=3 out of IDEMPOTENCY_REDIS_URL"
        )
    return words


def milliseconds(seconds: float) -> int:
    """As the scripts take it."""
    return max(1, int(seconds * 1000))
