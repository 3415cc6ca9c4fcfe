"""The records in Redis alone: for endpoints where a small risk in rare failures is accepted.

Redis may forget: a restart, a failover or an eviction loses records, and then a retry runs the view
again. Nothing commits together with a record here, so every operation has a lease, as with
``atomic=False`` elsewhere. All times are the server's.

A record is one value: a random version, what the record says in one line of JSON, steps included, and
the body of its response. A change reads it, decides here, and replaces it if it still has that
version, as then nobody has changed it meanwhile; otherwise it reads again. A record in progress does
not expire: an interrupted operation waits for somebody.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from heapq import nlargest
from itertools import islice
from operator import attrgetter
from typing import Any

from flask_idempotency.core import errors
from flask_idempotency.core.keys import KEY_BYTES
from flask_idempotency.core.logs import log
from flask_idempotency.core.machine import Situation, situation
from flask_idempotency.core.records import (
    OBSERVED,
    SEALED,
    Claim,
    Record,
    State,
    StoredResponse,
    StoredStep,
    legible,
    step_values,
    steps_of,
)

from . import admin
from .lock import Client, Reply, cause, send

_HEAD, _WHOLE = "^[^\n]*", ".*"
"""How much of a value is read: a list of records needs no bodies."""

# -> the server's time in milliseconds, and so much of the value
_READ = """local time = redis.call('TIME')
local value = redis.call('GET', KEYS[1]) or ''
return {time[1] * 1000 + math.floor(time[2] / 1000), string.match(value, ARGV[1])}"""

_VERSION_BYTES = 22

# Compares the version and sets a value with a life: for ever if there is none, and 0 deletes. It may be
# sent twice, as its reply may be lost: then the new version is there.
_REPLACE = f"""local version = redis.call('GETRANGE', KEYS[1], 0, {_VERSION_BYTES - 1})
if version == string.sub(ARGV[2], 1, {_VERSION_BYTES}) then return 1 end
if version ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
if ARGV[3] ~= '' then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
return 1"""

AT_ONCE = 1000
"""How many records a list asks for at once: some milliseconds of the server's time."""

_KEY = re.compile(f"[0-9a-f]{{{2 * KEY_BYTES}}}")

_EMPTY = dict.fromkeys(("lease", "released", "expires", "completed", "status", "headers", "bytes"))

_OPEN = {Situation.IN_PROGRESS: "released", Situation.INTERRUPTED: "interrupted"}
"""What nobody works on, and how an operator's list calls it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What stands under a key: nothing, if there are no ``fields``. Times are in seconds."""

    key: bytes
    now: float
    version: bytes
    fields: dict[str, Any]
    body: bytes

    @classmethod
    @legible()
    def read(cls, key: bytes, reply: Any) -> Stored:
        """Read a reply to ``_READ``. Raises ``RecordBroken``."""
        now, value = reply
        head, _, body = value[_VERSION_BYTES:].partition(b"\n")  # JSON has no line break in it
        fields = dict(json.loads(head)) if value else {}
        return cls(key, now / 1000, value[:_VERSION_BYTES], fields, body)

    def value(self) -> bytes:
        """Return what is stored, with a new version; empty for nothing."""
        head = secrets.token_urlsafe(16) + json.dumps(self.fields)
        return b"%b\n%b" % (head.encode(), self.body) if self.fields else b""

    def life(self) -> int | str:
        """Return how many milliseconds it has left, for ``_REPLACE``."""
        expires = self.fields["expires"] if self.fields else self.now
        return "" if expires is None else int((expires - self.now) * 1000)

    def changed(self, body: bytes = b"", **fields: Any) -> Stored:
        """Return it with another body, and with other ``fields``."""
        return replace(self, body=body, fields=self.fields | fields)

    def ago(self, name: str) -> float | None:
        """Return how long ago a stored time is; None if there is none."""
        time = self.fields[name]
        return None if time is None else self.now - time

    @legible()
    def record(self, **other: Any) -> Record:
        """Return the record, or ``other`` fields than the stored. Raises ``RecordBroken``."""
        over = self.ago("lease")
        values = {
            "digest": bytes.fromhex(self.fields["digest"]),
            "body": None if self.fields["bytes"] is None else self.body,
            "expired": False,
            "lease_left": None if over is None else -over,
            "age": self.ago("created"),
            "released": self.ago("released"),
        }
        return Record.read(self.key, {**self.fields, **values, **other})

    @legible()
    def line(self) -> admin.Line:
        """Return what an operator sees of it. Raises ``RecordBroken``."""
        record = self.record(status=None)  # its body may not have been read
        state = _OPEN.get(situation(record), record.state.value)
        return admin.Line(
            self.key,
            record.name.encode().decode(),  # no half of a character, which nobody can show
            "observed" if record.owner.startswith(OBSERVED) else state,
            record.attempt,
            self.fields["status"],
            self.fields["bytes"],
            _time(self.fields["created"]),
            _time(self.fields["completed"]),
            _time(self.fields["expires"]),
            expired=False,
            version=f"{record.owner} {record.state.value} {self.fields['lease']}",
        )


