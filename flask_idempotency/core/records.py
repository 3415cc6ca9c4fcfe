"""The values that everything else is made of: a record, a stored response, a claim.

And how stores keep them: as rows of plain values.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from os import getpid, register_at_fork
from typing import Any

from .errors import LeaseLost, RecordBroken, SealBroken
from .fingerprint import Fingerprint

SEALED = b"\x01"
"""The first byte of everything stored encrypted: its format. No text begins with it."""

OBSERVED = "observed:"
"""What the owner of a record begins with whose operation was only observed."""

Headers = tuple[tuple[str, str], ...]
"""Header lines as pairs, in order; several of one name stay several."""


class Process:
    """The present process. What was begun under another ``number`` is its parent's."""

    number = getpid()  # kept, as each statement asks for it


register_at_fork(after_in_child=lambda: setattr(Process, "number", getpid()))


class State(str, Enum):
    """What a record says about its operation."""

    IN_PROGRESS = "in_progress"
    """Claimed. Only the row's lock tells whether somebody still works on it."""

    COMPLETED = "completed"
    """The response is stored; it committed together with the operation's writes."""

    FAILED = "failed"
    """The stored response, which replays, says that an operation that is not atomic failed."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An HTTP response as it is stored.

    ``headers`` is None if the response is sealed (``body`` then holds headers and body, encrypted);
    ``body`` is None if it was too large to store.
    """

    status: int
    headers: Headers | None = field(repr=False)
    body: bytes | None = field(repr=False)

    def is_sealed(self) -> bool:
        """Return True if this is encrypted."""
        return self.headers is None and (self.body or b"").startswith(SEALED)

    def values(
        self, *, state: State = State.COMPLETED, waits: bool = False, late: bool = True
    ) -> dict[str, Any]:
        """The same as the statements take it. ``waits``: see ``Lease.complete``.

        ``late`` says that its retention begins now, not with the claim.
        """
        headers = self.headers
        text = None if headers is None else _WORDS.get(headers) or json.dumps(headers)
        return {
            "state": state.value,
            "status": self.status,
            "headers": text,
            "body": self.body,
            "waits": waits,
            "late": late,
        }


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request asks for: to be the one that runs this operation.

    ``key`` is the hash over namespace, name, scope and key (23 bytes, the last 7 the scope's), ``name``
    the route's, ``owner`` a random token of this attempt, ``ttl_seconds`` how long the finished record
    replays.
    ``lease_seconds`` is how long an operation that is not atomic may go without renewing its lease, and
    None for an atomic one.
    ``max_attempts`` is after how many attempts an operation is given up. ``retried_seconds`` is how
    long after its first attempt an interrupted operation may run again, if its route says "retry".
    ``too_old_at`` is from when on, in seconds since 1970, a record of this key may be gone, where that
    matters. ``pid`` is the process that made the claim: no child takes part in it. ``connection`` is
    what an atomic operation is to continue the transaction of, in place of one of its own.
    """

    key: bytes
    name: str
    fingerprint: Fingerprint
    owner: str
    ttl_seconds: float
    lease_seconds: float | None = None
    max_attempts: int | None = None
    retried_seconds: float = math.inf
    too_old_at: float | None = None
    pid: int = field(default_factory=getpid, repr=False, compare=False)
    connection: Any = field(default=None, repr=False, compare=False)

    def values(self) -> dict[str, Any]:
        """The same as the statements take it."""
        return {
            "key": self.key,
            "name": self.name,
            "version": self.fingerprint.algorithm,
            "digest": self.fingerprint.digest,
            "owner": self.owner,
            "ttl": self.ttl_seconds,
            "lease": self.lease_seconds,
        }

    def is_inherited(self) -> bool:
        """Return True in a process that was forked since the claim was made: it is the parent's."""
        return self.pid != Process.number

    def refuse_in_child(self) -> None:
        """Raise ``LeaseLost`` in a process that was forked since the claim was made."""
        if self.pid != Process.number:
            raise LeaseLost(
                "This process was forked inside the operation: it can neither end it nor take a step."
            )


@dataclass(frozen=True, slots=True)
class Record:
    """A record as the store shows it.

    ``owner`` is the token of its latest attempt. The database's clock decides about ``expired`` and
    ``lease_left``: seconds, 0 or less if the lease is over, None if there is none.
    ``released_attempt`` is the attempt after which an operator released it, if one did.
    ``age`` is the seconds since its first attempt began. ``released`` is the seconds since its view or
    an operator gave it back to be run again, where that does not end it: it waits, and does not expire.
    """

    key: bytes
    name: str
    state: State
    fingerprint: Fingerprint
    attempt: int
    owner: str = ""
    expired: bool = False
    lease_left: float | None = None
    response: StoredResponse | None = None
    released_attempt: int | None = None
    age: float = field(default=0.0, compare=False)
    released: float | None = field(default=None, compare=False)

    @classmethod
    def read(cls, key: bytes, fields: Mapping[str, Any]) -> Record:
        """The record whose fields these are, a fingerprint's and a response's one by one.

        Numbers may be texts. Raises ``RecordBroken``.
        """
        try:
            left, age, released = fields["lease_left"], float(fields["age"]), fields["released"]
            left = None if left is None else float(left)
            released = None if released is None else float(released)
            if not math.isfinite(age + (left or 0.0) + (released or 0.0)):  # a time that never ends
                raise ValueError
            released_attempt = fields["released_attempt"]
            return cls(
                bytes(key),
                fields["name"],
                State(fields["state"]),
                Fingerprint(int(fields["version"]), bytes(fields["digest"])),
                int(fields["attempt"]),
                fields["owner"],
                expired=fields["expired"] in (1, "1"),
                lease_left=left,
                response=_response_of(fields),
                released_attempt=None if released_attempt is None else int(released_attempt),
                age=age,
                released=released,
            )
        except _ILLEGIBLE as error:  # not by the context: every replay comes here
            raise RecordBroken from error


# As rows, and back.


USUAL_HEADERS: dict[str, Headers] = {
    '"json"': (("Content-Type", "application/json"),),
    '"html"': (("Content-Type", "text/html; charset=utf-8"),),
}
"""Stored headers of so many responses that one word of JSON stands for them, which saves each record 30
bytes. Stored records hold the words: one may be added, but none may ever stand for something else."""

_WORDS = {headers: word for word, headers in USUAL_HEADERS.items()}


def step_values(step: str, attempt: int, result: bytes | None) -> dict[str, Any]:
    """A finished step as the statements take it: its result is text, encrypted or not."""
    text = None
    if result is not None:
        is_sealed = result.startswith(SEALED)
        text = SEALED_TEXT + b64encode(result).decode() if is_sealed else result.decode()
    return {"step": step, "attempt": attempt, "result": text}


SEALED_TEXT = "sealed:"
"""What the result of a step begins with if it is encrypted, and in base64. No JSON does."""


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A finished step. ``result`` is None if it could not be stored; ``at`` is a time as text."""

    attempt: int
    at: str
    result: bytes | None = field(repr=False)


def steps_of(text: str | None) -> dict[str, StoredStep]:
    """The finished steps of a record, by name. Raises ``RecordBroken``."""
    with legible():
        return {name: _step_of(entry) for name, entry in json.loads(text or "{}").items()}


def _step_of(entry: Any) -> StoredStep:
    text: str | None = entry.get("result")
    result = None if text is None else text.encode()
    if text is not None and text.startswith(SEALED_TEXT):
        result = b64decode(text.removeprefix(SEALED_TEXT), validate=True)
    return StoredStep(int(entry["attempt"]), str(entry["at"]), result)


@contextmanager
def legible() -> Iterator[None]:
    """Raise ``RecordBroken`` where a stored value cannot be read."""
    try:
        yield
    except _ILLEGIBLE as error:
        raise RecordBroken from error


_ILLEGIBLE = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)


def _response_of(fields: Mapping[str, Any]) -> StoredResponse | None:
    if fields["status"] is None:
        return None
    status, headers, body = int(fields["status"]), fields["headers"], fields["body"]
    if headers is not None:
        headers = USUAL_HEADERS.get(headers) or _headers_of(headers)
    response = StoredResponse(status, headers, None if body is None else bytes(body))
    if not (100 <= status <= 599 and (headers is not None or response.is_sealed())):
        raise ValueError
    return response


def _headers_of(text: str) -> Headers:
    headers = tuple((name, value) for name, value in json.loads(text))
    if not all(isinstance(part, str) for line in headers for part in line):
        raise ValueError
    return headers


# Which responses are stored, and which of their headers.

NOT_STORED = frozenset({401, 403, 408, 425, 429})
"""Responses about the caller or the moment, not about the operation: a retry may fare better."""

REPLAYED = "Idempotent-Replayed"
"""The response header that marks a replay, with the value ``true``: the name that clients of other
payment APIs know."""

TRACEPARENT = "flask-idempotency-traceparent"
"""The name of the stored line that says, as a W3C ``traceparent``, which trace the view ran in."""

NEVER_STORED = frozenset(
    {
        "set-cookie",  # would hand a visitor's session to whoever retries
        "date",
        "server",
        # Hop by hop, RFC 9110 section 7.6.1: true of one connection only.
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        TRACEPARENT,
        REPLAYED.lower(),
        # Follows from the body, and would be wrong in a replay to HEAD or behind another server.
        "content-length",
    }
)
"""Header names, in lower case, that say nothing about the operation."""

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110 section 5.6.2
# RFC 9110 section 5.5: a line break would begin another header.
_VALUE = re.compile(r"[\t -~\x80-\xff]*")

POINTERS = frozenset({"location", "content-location", "link"})
"""The headers that still say where the result is if the body was too large to store."""


def is_stored_by_default(status: int, atomic: bool = True) -> bool:
    """Return True if a response of this status is stored (and its writes committed) by default."""
    return status not in NOT_STORED if status < 500 else not atomic


def storable(headers: Iterable[tuple[str, str]]) -> Headers:
    """The headers that may be stored, and that may be sent if somebody else stored them.

    All but :data:`NEVER_STORED`, what ``Connection`` names (also hop by hop), and what no HTTP message
    can carry.
    """
    lines: list[tuple[str, str]] = []
    named: set[str] = set()
    for name, value in headers:
        if name.lower() == "connection":
            named.update(map(str.strip, value.lower().split(",")))
        elif name.lower() not in NEVER_STORED and _NAME.fullmatch(name) and _VALUE.fullmatch(value):
            lines.append((name, value))
    return tuple([line for line in lines if line[0].lower() not in named] if named else lines)


class Sealer:
    """Encrypts what is stored, and binds it to its record. This one leaves it as it is.

    What opens raises ``RecordBroken`` for what was changed or moved, and ``SealBroken`` for what is
    under another key, should have been sealed and is not, or is sealed where there are no keys.
    ``key_ids`` are those of its keys, newest first.
    """

    key_ids: tuple[bytes, ...] = ()
    accepts_unsealed = True

    def keyed(self, fingerprint: Fingerprint) -> Fingerprint:
        """A request's fingerprint as it is stored."""
        return fingerprint

    def seal(self, response: StoredResponse, claim: Claim) -> StoredResponse:  # noqa: ARG002
        """The response as it is stored."""
        return response

    def open(self, response: StoredResponse, record: Record) -> StoredResponse:  # noqa: ARG002
        """The response as it was."""
        if response.is_sealed():
            raise SealBroken(_NO_KEYS)
        return response

    def seal_bytes(self, plain: bytes, key: bytes, purpose: str) -> bytes:  # noqa: ARG002
        """Anything else that is stored for a record, bound to its key and to a purpose.

        It is text, which never begins like something sealed.
        """
        return plain

    def open_bytes(self, stored: bytes, key: bytes, purpose: str) -> bytes:  # noqa: ARG002
        """Return what :meth:`seal_bytes` was given."""
        if stored.startswith(SEALED):
            raise SealBroken(_NO_KEYS)
        return stored


_NO_KEYS = "What is stored is sealed, but IDEMPOTENCY_ENCRYPTION_KEYS is empty."
