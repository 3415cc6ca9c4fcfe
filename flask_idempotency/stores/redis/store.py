"""The records in Redis alone: for endpoints where a small risk in rare failures is accepted.

Redis may forget: a restart, a failover or an eviction loses records, and then a retry runs the view
again. Nothing commits together with a record here, so every operation has a lease, as with
``atomic=False`` elsewhere, and every change compares the owner's token. Times are the server's.

A record is one hash: its fields, and for each finished step ``step:<name>``, its result, and
``end:<name>``, the attempt and the time that finished it. It has no time to live while it is in
progress: an interrupted operation does not expire.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

from redis import RedisCluster

from flask_idempotency.core.errors import (
    LeaseLost,
    NotAtomic,
    RecordBroken,
    StoreUnavailable,
)
from flask_idempotency.core.logs import log
from flask_idempotency.core.records import Claim, Record, State, StoredResponse
from flask_idempotency.core.rows import legible, record_of

from .client import Client, cause, milliseconds, send_script
from .scripts import AT_ONCE, NOW, RESULTS, STEPS, is_observed

_FIELDS = (
    "name", "state", "version", "digest", "attempt", "owner", "lease", "status", "headers", "body",
    "released_attempt", "created", "released",
)  # fmt: skip
# -> the server's time in milliseconds, and the values of these fields: not those of the steps
LOOK = NOW + f"return {{now, redis.call('HMGET', KEYS[1], {str(_FIELDS)[1:-1]})}}"

AT_ONCE_BYTES = 1024 * 1024
"""How many bytes of steps' results are fetched at once. A server needs longer for tens of megabytes
than its client waits."""

# What was only observed needs nobody's decision: it expires even if it never ends.
_BEGIN = f"""
redis.call('HSET', KEYS[1], 'state', 'in_progress', 'owner', ARGV[1], 'name', ARGV[2],
           'version', ARGV[3], 'digest', ARGV[4], 'attempt', attempt, 'lease', now + ARGV[5])
redis.call('HSETNX', KEYS[1], 'created', now)
redis.call('HDEL', KEYS[1], 'released')
if {is_observed("ARGV[1]")} then
  redis.call('PEXPIRE', KEYS[1], ARGV[6])
else
  redis.call('PERSIST', KEYS[1])
end
return attempt
"""

# Every script may be sent twice, as its reply may be lost: the token shows who sent it.
_FIND = f"""{NOW}
local held = redis.call('HMGET', KEYS[1], 'owner', 'state', 'lease', 'attempt')
if held[1] == ARGV[1] and held[2] == 'in_progress' then return tonumber(held[4]) end
"""

CLAIM = f"""{_FIND}
if held[1] then return 0 end
local attempt = 1
{_BEGIN}"""

TAKE_OVER = f"""{_FIND}
if held[1] ~= ARGV[7] or held[2] ~= 'in_progress' then return 0 end
if held[3] and tonumber(held[3]) > now then return 0 end
local attempt = held[4] + 1
{_BEGIN}"""

_MINE = f"""{NOW}
local held = redis.call('HMGET', KEYS[1], 'owner', 'state', 'lease')
if held[1] ~= ARGV[1] or held[2] ~= 'in_progress' then return 0 end
"""

# What was released gets no lease again.
_LEASED = f"""{_MINE}
if not held[3] or redis.call('HEXISTS', KEYS[1], 'released') == 1 then return 0 end"""

_HAS_STEPS = """
local function has_steps(key)
  for _, field in ipairs(redis.call('HKEYS', key)) do
    if string.sub(field, 1, 5) == 'step:' then return true end
  end
  return false
end"""

# Does not compare the state: the second time, this attempt has already finished it.
FINISH = f"""{NOW}{_HAS_STEPS}
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then return 0 end
redis.call('HDEL', KEYS[1], 'lease', 'released')
redis.call('HSET', KEYS[1], 'state', ARGV[3], 'status', ARGV[4], 'completed', now)
if ARGV[5] ~= '' then redis.call('HSET', KEYS[1], 'headers', ARGV[5]) end
if ARGV[6] == '1' then redis.call('HSET', KEYS[1], 'body', ARGV[7]) end
if ARGV[8] == '1' and has_steps(KEYS[1]) then
  redis.call('HSET', KEYS[1], 'lease', now)