class RedisRecords:
    """Records in Redis."""

    atomic = False
    one_writer = False

    def __init__(self, client: Client, prefix: str) -> None:
        self.client, self.prefix = client, f"{prefix}record:"

    def admin(self) -> RedisAdmin:
        """Return the operator's side."""
        return RedisAdmin(self)

    def briefly(self) -> RedisRecords:
        """The same: nobody waits long for Redis, and no connection is a view's."""
        return self

    def can_hold(self, _name: str) -> bool:
        """Return True: all text there is ASCII."""
        return True

    def look(self, key: bytes) -> Record | None:
        """The record."""
        stored = self.read(key)
        return stored.record() if stored.fields else None

    def claim(self, claim: Claim) -> RedisLease | Record | None:
        """Insert the record, or return the one that is there."""
        stored = self.read(claim.key)
        return stored.record() if stored.fields else self._begin(claim, stored, 1)

    def take_over(self, claim: Claim, as_seen: Record) -> RedisLease | None:
        """Make a record ours whose lease is over or was released."""
        stored = self.read(claim.key)
        record = stored.record() if stored.fields else None
        if record is None or record.owner != as_seen.owner or situation(record) not in _OPEN:
            return None
        return self._begin(claim, stored, record.attempt + 1)

    def wait(self, key: bytes, seconds: float) -> None:
        """Nothing to wait for: every record in progress has a lease."""

    def read(self, key: bytes) -> Stored:
        """Return what stands under a key. Raises ``StoreUnavailable`` and ``RecordBroken``."""
        return Stored.read(key, self._run(_READ, key, _WHOLE))

    def change(self, key: bytes, decide: Callable[[Stored], Stored | None]) -> bool:
        """Replace what stands under a key by what ``decide`` makes of it; False if that is None."""
        while (new := decide(seen := self.read(key))) is not None:
            if self._replace(seen, new):
                return True
        return False

    def heads(self, keys: list[bytes]) -> Any:
        """Return the reply to ``_READ`` for each key, or an error; of each record only its fields."""

        def sent() -> Reply:
            pipeline = self.client.pipeline(transaction=False)
            for key in keys:
                pipeline.execute_command(*self._command(_READ, key, _HEAD), NEVER_DECODE=True)
            return partial(pipeline.execute, raise_on_error=False)

        return _twice(sent)

    def _replace(self, seen: Stored, new: Stored) -> bool:
        return bool(self._run(_REPLACE, seen.key, seen.version, new.value(), new.life()))

    def _run(self, script: str, key: bytes, *arguments: Any) -> Any:
        return _twice(partial(send, self.client, *self._command(script, key, *arguments)))

    def _command(self, script: str, key: bytes, *arguments: Any) -> tuple[Any, ...]:
        return "EVAL", script, 1, self.prefix + key.hex(), *arguments

    def _begin(self, claim: Claim, stored: Stored, attempt: int) -> RedisLease | None:
        first: dict[str, Any] = {
            "created": stored.now,
            "released_attempt": None,
            "audit": [],
            "steps": {},
        }
        fields: dict[str, Any] = {
            "name": claim.name,
            "state": State.IN_PROGRESS.value,
            "version": claim.fingerprint.algorithm,
            "digest": claim.fingerprint.digest.hex(),
            "attempt": attempt,
            "owner": claim.owner,
            "lease": stored.now + (claim.lease_seconds or 0),
        }
        # What was only observed needs nobody's decision: it expires even if it never ends.
        if claim.owner.startswith(OBSERVED):
            fields["expires"] = stored.now + claim.ttl_seconds
        new = stored.changed(**first | stored.fields | _EMPTY | fields)
        return RedisLease(self, claim, attempt) if self._replace(stored, new) else None


