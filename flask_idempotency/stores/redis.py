"""The fast lock in Redis: turns concurrent duplicates away in one round trip.

It may forget (restart, eviction, failover), lie (a lock left by a dead worker, a value of somebody
else) or be gone. Nothing is built on it but speed: whatever it says, the record's row decides who
runs, so it holds no answer and no key, and a forged value can do no more than delay one request by
``probe_after`` seconds.

A lock's value is ``1:<owner>:<fingerprint>``, and ``1:done`` after the end: format version, random
token (22 characters), fingerprint in hex. One small script reads and sets in one round trip; it
works on every Redis since 2.6 and on Valkey (``SET ... NX GET PX`` needs Redis 7).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from redis import Redis, RedisCluster, Sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry

from ..core.ports import Glance
from ..core.records import Claim
from ..errors import ConfigurationError

log = logging.getLogger("flask_idempotency")

TIMEOUT_SECONDS = 0.1
"""For connecting and for an answer. Redis answers in a tenth of a millisecond; a request that waited
longer than this for it would have been faster without it. ``?socket_timeout=`` in the URL wins."""

LOCK_SECONDS = 10.0
"""How long a lock outlives a worker that died. Nothing depends on it: a duplicate older than
``probe_after`` asks the records. Shorter, and a slow view's duplicates reach Postgres more often;
longer, and Redis keeps more locks of the dead."""

MARKER_SECONDS = 600.0
"""How long a finished key is remembered, to send retries straight to one plain read. Most retries
come within minutes; after it a replay costs one message more."""

PAUSE_SECONDS = 2.0
"""How long Redis is left alone after it failed. Of all requests in that time one waits for it."""

ACQUIRE = """
local held = redis.pcall('GET', KEYS[1])
if not held then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return {0, 0}
end
if held == ARGV[1] then return {0, 0} end
local alike = type(held) == 'string' and string.sub(held, 1, 2) == '1:'
              and string.sub(held, -#ARGV[3]) == ARGV[3]
return {alike and 1 or 2, redis.call('PTTL', KEYS[1])}
"""
# -> {0 = mine, 1 = same fingerprint, 2 = anything else; milliseconds the lock has left}

RELEASE = """
if redis.pcall('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""

FINISH = """
redis.call('SET', KEYS[1], '1:done', 'PX', ARGV[2])
"""
# Also over the lock of somebody else. Whoever finished need not have had the lock, and who has it
# now can only find the answer. A marker left where it should not be costs one look at the records.

T = TypeVar("T")

Client = Any  # Redis | RedisCluster; their common face has no type of its own


class RedisLock:
    """The lock of one application. ``client`` is called once, at the first use."""

    def __init__(
        self,
        client: Callable[[], Client],
        prefix: str,
        *,
        probe_after: float,
        on_failure: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._make_client = client
        self._client: Client | None = None
        self._prefix = prefix
        self._probe_after = probe_after
        self._lock_seconds = max(LOCK_SECONDS, 2 * probe_after)
        self._on_failure = on_failure
        self._skip_until: float | None = None

    def acquire(self, claim: Claim) -> Glance:
        """Take the lock if it is free. One round trip, or none while Redis is left alone."""
        arguments = (_ms(self._lock_seconds), _fingerprint(claim))
        return self._call(self._glance, ACQUIRE, claim, *arguments) or Glance.ASK

    def _glance(self, reply: Any) -> Glance:
        kind, left_ms = (int(number) for number in reply)
        if kind == 0:
            return Glance.MINE
        age = self._lock_seconds - left_ms / 1000
        young = left_ms > 0 and 0 <= age < self._probe_after
        return Glance.BUSY if kind == 1 and young else Glance.ASK

    def release(self, claim: Claim) -> None:
        """Give the lock back, if the value is still this claim's."""
        self._call(bool, RELEASE, claim)

    def finish(self, claim: Claim) -> None:
        """Leave the marker in place of whatever lock there is."""
        self._call(bool, FINISH, claim, _ms(min(MARKER_SECONDS, claim.ttl_seconds)))

    def ping(self) -> None:
        """Ask Redis for a sign of life, past the breaker. Raises what the client raises."""
        self._connected().ping()

    def memory(self) -> dict[str, Any]:
        """What Redis says of its memory. Raises what the client raises."""
        info: dict[str, Any] = self._connected().info("memory")
        return info

    def _connected(self) -> Client:
        if self._client is None:
            self._client = self._make_client()
        return self._client

    def _call(
        self, read: Callable[[Any], T], script: str, claim: Claim, *arguments: object
    ) -> T | None:
        """What ``read`` makes of a script's reply; None if Redis gave none, or is left alone."""
        now = time.monotonic()
        if self._skip_until is not None:
            if now < self._skip_until:
                return None
            self._skip_until = now + PAUSE_SECONDS  # this request tries; the others go on without
        key = self._prefix + claim.key.hex()
        value = f"1:{claim.owner}:{_fingerprint(claim)}"
        try:
            result = read(self._connected().eval(script, 1, key, value, *arguments))
        except Exception as error:  # whatever goes wrong there, the records decide
            self._skip_until = now + PAUSE_SECONDS
            log.warning("Redis failed, going on without it for %s s: %r", PAUSE_SECONDS, error)
            self._on_failure(error)
            return None
        self._skip_until = None
        return result


class NoLock:
    """No lock at all: the records decide alone (the ``postgres`` store)."""

    def acquire(self, claim: Claim) -> Glance:  # noqa: ARG002
        """Knows nothing."""
        return Glance.ASK

    def release(self, claim: Claim) -> None:
        """Has nothing to give back."""

    def finish(self, claim: Claim) -> None:
        """Leaves no marker."""


def client_from_url(url: str) -> Callable[[], Client]:
    """A function that makes the client for ``IDEMPOTENCY_REDIS_URL``; it connects at its first use.

    Takes ``redis://``, ``rediss://``, ``unix://``, ``redis+cluster://host:port`` and
    ``redis+sentinel://host:port,host:port/service``. No client retries by itself: an owner must not
    meet its own lock, and redis-py's default retries would hold a request for seconds. Raises
    ``ConfigurationError`` for any other URL.
    """
    options: dict[str, Any] = {
        "socket_timeout": TIMEOUT_SECONDS,
        "socket_connect_timeout": TIMEOUT_SECONDS,
        "retry": Retry(NoBackoff(), 0),
    }
    scheme, _, rest = url.partition("://")
    wrong = f"the scheme {scheme!r} is not known"
    try:
        parts = urlsplit(url)
        if scheme in ("redis", "rediss", "unix"):
            wrong = "its port, its database or one of its options cannot be read"
            if scheme == "unix" or re.fullmatch(r"/?\d*/?", parts.path):
                client = Redis.from_url(url, **options)
                return lambda: client
        if scheme == "redis+cluster":
            wrong = "its host or its port cannot be read"
            host, _port = parts.hostname, parts.port
            if host:
                return lambda: RedisCluster.from_url(f"redis://{rest}", **options)
        if scheme == "redis+sentinel":
            wrong = "its hosts, its service or its database cannot be read"
            if master := _sentinel(url, options):
                return lambda: master
    except ValueError:
        pass  # it may quote the password
    raise ConfigurationError(
        f"IDEMPOTENCY_REDIS_URL cannot be used: {wrong}. Allowed are redis://host:port/0,"
        " rediss://host:port/0, unix:///path?db=0, redis+cluster://host:port and"
        " redis+sentinel://host:port/service"
    )


def _sentinel(url: str, options: dict[str, Any]) -> Client | None:
    """The master of ``redis+sentinel://[user:password@]host:port[,host:port]/service[/db]``."""
    credentials, _, hosts = urlsplit(url).netloc.rpartition("@")
    service, _, database = urlsplit(url).path.strip("/").partition("/")
    if not (hosts and service):
        return None
    username, _, password = credentials.partition(":")
    nodes = []
    for node in hosts.split(","):
        host, _, port = node.partition(":")
        nodes.append((host, int(port or 26379)))
    login = {"username": username or None, "password": password or None, "db": int(database or 0)}
    make: Any = Sentinel  # redis-py leaves it without types
    return make(nodes, sentinel_kwargs=options, **options).master_for(service, **login, **options)


def _fingerprint(claim: Claim) -> str:
    return f"{claim.fingerprint.version:x}.{claim.fingerprint.digest.hex()}"


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))