else
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 1"""

RENEW = f"""{_LEASED}
redis.call('HSET', KEYS[1], 'lease', math.max(tonumber(held[3]), now + ARGV[2]))
if ARGV[3] then
  redis.call('HSET', KEYS[1], 'step:' .. ARGV[3], ARGV[4],
             'end:' .. ARGV[3], redis.call('HGET', KEYS[1], 'attempt') .. ':' .. now)
end
return 1"""

END = f"{_LEASED} redis.call('HSET', KEYS[1], 'lease', now) return 1"

# It expires, unless it has done something: a step, or what an operator had to decide about.
RELEASE = f"""{_MINE}{_HAS_STEPS}
if redis.call('HEXISTS', KEYS[1], 'released_attempt') == 1 or has_steps(KEYS[1]) then
  redis.call('HSET', KEYS[1], 'lease', now, 'released', now)
else
  redis.call('HDEL', KEYS[1], 'lease')
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 1"""

T = TypeVar("T")


class RedisRecords:
    """Records in Redis. ``client`` is called once, at the first use."""

    atomic = False
    one_writer = False

    def __init__(self, client: Callable[[], Client], prefix: str) -> None:
        self.prefix = f"{prefix}record:"
        self.connected = cache(client)

    def admin(self) -> Any:
        """Return the operator's side."""
        from .admin import RedisAdmin  # only operators need it

        return RedisAdmin(self)

    def briefly(self) -> RedisRecords:
        """The same: nobody waits long for Redis, and no connection is a view's."""
        return self

    def can_hold(self, _name: str) -> bool:
        """Return True: all text there is UTF-8."""
        return True

    def look(self, key: bytes) -> Record | None:
        """The record."""
        now, values = self.run(LOOK, key)
        return _record(key, int(now), dict(zip(_FIELDS, values, strict=True)))

    def claim(self, claim: Claim) -> RedisLease | None:
        """Insert the record, if it is not there."""
        return self._lease(CLAIM, claim)

    def look_or_claim(self, claim: Claim) -> Record | RedisLease | None:
        """The record, or a claim if there is none."""
        return self.look(claim.key) or self.claim(claim)

    def take_over(self, claim: Claim, as_seen: Record) -> RedisLease | None:
        """Make a record ours whose lease is over or was released."""
        return self._lease(TAKE_OVER, claim, as_seen.owner)

    def wait(self, key: bytes, seconds: float) -> None:
        """Nothing to wait for: every record in progress has a lease."""

    def run(self, script: str, key: bytes, *arguments: Any) -> Any:
        """A script's reply; sends it a second time if there is no reply to the first.

        Raises ``StoreUnavailable`` for any failure, although the script may have run, and
        ``RecordBroken`` if the key holds something else.
        """
        name = f"{self.prefix}{key.hex()}".encode()
        words = [word if isinstance(word, bytes) else str(word).encode() for word in arguments]

        def reply() -> Any:
            return send_script(self.connected(), script, name, *words)()

        return _twice(reply)

    def run_for_all(self, script: str, keys: Sequence[bytes]) -> list[Any]:
        """The replies of a script that only reads, for the keys in order, in one round trip.

        A script is given all the keys; in a cluster, where they are in different slots, one.
        """
        size = 1 if isinstance(self.connected(), RedisCluster) else len(keys)

        def replies() -> list[Any]:
            with self.connected().pipeline(transaction=False) as pipeline:
                for start in range(0, len(keys), size):
                    names = [self.prefix + key.hex() for key in keys[start : start + size]]
                    pipeline.execute_command("EVAL", script, len(names), *names, NEVER_DECODE=True)
                return list(pipeline.execute())

        return _twice(replies)

    def _lease(self, script: str, claim: Claim, *more: Any) -> RedisLease | None:
        fingerprint = claim.fingerprint.algorithm, claim.fingerprint.digest
        lease, ttl = milliseconds(claim.lease_seconds or 0), milliseconds(claim.ttl_seconds)
        values = claim.owner, claim.name, *fingerprint, lease, ttl, *more
        attempt = int(self.run(script, claim.key, *values))
        return RedisLease(self, claim, attempt=attempt) if attempt else None