class RedisLease:
    """An operation that is ours while its lease runs."""

    def __init__(self, records: RedisRecords, claim: Claim, attempt: int) -> None:
        self.attempt = attempt
        self._records, self._claim, self._open = records, claim, True

    def complete(self, response: StoredResponse, *, waits: bool = False) -> None:
        """Store the response; as failed if its status is 500 or more."""

        def ended(seen: Stored) -> Stored:
            if waits and seen.fields["steps"]:
                return _answered(seen, response, lease=seen.now)
            return _answered(seen, response, expires=seen.now + self._claim.ttl_seconds)

        self._change(ended)
        self._open = False

    def abandon(self) -> None:
        """End the lease now."""
        if self._open:
            self._open = False
            with suppress(errors.LeaseLost, errors.StoreUnavailable):
                self._change(lambda seen: seen.changed(lease=seen.now))

    def release(self) -> None:
        """Give the operation back.

        It expires, unless it has done something: a step, or what an operator had to decide about.
        """

        def given_back(seen: Stored) -> Stored:
            if seen.fields["steps"] or seen.fields["released_attempt"] is not None:
                return seen.changed(lease=seen.now, released=seen.now, expires=None)
            return seen.changed(lease=None, expires=seen.now + self._claim.ttl_seconds)

        self._change(given_back)
        self._open = False

    def extend(self, seconds: float) -> None:
        """Renew the lease."""
        self._change(lambda seen: _renewed(seen, seconds))

    def steps(self) -> dict[str, bytes | None]:
        """The results of the finished steps."""
        stored = self._records.read(self._claim.key).fields["steps"]
        return {name: step.result for name, step in steps_of(json.dumps(stored)).items()}

    def record(self, step: str, result: bytes | None) -> None:
        """Record a finished step and renew the lease."""

        def done(seen: Stored) -> Stored:
            values = step_values(step, seen.fields["attempt"], result) | {"at": str(_time(seen.now))}
            steps = seen.fields["steps"] | {values.pop("step"): values}
            return _renewed(seen.changed(steps=steps), self._claim.lease_seconds or 0)

        self._change(done)

    def open_step(self, connection: Any = None) -> Any:  # noqa: ARG002
        """There is no transaction that a step could commit with."""
        raise errors.NotAtomic(
            "step(..., atomic=True) needs a store that commits with the application's database; the"
            " store 'redis' does not"
        )

    def _change(self, change: Callable[[Stored], Stored]) -> None:
        """Change the record. Raises ``LeaseLost`` if it is not ours, or has ended or been released."""
        ours = self._claim.owner, State.IN_PROGRESS.value, None

        def mine(seen: Stored) -> Stored:
            held = tuple(seen.fields.get(name) for name in ("owner", "state", "released"))
            if held != ours or seen.fields["lease"] is None:
                raise errors.LeaseLost
            return change(seen)

        self._records.change(self._claim.key, mine)


