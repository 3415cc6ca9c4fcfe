"""The records in Redis alone: for endpoints where a small risk in rare failures is accepted.

Redis may forget: a restart, a failover or an eviction loses records, and then a retry runs the view
again. Nothing commits together with a record here, so every operation has a lease, as with
``atomic=False`` elsewhere. All times are the server's.

A record is one value: its fields in one line of JSON, steps included, and the body of its response. A
statement of :class:`.sql.Statements` is a function here: of what is stored and of bound values. It
returns the fields that change, and these replace the line if it is still the same; otherwise somebody
has changed it meanwhile, and it is read again. A record in progress does not expire: an interrupted
operation waits for somebody.
"""

from __future__ import annotations

import glob
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

from flask_idempotency.core.errors import NotAtomic, RecordBroken, StoreUnavailable
from flask_idempotency.core.logs import log
from flask_idempotency.core.machine import Situation, situation
from flask_idempotency.core.records import OBSERVED, SEALED_TEXT, Claim, Record, State, legible

from .admin import WAITING, Finding, Line, Overview
from .holds import Hold, Lease, SqlRecords
from .lock import Client, cause, sender
from .sql_admin import SqlAdmin

# -> the server's time in milliseconds, and the record with so many bytes of its body, or nothing
_READ = """local time, value = redis.call('TIME'), redis.call('GET', KEYS[1])
local head = string.find(value or '', '\\n', 1, true) or 0
return {time[1] * 1000 + math.floor(time[2] / 1000), value and string.sub(value, 1, head + ARGV[1])}"""

_WHOLE = 2**30  # more than Redis takes
_SEAL_BYTES = 9
"""How much a list of records reads of each body: enough to see under which key it is encrypted."""

# Replaces the line of fields that was seen, and the body, for so many milliseconds; for ever where
# none are given; 0 deletes. It may be sent twice, as its reply may be lost: then the new line is there.
_REPLACE = """local head = string.match(redis.call('GET', KEYS[1]) or '', '^[^\\n]*')
if head == ARGV[2] then return 1 end
if head ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2] .. '\\n' .. ARGV[3])
if ARGV[4] ~= '' then redis.call('PEXPIRE', KEYS[1], ARGV[4]) end
return 1"""

AT_ONCE = 1000
"""How many records a list asks for at once: some milliseconds of the server's time."""

_EMPTY = dict.fromkeys(("lease", "expires", "completed", "status", "headers", "body"))

_OPEN = {Situation.IN_PROGRESS: "released", Situation.INTERRUPTED: "interrupted"}
"""What nobody works on, and how an operator's list calls it."""

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """What stands under a key at the time ``now``. Times are in seconds.

    ``head`` is the line that the ``fields`` are in, all but ``body``. Both are empty for no record.
    """

    key: bytes
    now: float
    head: bytes
    fields: Fields

    @classmethod
    @legible()
    def read(cls, key: bytes, reply: Any) -> Stored:
        """Read a reply to ``_READ``. Raises ``RecordBroken``."""
        milliseconds, value = reply
        if value is None:
            return cls(key, milliseconds / 1000, b"", {})
        head, _, body = value.partition(b"\n")  # JSON has no line break in it
        fields = dict(json.loads(head))
        fields["body"] = None if fields["bytes"] is None else body
        return cls(key, milliseconds / 1000, head, fields)

    @legible()
    def record(self) -> Record | None:
        """Return the record, if there is one. Raises ``RecordBroken``."""
        if not self.fields:
            return None
        lease, completed = self.fields["lease"], self.fields["completed"]
        values = {
            "digest": bytes.fromhex(self.fields["digest"]),
            "expired": False,
            "age": self.now - self.fields["created"],
            "lease_left": None if lease is None else lease - self.now,
            "released": None if lease is None or completed is None else self.now - completed,
        }
        return Record.read(self.key, self.fields | values)

    @legible()
    def line(self) -> Line | None:
        """Return what an operator sees of the record, if there is one. Raises ``RecordBroken``."""
        if (record := self.record()) is None:
            return None
        fields, name = self.fields, record.name.encode().decode()  # no half of a character
        state = _OPEN.get(situation(record), record.state.value)
        shown = "observed" if record.owner.startswith(OBSERVED) else state
        ended = None if record.state is State.IN_PROGRESS else fields["completed"]
        times = map(_time, (fields["created"], ended, fields["expires"]))
        version = f"{record.owner} {record.state.value} {fields['lease']}"
        facts: list[Any] = [record.attempt, fields["status"], fields["bytes"], *times, False, version]
        return Line(self.key, name, shown, *facts)