class RedisLease:
    """An operation that is ours while its lease runs."""

    def __init__(self, records: RedisRecords, claim: Claim, *, attempt: int) -> None:
        self.attempt = attempt
        self._records, self._claim = records, claim
        self._open = True

    def complete(self, response: StoredResponse, *, waits: bool = False) -> None:
        """Store the response; as failed if its status is 500 or more."""
        state = State.FAILED if response.status >= 500 else State.COMPLETED
        headers = "" if response.headers is None else json.dumps(response.headers)
        body = (1, response.body) if response.body is not None else (0, b"")
        self._change(
            FINISH,
            milliseconds(self._claim.ttl_seconds),
            state.value,
            response.status,
            headers,
            *body,
            int(waits),
        )
        self._open = False

    def abandon(self) -> None:
        """End the lease now."""
        if self._open:
            self._open = False
            with suppress(LeaseLost, StoreUnavailable):
                self._change(END)

    def release(self) -> None:
        """Give the operation back."""
        self._change(RELEASE, milliseconds(self._claim.ttl_seconds))
        self._open = False

    def extend(self, seconds: float) -> None:
        """Renew the lease."""
        self._change(RENEW, milliseconds(seconds))

    def steps(self) -> dict[str, bytes | None]:
        """The results of the finished steps."""
        found: dict[str, bytes | None] = {}
        for names in _batches(self._records.run(STEPS, self._claim.key)):
            fields = [b"step:" + name for name in names]
            results = self._records.run(RESULTS, self._claim.key, *fields)
            found |= {
                name.decode(): result or None for name, result in zip(names, results, strict=True)
            }
        return found

    def record(self, step: str, result: bytes | None) -> None:
        """Record a finished step and renew the lease."""
        self._change(RENEW, milliseconds(self._claim.lease_seconds or 0), step, result or b"")

    def open_step(self) -> Any:
        """There is no transaction that a step could commit with."""
        raise NotAtomic(
            "step(..., atomic=True) needs a store that commits with the application's database; the"
            " store 'redis' does not"
        )

    def _change(self, script: str, *arguments: Any) -> None:
        if not self._records.run(script, self._claim.key, self._claim.owner, *arguments):
            raise LeaseLost


def _twice(ask: Callable[[], T]) -> T:
    with suppress(Exception):
        return ask()
    try:
        return ask()
    except Exception as error:
        if "WRONGTYPE" in str(error):
            raise RecordBroken from error
        log.error("Redis failed: %s", cause(error))
        raise StoreUnavailable from error


def _batches(steps: Iterable[tuple[bytes, int, bytes]]) -> Iterator[list[bytes]]:
    """The names of steps whose results may be fetched together."""
    names: list[bytes] = []
    size = 0
    for name, length, _end in steps:
        if names and (len(names) == AT_ONCE or size + length > AT_ONCE_BYTES):
            yield names
            names, size = [], 0
        names.append(name)
        size += length
    if names:
        yield names


def _record(key: bytes, now: int, fields: dict[str, Any]) -> Record | None:
    """Raises ``RecordBroken``."""
    lease, released = fields["lease"], fields["released"]
    if set(fields.values()) == {None}:
        return None
    with legible():
        known = {name: str(fields[name], "utf-8") for name in ("name", "state", "owner")}
        times = {
            "expired": False,
            "lease_left": None if lease is None else (float(lease) - now) / 1000,
            "age": (now - float(fields["created"])) / 1000,
            "released": None if released is None else (now - float(released)) / 1000,
        }
        return record_of(key, {**fields, **known, **times})