class RedisAdmin:
    """The records in Redis, for an operator: ``SCAN`` finds them, and blocks nobody."""

    remedy = "connect to a primary that takes writes, and allow its user EVAL and SCAN on our prefix"

    def __init__(self, records: RedisRecords) -> None:
        self._records = records

    def overview(self) -> admin.Overview:
        """Count what there is: as Redis has no table, this reads every record."""
        counts, waiting = defaultdict[str, Counter[str]](Counter), list[float]()
        for line, stored in self._seen():
            counts[line.operation][line.state] += 1
            if line.waits:
                waiting.append(stored.ago("created") or 0.0)
        return admin.Overview(counts, False, len(waiting), max(waiting, default=None), 0, None)

    def lines(
        self,
        limit: int,
        *,
        start: bytes = b"",
        tail: bytes = b"",
        name: str | None = None,
        state: str | None = None,
    ) -> list[admin.Line]:
        """Return the newest records."""
        lines = (line for line, _ in self._seen(start, tail) if name in (None, line.operation))
        fitting = (line for line in lines if state in (None, line.state))
        return nlargest(limit, fitting, key=attrgetter("created"))

    def notes(self, key: bytes) -> tuple[dict[str, StoredStep], list[admin.AuditEntry]]:
        """Return the finished steps, and what operators did: a deleted record has none."""
        fields = self._records.read(key).fields or {"steps": {}, "audit": []}
        return steps_of(json.dumps(fields["steps"])), admin.read_audit(json.dumps(fields["audit"]))

    def sealings(self) -> Counter[bytes | None]:
        """Count what is encrypted, by the key, and what is not."""
        found = Counter[bytes | None]()
        for line, each in self._seen():
            values = [step.result for step in steps_of(json.dumps(each.fields["steps"])).values()]
            values += [self._records.read(each.key).body] if line.status is not None else []
            prefixes = (value[:9] for value in values if value is not None)
            found.update(each if each.startswith(SEALED) else None for each in prefixes)
        return found

    def note(self, key: bytes, entry: admin.AuditEntry) -> bool:
        """Note what an operator did."""

        def noted(seen: Stored) -> Stored | None:
            fields = seen.fields | {"audit": _audit(seen, entry)}
            return replace(seen, fields=fields) if seen.fields else None

        return self._records.change(key, noted)

    def settle(
        self,
        seen: admin.Line,
        entry: admin.AuditEntry,
        ttl_seconds: float,
        response: StoredResponse | None = None,
        *,
        anew: bool = False,
    ) -> bool:
        """End it as an operator decided."""

        def decided(found: Stored) -> Stored | None:
            line = found.line() if found.fields else None
            if line is None or line.version != seen.version or line.state not in admin.WAITING:
                return None
            fields: dict[str, Any] = {
                **_EMPTY,
                "state": State.IN_PROGRESS.value,
                "owner": secrets.token_urlsafe(16),
                "created": found.now if anew else found.fields["created"],
                "released_attempt": line.attempt,
                "audit": _audit(found, entry),
            }
            if response is None:
                return found.changed(**fields | {"lease": found.now, "released": found.now})
            fields["expires"] = max(found.fields["expires"] or 0, found.now + ttl_seconds)
            return _answered(found, response, **fields)

        return self._records.change(seen.hash, decided)

    def belonging(self, tail: bytes, name: str | None) -> tuple[list[bytes], Counter[str]]:
        """Return the records of a scope."""
        seen = [each for each in self._seen(end=tail) if name in (None, each[0].operation)]
        left = Counter(line.state for line, _ in seen if not _is_free(line))
        return [each.key for line, each in seen if _is_free(line)], left

    def erase(self, keys: list[bytes], seen: str | None = None) -> int:
        """Delete what has no lease."""

        def gone(stored: Stored) -> Stored | None:
            line = stored.line() if stored.fields else None
            is_meant = line is not None and _is_free(line) and seen in (None, line.version)
            return _gone(stored) if is_meant else None

        return sum(self._records.change(key, gone) for key in keys)

    def purge(self, batch: int) -> Iterator[int]:  # noqa: ARG002
        """Delete nothing: Redis deletes expired records by itself."""
        return iter(())

    def create(self) -> list[str]:
        """Create nothing: there is no table."""
        return []

    def examine(self) -> Iterator[admin.Finding]:
        """Check that Redis is there, and what it forgets."""
        try:
            self._records.client.ping()
        except Exception as error:  # whatever the application's own client may raise
            remedy = "check that the server runs and that its URL and password are right"
            yield admin.Finding("FAILED", "Redis", cause(error), remedy)
            return
        yield admin.Finding("ok", "Redis", "reachable")
        with suppress(Exception):  # hosted servers and narrow users do not allow INFO
            memory, disk = map(self._records.client.info, ("memory", "persistence"))
            policy = memory.get("maxmemory_policy", "noeviction")
            bad = f"once it is full it forgets records, and their retries run again ({policy})"
            good = not memory.get("maxmemory") or policy == "noeviction"
            remedy = "set maxmemory-policy noeviction"
            yield admin.finding(good, "memory", "records are not evicted", bad, remedy)
            bad = "a crash loses the records since the last snapshot, and their retries run again"
            good = disk.get("aof_enabled") != 0
            yield admin.finding(good, "persistence", "appendonly", bad, "set appendonly yes", "advice")

    def _keys(self, start: bytes = b"", end: bytes = b"") -> Iterator[bytes]:
        """Yield the keys that start and end so. Raises ``StoreUnavailable``."""
        prefix, as_seen = self._records.prefix, set()
        pattern = re.sub(r"([\\*?\[\]])", r"\\\1", prefix) + start.hex() + "*" + end.hex()
        try:
            for name in self._records.client.scan_iter(match=pattern, count=AT_ONCE):
                digits = (name if isinstance(name, str) else name.decode())[len(prefix) :]
                if _KEY.fullmatch(digits) and digits not in as_seen:
                    as_seen.add(digits)  # SCAN may give one twice
                    yield bytes.fromhex(digits)
        except Exception as error:
            raise errors.StoreUnavailable from error

    def _seen(self, start: bytes = b"", end: bytes = b"") -> Iterator[tuple[admin.Line, Stored]]:
        """Yield the records whose key's hash starts and ends so; not what cannot be read."""
        keys = self._keys(start, end)
        while batch := list(islice(keys, AT_ONCE)):
            for key, reply in zip(batch, self._records.heads(batch), strict=True):
                with suppress(errors.RecordBroken):
                    stored = Stored.read(key, reply)
                    if stored.fields:  # it has not expired meanwhile
                        yield stored.line(), stored