Statement = Callable[[Stored, Fields], Fields | None]
"""It returns the fields that change; None if nothing does."""


def insert(seen: Stored, values: Fields) -> Fields | None:
    """A record of this claim, if there is none."""
    return None if seen.fields else _begun(seen, values, attempt=1)


def take_over(seen: Stored, values: Fields) -> Fields | None:
    """The next attempt at what is as it was seen, where its lease is over or it was released."""
    record = seen.record()
    if record is None or record.owner != values["seen"] or situation(record) not in _OPEN:
        return None
    return _begun(seen, values, attempt=record.attempt + 1)


def _begun(seen: Stored, values: Fields, *, attempt: int) -> Fields:
    # The "ttl" is for what operators decide: there is no "expires" meanwhile.
    first: Fields = {"created": seen.now, "released_attempt": None, "audit": [], "steps": {}}
    # What was only observed needs nobody's decision: it expires even if it never ends.
    is_observed = values["owner"].startswith(OBSERVED)
    claim = {name: values[name] for name in ("name", "version", "owner", "ttl")}
    claim |= {"digest": values["digest"].hex(), "attempt": attempt, "state": State.IN_PROGRESS.value}
    claim["lease"] = seen.now + (values["lease"] or 0)
    claim["expires"] = seen.now + values["ttl"] if is_observed else None
    return first | seen.fields | _EMPTY | claim


def finish(seen: Stored, values: Fields) -> Fields:
    """A response. A failure after a finished step waits for a decision, with a lease that is over."""
    must_wait = values["waits"] and seen.fields["steps"]
    return _ended(seen, values) | ({"lease": seen.now, "expires": None} if must_wait else {})


def end(seen: Stored, _values: Fields) -> Fields:
    """The end of the lease."""
    return {"lease": seen.now}


def release(seen: Stored, values: Fields) -> Fields:
    """An end without a response.

    It expires, unless it has done something: a step, or what an operator had to decide about.
    """
    if seen.fields["steps"] or seen.fields["released_attempt"] is not None:
        return {"lease": seen.now, "completed": seen.now, "expires": None}
    return {"lease": None, "completed": seen.now, "expires": seen.now + values["ttl"]}


def extend(seen: Stored, values: Fields) -> Fields:
    """A lease that ends no earlier."""
    return {"lease": max(seen.fields["lease"], seen.now + (values["lease"] or 0))}


def record_step(seen: Stored, values: Fields) -> Fields:
    """A finished step, under its name: sent twice, it is there once."""
    step = {name: values[name] for name in ("attempt", "result")} | {"at": str(_time(seen.now))}
    return extend(seen, values) | {"steps": seen.fields["steps"] | {values["step"]: step}}


def note(seen: Stored, values: Fields) -> Fields | None:
    """One entry more of what operators did."""
    if not seen.fields:
        return None
    entry = {name: values[name] for name in ("by", "did", "why")} | {"at": str(_time(seen.now))}
    return {"audit": [*seen.fields["audit"], entry]}


def settle(seen: Stored, values: Fields) -> Fields | None:
    """What an operator decided about this version of the record."""
    line = seen.line()
    if line is None or line.version != values["seen"] or line.state not in WAITING:
        return None
    ended = _ended(seen, values) | (note(seen, values) or {})
    ended |= {"owner": values["owner"], "released_attempt": line.attempt}
    if values["anew"]:
        ended["created"] = seen.now
    if values["state"] == State.IN_PROGRESS.value:
        return ended | {"lease": seen.now, "expires": None}
    kept = seen.fields["expires"] or seen.now + seen.fields["ttl"]
    return ended | {"expires": max(ended["expires"], kept)}


