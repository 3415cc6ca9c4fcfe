"""What the commands do with the records in Redis.

They scan all keys with our prefix (``SCAN`` blocks nobody), and ask for a thousand records at a time. A
script collects what they need in the server, so no responses are fetched.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timezone
from heapq import nlargest, nsmallest
from itertools import islice
from typing import Any

from flask_idempotency.core.errors import IdempotencyError, StoreUnavailable
from flask_idempotency.core.keys import KEY_BYTES
from flask_idempotency.core.records import SEALED
from flask_idempotency.core.rows import finite
from flask_idempotency.stores.admin import (
    USUAL,
    AuditEntry,
    Belongings,
    Finding,
    Line,
    NothingToDo,
    Overview,
    StepLine,
    Tally,
    Time,
    Verdict,
    finding,
    read_audit,
    trying,
)

from .client import cause, milliseconds
from .scripts import AT_ONCE, NOW, RESULTS, STEPS, is_observed

_VERSION = """
local function version(key)
  local parts = redis.pcall('HMGET', key, 'owner', 'state', 'lease')
  return (parts[1] or '') .. ' ' .. (parts[2] or '') .. ' ' .. (parts[3] or '')
end"""

# -> the time, and for each key what makes a Line; false for what is missing, or is no record. As one
# text: many values take a client long to read.
_LINES = f"""{NOW}{_VERSION}
local lines = {{}}
for i, key in ipairs(KEYS) do
  local line = redis.pcall('HMGET', key, 'name', 'state', 'attempt', 'status', 'created', 'completed',
                           'lease')
  if line[1] or line[2] or line[5] then
    local owner = redis.pcall('HGET', key, 'owner')
    if type(owner) == 'string' and {is_observed("owner")} then
      line[2] = 'observed'
    end
    line[8] = redis.call('HEXISTS', key, 'body') == 1 and redis.call('HSTRLEN', key, 'body')
    line[9] = redis.call('PTTL', key)
    line[10] = version(key)
  end
  lines[i] = line[10] and line or false
end
return cjson.encode({{now, lines}})"""

# May be sent twice, as its reply may be lost: the token shows who sent it.
_SETTLE = f"""{NOW}{_VERSION}
local held = redis.call('HMGET', KEYS[1], 'owner', 'state', 'lease', 'audit')
if held[1] == ARGV[1] then return 1 end
if not held[1] or {is_observed("held[1]")} then return 0 end
if version(KEYS[1]) ~= ARGV[2] then return 0 end
local interrupted = held[2] == 'in_progress' and held[3] and tonumber(held[3]) <= now
if not interrupted and held[2] ~= 'failed' then return 0 end
redis.call('HDEL', KEYS[1], 'lease', 'released', 'completed', 'status', 'headers', 'body')
local entry = {{at = now, by = ARGV[5], did = ARGV[6], why = ARGV[7]}}
if ARGV[8] == '1' then redis.call('HSET', KEYS[1], 'created', now) end
redis.call('HSET', KEYS[1], 'state', ARGV[4], 'owner', ARGV[1],
           'released_attempt', redis.call('HGET', KEYS[1], 'attempt'),
           'audit', (held[4] or '') .. cjson.encode(entry) .. '\\n')
if ARGV[9] then
  redis.call('HSET', KEYS[1], 'status', ARGV[9], 'completed', now)
  if ARGV[10] ~= '' then redis.call('HSET', KEYS[1], 'headers', ARGV[10]) end
  if ARGV[11] then redis.call('HSET', KEYS[1], 'body', ARGV[11]) end
  redis.call('PEXPIRE', KEYS[1], math.max(redis.call('PTTL', KEYS[1]), ARGV[3]))
else
  redis.call('HSET', KEYS[1], 'lease', now, 'released', now)
  redis.call('PERSIST', KEYS[1])
end
return 1"""

_ENTRY = "cjson.encode({at = now, by = ARGV[1], did = ARGV[2], why = ARGV[3]}) .. '\\n'"

_NOTE = f"""{NOW}
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local held = redis.call('HGET', KEYS[1], 'audit') or ''
redis.call('HSET', KEYS[1], 'audit', held .. {_ENTRY})
return 1"""

_AUDIT = "return redis.call('HGET', KEYS[1], 'audit') or ''"

_FORGET = "if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then redis.call('DEL', KEYS[1]) end"

# May be sent twice: then it counts what is left the second time.
_ERASE = f"""{_VERSION}
local erased = 0
for _, key in ipairs(KEYS) do
  local held = redis.call('HMGET', key, 'lease', 'owner')
  local is_free = not held[1] or held[2] and {is_observed("held[2]")}
  if is_free and (not ARGV[1] or version(key) == ARGV[1]) then
    erased = erased + redis.call('DEL', key)
  end