def _twice(ask: Callable[[], Reply]) -> Any:
    """Ask Redis, and once more if that fails. Raises ``StoreUnavailable`` and ``RecordBroken``."""
    with suppress(Exception):
        return ask()()
    try:
        return ask()()
    except Exception as error:
        if "WRONGTYPE" in str(error):
            raise errors.RecordBroken from error
        log.error("Redis failed: %s", cause(error))
        raise errors.StoreUnavailable from error


def _answered(seen: Stored, response: StoredResponse, **fields: Any) -> Stored:
    """Return it with a response; as failed if its status is 500 or more."""
    answer = {
        "state": (State.FAILED if response.status >= 500 else State.COMPLETED).value,
        "status": response.status,
        "headers": response.values()["headers"],
        "bytes": None if response.body is None else len(response.body),
        "completed": seen.now,
    }
    return seen.changed(response.body or b"", **_EMPTY | fields | answer)


def _gone(seen: Stored) -> Stored:
    return replace(seen, fields={})


def _renewed(seen: Stored, seconds: float) -> Stored:
    return seen.changed(lease=max(seen.fields["lease"], seen.now + seconds))


def _audit(seen: Stored, entry: admin.AuditEntry) -> list[Any]:
    noted = {"at": str(_time(seen.now)), "by": entry.by, "did": entry.did, "why": entry.why}
    return [*seen.fields.get("audit", ()), noted]


def _is_free(line: admin.Line) -> bool:
    """Return True if nobody works on it, and nobody must decide about it."""
    return line.state not in ("in_progress", "interrupted") and not line.waits


def _time(seconds: float | None) -> Any:
    return None if seconds is None else datetime.fromtimestamp(seconds, tz=timezone.utc)