def erase(seen: Stored, values: Fields) -> Fields | None:
    """No record any more, unless somebody works on it or must decide about it."""
    line = seen.line()
    is_free = line is not None and not line.stays and line.version == values["seen"]
    return {"expires": seen.now} if is_free else None


def _ended(seen: Stored, values: Fields) -> Fields:
    answer = {name: values[name] for name in ("state", "status", "headers", "body")}
    return _EMPTY | answer | {"completed": seen.now, "expires": seen.now + values["ttl"]}


def _is_held(seen: Stored, values: Fields) -> bool:
    """Return True if it is in progress and has a lease of this owner."""
    held = [seen.fields.get(name) for name in ("owner", "state", "completed")]
    is_ours = held == [values["owner"], State.IN_PROGRESS.value, None]
    return is_ours and seen.fields["lease"] is not None


def notes(records: RedisRecords, values: Fields) -> list[tuple[str, str]]:
    """The finished steps, and what operators did, each in JSON."""
    fields = records.read(values["key"]).fields
    return [(json.dumps(fields["steps"]), json.dumps(fields["audit"]))] if fields else []


def sealed(records: RedisRecords, _values: Fields) -> Iterator[tuple[bytes | None, str | None, int]]:
    """How each response and each result of a step begins."""
    for line, stored in records.scan():
        if line.status is not None:
            yield stored.fields["body"] if stored.fields["headers"] is None else None, None, 1
        for step in stored.fields["steps"].values():
            yield None, (step["result"] or "")[: len(SEALED_TEXT) + 12], 1


_LEASED = (finish, end, release, extend, record_step)
"""What changes only what its owner has a lease of."""

_STATEMENTS = (*_LEASED, insert, take_over, note, settle, erase, notes, sealed)
SQL = SimpleNamespace(**{each.__name__: each for each in _STATEMENTS}, steps=notes)


class RedisRecords(SqlRecords):
    """Records in Redis. It sends its statements itself."""

    atomic = False
    sql = SQL

    def __init__(self, client: Client, prefix: str) -> None:
        self.client, self.prefix, self.messages = client, f"{prefix}record:", self
        self._send = sender(client)

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
        return self.read(key).record()

    def _hold(self, claim: Claim, first: Statement, values: Fields) -> Lease | Record | None:
        """Commit a statement, and hold the record; or return the one that is there."""
        seen, changed = self._apply(first, values)
        return Lease(self, claim, changed["attempt"]) if changed else seen.record()

    def open_step(self, claim: Claim, connection: Any) -> Hold | None:  # noqa: ARG002
        """There is no transaction that a step could commit with."""
        raise NotAtomic(
            "step(..., atomic=True) needs a store that commits with the application's database; the"
            " store 'redis' does not"
        )

    def wait(self, key: bytes, seconds: float) -> None:
        """Nothing to wait for: every record in progress has a lease."""

    def read(self, key: bytes) -> Stored:
        """Return what stands under a key. Raises ``StoreUnavailable`` and ``RecordBroken``."""
        return Stored.read(key, self._run(_READ, key, _WHOLE))

    def fetch(self, statement: Any, values: Fields) -> Any:
        """Return the rows of a statement that only reads."""
        return statement(self, values)

    def change(self, statement: Statement, values: Fields) -> int:
        """Change a record as a statement says; how many have changed."""
        return self._apply(statement, values)[1] is not None

    def _apply(self, statement: Statement, values: Fields) -> tuple[Stored, Fields | None]:
        """Change a record; what it was, and what has changed, if anything."""
        while True:
            seen = self.read(values["key"])
            may_change = statement not in _LEASED or _is_held(seen, values)
            changes = statement(seen, values) if may_change else None
            if changes is None or self._replace(seen, changes):
                return seen, changes

    def scan(self, start: bytes = b"", tail: bytes = b"") -> Iterator[tuple[Line, Stored]]:
        """Yield the records whose key starts and ends so, each with the beginning of its body.

        What cannot be read is left out. Raises ``StoreUnavailable``.
        """
        prefix = glob.escape(self.prefix.replace("\\", r"\\"))
        scan = partial(self.client.scan_iter, f"{prefix}{start.hex()}*{tail.hex()}", AT_ONCE)
        found = _twice(lambda: list(scan(NEVER_DECODE=True)))
        names = iter(dict.fromkeys(found))  # SCAN may return one twice
        while batch := list(islice(names, AT_ONCE)):
            for name, reply in zip(batch, _twice(partial(self._heads, batch)), strict=True):
                with suppress(RecordBroken, ValueError):
                    key = bytes.fromhex(name[len(self.prefix) :].decode())
                    line = (stored := Stored.read(key, reply)).line()
                    if line is not None:  # it has not expired meanwhile
                        yield line, stored

    def _heads(self, names: list[bytes]) -> Any:
        """Return the reply to ``_READ`` for each of many, or an error."""
        pipeline = self.client.pipeline(transaction=False)
        for name in names:
            pipeline.execute_command("EVAL", _READ, 1, name, _SEAL_BYTES, NEVER_DECODE=True)
        return pipeline.execute(raise_on_error=False)

    def _replace(self, seen: Stored, changes: Fields) -> bool:
        fields = seen.fields | changes
        body, expires = fields.pop("body"), fields["expires"]
        fields["bytes"] = None if body is None else len(body)
        life = "" if expires is None else int((expires - seen.now) * 1000)
        return bool(self._run(_REPLACE, seen.key, seen.head, json.dumps(fields), body or b"", life))

    def _run(self, script: str, key: bytes, *arguments: Any) -> Any:
        command = "EVAL", script, 1, self.prefix + key.hex(), *arguments
        return _twice(lambda: self._send(*command)())  # noqa: PLW0108 -- each time anew


