"""The client of Redis that an application's URL names."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import TIMEOUT_MAX
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from redis import Redis, RedisCluster, RedisError, Sentinel
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.connection import parse_url
from redis.retry import Retry

from flask_idempotency.core.errors import ConfigurationError

TIMEOUT_SECONDS = 0.1
"""For connecting, and for a reply. Redis replies in a tenth of a millisecond; a request that waits
longer than this would be faster without it. ``?socket_timeout=`` in the URL wins."""

SCHEMES = (
    "redis",
    "rediss",
    "unix",
    "redis+cluster",
    "rediss+cluster",
    "redis+sentinel",
    "rediss+sentinel",
)
"""What ``IDEMPOTENCY_REDIS_URL`` may begin with; ``rediss`` is with TLS."""

_PORTS = {"cluster": 6379, "sentinel": 26379}

_OPTIONS: dict[str, Any] = {
    "socket_timeout": TIMEOUT_SECONDS,
    "socket_connect_timeout": TIMEOUT_SECONDS,
    "retry": Retry(NoBackoff(), 0),
    # Every Redis speaks RESP 2. For RESP 3, redis-py's default, it must be version 6.
    "protocol": 2,
}

# redis-py leaves these without types.
_parse: Any = parse_url
_node: Any = ClusterNode
_make_sentinel: Any = Sentinel

Client = Any  # Redis | RedisCluster; their common interface has no type of its own


def client_from_url(url: str) -> Callable[[], Client]:
    """A function that makes the client for ``IDEMPOTENCY_REDIS_URL``; it connects at its first use.

    Options are those of redis-py's ``from_url``, with every scheme of :data:`SCHEMES`. No client
    retries by itself: redis-py's default retries would block a request for seconds. Raises
    ``ConfigurationError`` for any other URL; no message quotes it.
    """
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator or scheme not in SCHEMES:
        raise _unusable("its scheme is not known" if separator else "it has no scheme")
    url = f"{scheme}://{rest}"
    with _reading("it"):
        parts = urlsplit(url)
    _check_encoded(url, parts)
    base, _, kind = scheme.partition("+")
    if base == "unix" and (parts.path in ("", "/") or parts.netloc.rpartition("@")[2]):
        raise _unusable("the path of its socket is missing, which begins with /")
    if not kind:
        client = _one_server(url, "" if base == "unix" else parts.path)
        return lambda: client
    login, at, hosts = parts.netloc.rpartition("@")
    service, database = "", parts.path.removeprefix("/").rstrip("/")
    if kind == "sentinel":
        service, _, database = database.partition("/")
        service = unquote(service)
    with _reading("its port or one of its hosts"):
        nodes = [_host_and_port(host, _PORTS[kind]) for host in hosts.split(",")]
    options = _options(f"{base}://{login}{at}localhost/{database}?{parts.query}", f"/{database}")
    return (_sentinel if kind == "sentinel" else _cluster)(nodes, service, options)


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


def _options(url: str, path: str) -> dict[str, Any]:
    """A URL's options besides its host, for clients without a ``from_url`` of their own."""
    _one_server(url, path)
    options = {**_OPTIONS, **_parse(url), "ssl": url.startswith("rediss:")}
    return {n: v for n, v in options.items() if n not in ("host", "port", "connection_class")}


def _cluster(nodes: list[tuple[str, int]], _: str, options: dict[str, Any]) -> Callable[[], Client]:
    if options.pop("db", 0) != 0:
        raise _unusable("a cluster has no database but 0")
    return lambda: RedisCluster(startup_nodes=[_node(*place) for place in nodes], **options)


def _sentinel(
    nodes: list[tuple[str, int]], service: str, options: dict[str, Any]
) -> Callable[[], Client]:
    """The master's client. User, password and database are the master's, not the Sentinels'."""
    if not service:
        raise _unusable("the name of its service is missing")
    common = ("socket_", "ssl", "retry", "protocol")
    to_sentinels = {name: value for name, value in options.items() if name.startswith(common)}
    master = _make_sentinel(nodes, sentinel_kwargs=to_sentinels).master_for(service, **options)
    return lambda: master


def _one_server(url: str, path: str) -> Client:
    """The client of one server. Raises now what the first request would find."""
    with _reading("its database"):
        if int(path.strip("/") or 0) < 0:
            raise ValueError
    with _reading("its host, its port or one of its options"):
        _check_options(url)
        Redis.from_url(url, **_OPTIONS).connection_pool.make_connection()
        return Redis.from_url(url, **_OPTIONS)


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


def _host_and_port(text: str, usual_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError
    return parts.hostname, parts.port or usual_port


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except (LookupError, RedisError, TypeError, ValueError):  # they may quote the password
        raise _unusable(f"{what} cannot be read") from None


def _unusable(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"IDEMPOTENCY_REDIS_URL cannot be used: {why}. Allowed are redis://user:password@host:port/0,"
        " unix:///path?db=0, redis+cluster://host:port and"
        " redis+sentinel://host:port/service/0; several hosts with commas between them; rediss in place"
        " of redis for TLS; special characters in user and password are percent-encoded"
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