end
return erased"""

_KEY = re.compile(rb"[0-9a-f]{%d}" % (2 * KEY_BYTES))


class RedisAdmin:
    """The records in Redis, for an operator."""

    remedy = "connect to a primary that takes writes, and allow its user EVAL and SCAN on our prefix"

    def __init__(self, records: Any) -> None:
        self._records = records

    def overview(self) -> Overview:
        """Count what there is: as Redis has no table, this reads every record."""
        counts: Counter[tuple[str, str]] = Counter()
        running, interrupted, ages = 0, 0, list[float]()
        for _, line, age in self._seen():
            counts[line.operation, line.state] += 1
            running += line.state == "in_progress"
            interrupted += line.waits
            again = isinstance(line.attempt, int) and line.attempt > USUAL
            if line.waits or (again and line.state == "in_progress"):
                ages.append(age)
        tallies = [Tally(*group, count) for group, count in sorted(counts.items())]
        return Overview(tallies, False, running, interrupted, max(ages, default=None), 0, None)

    def newest(self, name: str | None, state: str | None, limit: int) -> list[Line]:
        """Return the newest records."""
        return self.of_scope(b"", name, state, limit)

    def of_scope(self, tail: bytes, name: str | None, state: str | None, limit: int) -> list[Line]:
        """Return the newest records of a scope."""
        fitting = (
            line
            for _, line, _ in self._seen(end=tail)
            if name in (None, line.operation) and state in (None, line.state)
        )
        return nlargest(limit, fitting, key=lambda line: str(line.created))

    def leased(self, state: str, limit: int) -> list[Line]:
        """Return the oldest records with a lease."""
        fitting = (line for line in self._lines() if line.state == state)
        return nsmallest(limit, fitting, key=lambda line: str(line.created))

    def starting(self, start: bytes) -> list[Line]:
        """Return the records whose key's hash starts so."""
        return list(islice(self._lines(start), 2))

    def steps(self, start: bytes) -> list[StepLine]:
        """Return the finished steps."""
        found = []
        for key in self._keys(start):
            for name, size, end in self._records.run(STEPS, key):
                attempt, _, finished = end.partition(b":")
                (result,) = self._records.run(RESULTS, key, b"step:" + name)
                shown = name.decode(errors="replace"), _whole(attempt), size, _time(finished), result
                found.append(StepLine(*shown))
        return sorted(found, key=lambda step: str(step.finished))

    def key(self, start: bytes) -> bytes | None:
        """Return the whole key."""
        found = list(islice(self._keys(start), 2))
        return found[0] if len(found) == 1 else None

    def sealings(self) -> Counter[bytes | None]:
        """Count what is encrypted, by the key, and what is not."""
        found = Counter[bytes | None]()
        for key, *_ in self._seen():
            record = self._records.look(key)
            response = None if record is None else record.response
            stored = [step.result for step in self.steps(key)]
            if response is not None and response.is_sealed():
                stored.append(response.body)
            elif response is not None:
                found[None] += 1
            for each in stored:
                if each is not None:
                    found[each[:9] if each.startswith(SEALED) else None] += 1
        return found

    def audit(self, start: bytes) -> list[AuditEntry]:
        """Return what operators did: an expired record has been deleted with its own."""
        found = list[AuditEntry]()
        for key in self._keys(start):
            for line in self._records.run(_AUDIT, key).splitlines():
                found += read_audit(b"[%b]" % line)
        return [replace(entry, at=_time(entry.at)) for entry in found]

    def settle(self, verdict: Verdict) -> bool:
        """End it as an operator decided."""
        entry, response = verdict.entry, verdict.response
        values: list[Any] = [verdict.owner, verdict.seen, milliseconds(verdict.ttl_seconds)]
        values += [verdict.state.value, entry.by, entry.did, entry.why, int(verdict.anew)]
        if response is not None:
            headers = "" if response.headers is None else json.dumps(response.headers)
            values += [response.status, headers, *([] if response.body is None else [response.body])]
        return bool(self._records.run(_SETTLE, verdict.key, *values))

    def belonging(self, tail: bytes, name: str | None) -> Belongings:
        """Return the records of a scope."""
        keys, left = list[bytes](), Counter[str]()
        for key, line, _ in self._seen(end=tail):
            if name not in (None, line.operation):
                continue
            if line.state in ("in_progress", "interrupted"):
                left[line.state] += 1
            else:
                keys.append(key)
        return Belongings(keys, dict(left))

    def note(self, key: bytes, entry: AuditEntry) -> bool:
        """Note what an operator did."""
        return bool(self._records.run(_NOTE, key, entry.by, entry.did, entry.why))

    def erase(self, keys: list[bytes], seen: str | None = None) -> int:
        """Delete what has no lease."""
        if seen is not None:
            return sum(int(self._records.run(_ERASE, key, seen)) for key in keys)
        return sum(self._records.run_for_all(_ERASE, keys))

    def count_older(self, seconds: float) -> int:  # noqa: ARG002
        """Refuse: no record has outlived its ttl."""
        raise IdempotencyError(
            "the store 'redis' deletes records when they expire, and cannot find old ones; give the"
            " routes a shorter ttl"
        )

    def purge(self, batch: int, older_than_seconds: float | None = None) -> Iterator[int]:  # noqa: ARG002
        """Say that Redis does it."""
        if older_than_seconds is not None:
            self.count_older(older_than_seconds)
        raise NothingToDo("Redis deletes expired records by itself: there is nothing to purge")

    def create(self) -> list[str]:
        """Say that there is nothing."""
        raise NothingToDo("the records are in Redis: there is no table to create")

    def examine(self) -> Iterator[Finding]:
        """Check that Redis is there, and what it forgets."""
        try:
            client = self._records.connected()
            client.ping()
        except Exception as error:  # whatever the application's own client may raise
            remedy = "check that the server runs and that its URL and password are right"
            yield Finding("FAILED", "Redis", cause(error), remedy)
            return
        yield Finding("ok", "Redis", "reachable")
        try:
            server, memory, disk = map(client.info, ("server", "memory", "persistence"))
        except Exception:  # hosted servers and narrow users do not allow INFO
            return
        version = str(server.get("redis_version"))
        # Before Redis 5, no script may write once it has asked for the time.
        if re.match(r"[0-4]\.", version):
            text = f"this is Redis {version}; the store 'redis' needs Redis 5"
            yield Finding("FAILED", "version", text, "upgrade to Redis 5 or later, or to Valkey")
        policy = memory.get("maxmemory_policy", "noeviction")
        bad = f"once it is full it forgets records, and their retries run again ({policy})"
        good = not memory.get("maxmemory") or policy == "noeviction"
        yield finding(good, "memory", "records are not evicted", bad, "set maxmemory-policy noeviction")
        bad = "a crash loses the records since the last snapshot, and their retries run again"
        good = disk.get("aof_enabled") != 0
        yield finding(good, "persistence", "appendonly", bad, "set appendonly yes", "advice")

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Claim a record, and delete it at the end."""
        forget = lambda claim: self._records.run(_FORGET, claim.key, claim.owner)  # noqa: E731
        with trying(self._records, forget):
            yield None

    def _keys(self, start: bytes = b"", end: bytes = b"") -> Iterator[bytes]:
        """Yield the keys that start and end so. Raises ``StoreUnavailable``."""
        prefix, as_seen = self._records.prefix, set()
        pattern = re.sub(r"([\\*?\[\]])", r"\\\1", prefix) + start.hex() + "*" + end.hex()
        try:
            for name in self._records.connected().scan_iter(match=pattern, count=AT_ONCE):
                digits = name[len(prefix) :]
                if isinstance(digits, str):  # by the client's set-up
                    digits = digits.encode()
                if _KEY.fullmatch(digits) and digits not in as_seen:
                    as_seen.add(digits)  # SCAN may give one twice
                    yield bytes.fromhex(digits.decode())
        except Exception as error:
            raise StoreUnavailable from error

    def _lines(self, start: bytes = b"") -> Iterator[Line]:
        """Yield the records whose key's hash starts so."""
        return (line for _, line, _ in self._seen(start))

    def _seen(self, start: bytes = b"", end: bytes = b"") -> Iterator[tuple[bytes, Line, float]]:
        """The records whose key's hash starts and ends so, and how many seconds ago they began.

        One that has expired meanwhile is left out.
        """
        keys = self._keys(start, end)
        while batch := list(islice(keys, AT_ONCE)):
            replies = self._records.run_for_all(_LINES, batch)
            read = (json.loads(reply.decode(errors="replace")) for reply in replies)
            found = ((line, now) for now, lines in read for line in lines)
            for key, (line, now) in zip(batch, found, strict=True):
                if line:
                    yield key, _line(key, now, *line), -(_left(line[4], now) or 0.0)