class RedisAdmin(SqlAdmin):
    """The records in Redis, for an operator: ``SCAN`` finds them, and blocks nobody."""

    remedy = (
        "check that the server runs, that URL and password are right, that it is a primary that takes"
        " writes, and that its user may EVAL and SCAN on our prefix"
    )

    def overview(self) -> Overview:
        """Count what there is: as Redis has no table, this reads every record."""
        counts, waiting = defaultdict[str, Counter[str]](Counter), list[float]()
        for line, stored in self._messages.scan():
            counts[line.operation][line.state] += 1
            if line.waits:
                waiting.append(stored.now - stored.fields["created"])
        return Overview(counts, False, len(waiting), max(waiting, default=None), 0, None)

    def _lines(self, values: Fields) -> list[Line]:
        found = [line for line, _ in self._messages.scan(values["start"], values["tail"])]
        found = [line for line in found if values["name"] in (None, line.operation)]
        found = [line for line in found if values["state"] in (None, line.state)]
        return sorted(found, key=lambda line: str(line.created), reverse=True)[: values["limit"]]

    def _purge(self, messages: Any, batch: int) -> int:  # noqa: ARG002
        """Delete nothing: Redis deletes expired records by itself."""
        return 0

    def create(self) -> list[str]:
        """Create nothing: there is no table."""
        return []

    def examine(self) -> Iterator[Finding]:
        """Check what Redis forgets."""
        with suppress(Exception):  # hosted servers and narrow users do not allow INFO
            info = self._messages.client.info()
            yield Finding("ok", "Redis", info["redis_version"])
            if info["maxmemory"] and (policy := info["maxmemory_policy"]) != "noeviction":
                bad = f"once it is full it forgets records, and their retries run again ({policy})"
                yield Finding("FAILED", "memory", bad, "set maxmemory-policy noeviction")
            if not info["aof_enabled"]:
                bad = "a crash loses the records since the last snapshot, and their retries run again"
                yield Finding("advice", "persistence", bad, "set appendonly yes")


def _twice(ask: Callable[[], Any]) -> Any:
    """Ask Redis, and once more if that fails. Raises ``StoreUnavailable`` and ``RecordBroken``."""
    with suppress(Exception):
        return ask()
    try:
        return ask()
    except Exception as error:
        if "WRONGTYPE" in str(error):
            raise RecordBroken from error
        log.error("Redis failed: %s", cause(error))
        raise StoreUnavailable from error


def _time(seconds: float | None) -> Any:
    return None if seconds is None else datetime.fromtimestamp(seconds, tz=timezone.utc)
