"""The fast lock of ``hybrid`` in Redis, and how everything here speaks to Redis.

The lock rejects concurrent duplicates in one round trip. It may forget (restart, eviction, failover),
lie (a lock left by a dead worker, somebody else's value) or be gone. Only speed depends on it: whatever
it says, the record's row decides who runs. So it holds no response and no key, and a forged value can
only delay one request by :data:`PROBE_AFTER_SECONDS`.

A lock's value is ``1:<owner>:<fingerprint>``, and ``1:done`` after the end: format version, random
token (12 characters), fingerprint in hex. What is sent works on every Redis since 2.6.12, when ``SET``
learnt ``PX`` and ``NX``, and on Valkey.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

from redis import Redis, RedisError
from redis.backoff import NoBackoff
from redis.retry import Retry

from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.core.logs import log
from flask_idempotency.core.ports import Glance, Lock
from flask_idempotency.core.records import Claim

from .admin import Finding, trial_claim

TIMEOUT_SECONDS = 0.05
"""For connecting, and for a reply. Redis replies in a tenth of a millisecond; a request that waits
longer than this would be faster without it. ``?socket_timeout=`` in the URL wins."""

SLOW_SECONDS = 0.2
"""From which time-out on a client of the application's own holds requests up while Redis is away."""

LOCK_SECONDS = 10.0
"""How long a lock outlives a worker that died. Nothing depends on it: about one that is older than
:data:`PROBE_AFTER_SECONDS` the records are asked. Shorter, and a slow view's duplicates reach Postgres
more often; longer, and Redis keeps more locks of the dead."""

PROBE_AFTER_SECONDS = 1.0
"""How old a lock must be before a duplicate asks the records whether its owner is alive. Shorter
notices dead workers sooner, longer keeps more duplicates away from Postgres. Most views end within a
second."""

MARKER_SECONDS = 600.0
"""How long a finished key is remembered, so that retries go straight to one plain read. Most retries
come within minutes; later a replay costs one more round trip."""

PAUSE_SECONDS = 2.0
"""How long Redis is left alone after it failed. After each pause one request probes it."""

# -> the lock's value, and the milliseconds that it has left. One that is carried out late, after its
# request has ended, leaves a dead worker's lock: nobody believes it after PROBE_AFTER_SECONDS.
ACQUIRE = """local held = redis.pcall('GET', KEYS[1])
if not held then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
return {held or ARGV[1], redis.call('PTTL', KEYS[1])}"""

RELEASE = "if redis.pcall('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end return 1"

_OPTIONS: dict[str, Any] = {
    "socket_timeout": TIMEOUT_SECONDS,
    "socket_connect_timeout": TIMEOUT_SECONDS,
    "retry": Retry(NoBackoff(), 0),  # redis-py's default retries would block a request for seconds
    "protocol": 2,  # every Redis speaks it; RESP 3, redis-py's default, needs Redis 6
}

# A # or @ behind the host is most likely of a password that is not encoded: the rest of it would count
# as a host, which logs show.
_URL = re.compile(r"(rediss?://[^/?#]+(/\d*)?|unix://([^/?#@]*@)?/[^?#@]+)(\?[^#@]*)?")

_UNUSABLE = (
    "IDEMPOTENCY_REDIS_URL cannot be used. Allowed are redis://user:password@host:port/0, rediss://…"
    " for TLS and unix:///path?db=0, each with options of redis-py's from_url. Percent-encode special"
    ' characters; urllib.parse.quote(password, safe="") does. For a cluster or Sentinels, give init_app'
    " a ready client as redis="
)

Client = Any  # Redis | RedisCluster; their common interface has no type of its own
Reply = Callable[[], Any]


class OwnRedis(Redis):
    """The client of ``IDEMPOTENCY_REDIS_URL``: a command can be sent now, and its reply read later."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._idle: deque[Any] = deque()  # a pool of redis-py's own takes three times as long

    def send(self, *command: Any) -> Reply:
        """Send a command; the function that is returned reads its reply.

        **No reply is ever read as that of another command.** A connection is kept for the next one only
        after its reply was read; whatever happens before (an error, ``SystemExit``, nobody asking for
        the reply) closes it. So an error of what is no longer the primary leads to a new connection.
        """
        connection = self._connection()
        try:
            connection.send_packed_command([_packed(command)])
        except BaseException:
            connection.disconnect()
            raise
        return partial(self._read, connection)

    def _read(self, connection: Any) -> Any:
        try:
            reply = connection.read_response(disable_decoding=True)
        except BaseException:
            connection.disconnect()
            raise
        self._idle.append(connection)
        return reply

    def _connection(self) -> Any:
        """Return one that is idle and still open, or a new one; never one of a parent process."""
        while self._idle:
            with suppress(IndexError, OSError, RedisError):
                connection = self._idle.pop()
                if connection.pid == os.getpid() and not connection.can_read():
                    return connection
                connection.disconnect()
        pool = self.connection_pool
        return pool.connection_class(**pool.connection_kwargs)


def _packed(command: Iterable[Any]) -> bytes:
    """A command as Redis reads it: redis-py's serializer takes three times as many calls."""
    parts = [each if isinstance(each, bytes) else str(each).encode() for each in command]
    lines = [b"$%d\r\n%b\r\n" % (len(part), part) for part in parts]
    return b"*%d\r\n%b" % (len(lines), b"".join(lines))


def client_from_url(url: str) -> Redis:
    """Make the client of ``IDEMPOTENCY_REDIS_URL``; it connects at its first use.

    Raises ``ConfigurationError``, which does not quote the URL, if it cannot be used.
    """
    try:
        if _URL.fullmatch(url) is None:
            raise ValueError
        client = OwnRedis.from_url(url, **_OPTIONS)
        client.connection_pool.make_connection()  # reads the options, which may be unknown
    except (LookupError, RedisError, TypeError, ValueError):  # they may quote the password
        raise ConfigurationError(_UNUSABLE) from None
    return client


