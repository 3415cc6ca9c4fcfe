"""The fast lock in Redis: rejects concurrent duplicates in one round trip.

It may forget (restart, eviction, failover), lie (a lock left by a dead worker, somebody else's value)
or be gone. Only speed depends on it: whatever it says, the record's row decides who runs. So it holds
no response and no key, and a forged value can only delay one request by :data:`PROBE_AFTER_SECONDS`.

A lock's value is ``1:<owner>:<fingerprint>``, and ``1:done`` after the end: format version, random
token (22 characters), fingerprint in hex. One small script reads and sets in one round trip; it
works on every Redis since 2.6.12, when ``SET`` learnt ``PX``, and on Valkey (``SET ... NX GET PX``
needs Redis 7).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

from flask_idempotency.core.logs import log
from flask_idempotency.core.ports import Glance, Lock
from flask_idempotency.core.records import Claim
from flask_idempotency.stores.admin import Finding, trial_claim

from .client import Client, Reply, cause, milliseconds, send_script

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

# Each script may be run twice, as its reply may be lost: an owner recognises its own lock, a release
# compares it, and a marker stays a marker. One that is run late, after its request has ended, leaves a
# dead worker's lock at worst: nobody believes that for longer than PROBE_AFTER_SECONDS.
ACQUIRE = """
local held = redis.pcall('GET', KEYS[1])
if not held then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return {0, 0}
end
if held == ARGV[1] then return {0, 0} end
local fingerprint = string.match(ARGV[1], '[^:]*$')
local alike = type(held) == 'string' and string.sub(held, 1, 2) == '1:'
              and string.sub(held, -#fingerprint) == fingerprint
return {alike and 1 or 2, redis.call('PTTL', KEYS[1])}
"""
# -> {0 = mine, 1 = same fingerprint, 2 = anything else; milliseconds the lock has left}

RELEASE = """
if redis.pcall('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""

FINISH = """
redis.call('SET', KEYS[1], '1:done', 'PX', ARGV[1])
"""
# Sent just before the commit, so that the reply is there after it; and even over somebody else's lock:
# whoever finishes need not have the lock, and whoever has it can only find the response. A marker in
# the wrong place, such as that of a commit that failed, costs one look at the records.

_SLOWER = "Until then requests go on without it, and every duplicate reaches PostgreSQL"

T = TypeVar("T")


class RedisLock(Lock):
    """The lock of one application. ``client`` is called once, at the first use."""

    def __init__(
        self,
        client: Callable[[], Client],
        prefix: str,
        *,
        on_failure: Callable[[Exception], object] = bool,
    ) -> None:
        self._connected = cache(client)
        self._prefix = prefix
        self._on_failure = on_failure
        self._skip_until = 0.0  # while Redis works

    def acquire(self, claim: Claim) -> Glance:
        """Take the lock if it is free. One round trip, or none while Redis is left alone."""
        lasts = b"%d" % (1000 * LOCK_SECONDS)
        sent = self._send(ACQUIRE, claim, _value(claim), lasts)
        return self._read(sent, self._glance) or Glance.ASK

    def _glance(self, reply: Any) -> Glance:
        kind, left_ms = map(int, reply)
        if kind == 0:
            return Glance.MINE
        age = LOCK_SECONDS - left_ms / 1000
        young = left_ms > 0 and 0 <= age < PROBE_AFTER_SECONDS
        return Glance.BUSY if kind == 1 and young else Glance.ASK

    def release(self, claim: Claim) -> None:
        """Release the lock, if the value is still this claim's."""
        self._read(self._send(RELEASE, claim, _value(claim)), bool)

    def finish(self, claim: Claim) -> Callable[[], object]:
        """Leave the marker in place of whatever lock there is."""
        lasts = b"%d" % milliseconds(min(MARKER_SECONDS, claim.ttl_seconds))
        return partial(self._read, self._send(FINISH, claim, lasts), bool)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Delete the markers and locks of some keys: of records that are erased. Never raises.

        If Redis fails, it forgets them by itself after :data:`MARKER_SECONDS`.
        """
        try:
            with self._connected().pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.delete(self._prefix + key.hex())
                pipeline.execute()
        except Exception as error:
            log.warning(
                "Redis failed, markers stay there for up to %s s: %s", MARKER_SECONDS, cause(error)
            )

    def examine(self) -> Iterator[Finding]:
        """Check that Redis is reachable, and that a lock can be taken and released.

        If not, that is advice: requests do without it, so nobody's start should fail for it.
        """
        try:
            self._connected().ping()
        except Exception as error:  # whatever the application's own client may raise
            remedy = f"check that the server runs and that its URL and password are right. {_SLOWER}"
            yield Finding("advice", "Redis", cause(error), remedy)
            return
        first = trial_claim()
        second = replace(trial_claim(), key=first.key)
        glances = [self.acquire(first), self.acquire(second)]
        self.release(first)
        glances.append(self.acquire(second))
        self.release(second)
        if [glance is Glance.MINE for glance in glances] != [True, False, True]:
            remedy = (
                "allow its user EVAL, GET, SET, PTTL and DEL on IDEMPOTENCY_REDIS_PREFIX, and connect"
                f" to a primary that takes writes. {_SLOWER}"
            )
            yield Finding("advice", "Redis", "reachable, but the lock cannot be taken", remedy)
            return
        yield Finding("ok", "Redis", "the lock was taken and released")
        with suppress(Exception):  # hosted servers and narrow users do not allow INFO
            memory = self._connected().info("memory")
            if memory.get("maxmemory") and memory.get("maxmemory_policy") == "noeviction":
                full = "once full it refuses the lock, and all requests go to PostgreSQL (noeviction)"
                yield Finding("advice", "Redis memory", full, "set maxmemory-policy volatile-ttl")

    def _send(self, script: str, claim: Claim, *arguments: bytes) -> Reply | None:
        """Send a script; None if that fails, or while Redis is left alone."""
        if self._skip_until and not self._may_probe():
            return None
        key = self._prefix + claim.key.hex()
        try:
            return send_script(self._connected(), script, key.encode(), *arguments)
        except Exception as error:  # whatever goes wrong there, the records decide
            self._fail(error)
            return None

    def _read(self, reply: Reply | None, read: Callable[[Any], T]) -> T | None:
        """Return what ``read`` makes of the reply to what was sent; None if there is none."""
        if reply is None:
            return None
        try:
            result = read(reply())
        except Exception as error:
            self._fail(error)
            return None
        if self._skip_until:
            self._skip_until = 0.0
            log.info("Redis works again")
        return result

    def _may_probe(self) -> bool:
        """After each pause one request tries, which begins the next pause for all others."""
        now = time.monotonic()
        if now < self._skip_until:
            return False
        self._skip_until = now + PAUSE_SECONDS
        return True

    def _fail(self, error: Exception) -> None:
        """Begin the pause, and say so if Redis worked until then."""
        worked, self._skip_until = not self._skip_until, time.monotonic() + PAUSE_SECONDS
        self._on_failure(error)
        if worked:
            log.warning("Redis failed, going on without it for %s s: %s", PAUSE_SECONDS, cause(error))


def _value(claim: Claim) -> bytes:
    fingerprint = claim.fingerprint
    return f"1:{claim.owner}:{fingerprint.algorithm:x}.{fingerprint.digest.hex()}".encode()