def _line(key: bytes, now: int, *fields: Any) -> Line:
    name, state, attempt, status, created, completed, lease, size, left, version = fields
    return Line(
        key[:8].hex(),
        name or "",
        _state(lease, now) if state == "in_progress" else state or "",
        _whole(attempt or ""),
        _whole(status) if status else None,
        None if size is False else size,
        _time(created or ""),
        _time(completed) if completed else None,
        _time(now + left) if left >= 0 else None,
        expired=False,
        version=version,
    )


def _state(lease: str | bool, now: int) -> str:
    """Tell more exactly what is in progress."""
    if not lease:
        return "released"
    with suppress(ValueError):
        return "in_progress" if float(lease) > now else "interrupted"
    return "in_progress"


def _left(lease: str | bool, now: int) -> float | None:
    """Return the seconds that a lease has left; None without one, or if it is no number."""
    with suppress(ValueError):
        return finite((float(lease) - now) / 1000) if lease else None
    return None


# Whoever writes to the server may write anything: what cannot be read is shown as it is.


def _whole(number: Any) -> Any:
    with suppress(ValueError):
        return int(number)
    return _text(number)


def _time(milliseconds: Any) -> Time:
    with suppress(OSError, OverflowError, ValueError):
        return datetime.fromtimestamp(float(milliseconds) / 1000, tz=timezone.utc)
    return _text(milliseconds)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