def sender(client: Client) -> Callable[..., Reply]:
    """What sends a command, and returns the function that gives its reply, undecoded.

    Call that once, or never. On our own client it waits for the reply only then, so PostgreSQL commits
    meanwhile; any other client waits for it when it sends.
    """
    if isinstance(client, OwnRedis):
        return client.send

    def send(*command: Any) -> Reply:
        reply = client.execute_command(*command, NEVER_DECODE=True)
        return lambda: reply

    return send


def cause(error: Exception) -> str:
    """Put an error of redis-py into words, which its ``repr`` lacks.

    Redis quotes the arguments of a command that it does not know; HELLO's are a user and a password.
    """
    return f"{type(error).__name__}: {error}".partition(", with args beginning with")[0]


class RedisLock(Lock):
    """The lock of one application."""

    def __init__(
        self, client: Client, prefix: str, *, on_failure: Callable[[Exception], object] = bool
    ) -> None:
        self._client, self._prefix, self._on_failure = client, prefix, on_failure
        self._send = sender(client)
        self._skip_until, self._why = 0.0, ""  # while Redis works

    def acquire(self, claim: Claim) -> Glance:
        """Take the lock if it is free. One round trip, or none while Redis is left alone."""
        value, lasts = _value(claim), int(LOCK_SECONDS * 1000)
        match self._ask("EVAL", ACQUIRE, 1, self._prefix + claim.key.hex(), value, lasts)():
            case [held, _] if held == value:  # also if it is from before, and the reply was lost
                return Glance.MINE
            case [bytes(held), int(left)]:
                is_alike = held.rpartition(b":")[2] == value.rpartition(b":")[2]
                # One that would stay for longer than ours do, or for ever, is not ours.
                is_young = 0 <= LOCK_SECONDS - left / 1000 < PROBE_AFTER_SECONDS
                return Glance.BUSY if is_alike and is_young else Glance.ASK
        return Glance.ASK

    def release(self, claim: Claim) -> None:
        """Release the lock, if the value is still this claim's."""
        self._ask("EVAL", RELEASE, 1, self._prefix + claim.key.hex(), _value(claim))()

    def finish(self, claim: Claim) -> Callable[[], object]:
        """Leave the marker in place of whatever lock there is, even of somebody else's.

        Whoever finishes need not have the lock, and whoever has it can only find the response. A marker
        in the wrong place, such as that of a commit that failed, costs one look at the records.
        """
        lasts = int(min(MARKER_SECONDS, claim.ttl_seconds) * 1000) or 1
        return self._ask("SET", self._prefix + claim.key.hex(), b"1:done", "PX", lasts)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Delete the markers and locks of some keys: of records that are erased. Never raises.

        If Redis fails, it forgets them by itself after :data:`MARKER_SECONDS`.
        """
        for key in keys:
            self._ask("DEL", self._prefix + key.hex())()

    def examine(self) -> Iterator[Finding]:
        """Check that a lock can be taken and released, and that nobody waits long for Redis.

        If not, that is advice: requests do without it, so nobody's start should fail for it.
        """
        claim = trial_claim()
        glance = self.acquire(claim)
        self.release(claim)
        if glance is Glance.MINE and not self._skip_until:
            yield Finding("ok", "Redis", "the lock was taken and released")
        else:
            remedy = (
                "check that the server runs, that URL and password are right, that it is a primary that"
                " takes writes, and that its user may EVAL, GET, SET, PTTL and DEL on"
                " IDEMPOTENCY_REDIS_PREFIX. Until then requests go on without it, and every duplicate"
                " reaches PostgreSQL"
            )
            yield Finding("advice", "Redis", f"the lock cannot be taken: {self._why}", remedy)
        options = self._client.get_connection_kwargs()
        retries = getattr(options.get("retry"), "_retries", 0)
        longest = max(options.get(name) or inf for name in ("socket_timeout", "socket_connect_timeout"))
        if not isinstance(self._client, OwnRedis) and (retries or longest > SLOW_SECONDS):
            text = f"while it is away, each request waits {longest} s, with {retries} retries"
            remedy = "give the client retry=Retry(NoBackoff(), 0), and time-outs of at most 0.2 s"
            yield Finding("advice", "Redis client", text, remedy)

    def _ask(self, *command: Any) -> Reply:
        """Send a command; what is returned reads the reply: None if Redis fails or is left alone."""
        pause_ends, now = self._skip_until, time.monotonic()
        if now < pause_ends:
            return _no_reply
        if pause_ends:  # this request probes; all others still go without
            self._skip_until = now + PAUSE_SECONDS
        try:
            reply = self._send(*command)
        except Exception as error:  # whatever goes wrong there, the records decide
            self._pause(error)
            return _no_reply

        def read() -> Any:
            try:
                result = reply()
            except Exception as error:
                self._pause(error)
                return None
            if pause_ends:
                self._skip_until = 0.0
                log.info("Redis works again")
            return result

        return read

    def _pause(self, error: Exception) -> None:
        worked, self._skip_until = not self._skip_until, time.monotonic() + PAUSE_SECONDS
        self._why = cause(error)
        if worked:
            log.warning("Redis failed, going on without it for %s s: %s", PAUSE_SECONDS, self._why)
        self._on_failure(error)


def _no_reply() -> None:
    """Redis is left alone."""


def _value(claim: Claim) -> bytes:
    fingerprint = claim.fingerprint
    return f"1:{claim.owner}:{fingerprint.algorithm:x}.{fingerprint.digest.hex()}".encode()
