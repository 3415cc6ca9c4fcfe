"""Claims, responses and records as rows of plain values, and back: for every store that keeps rows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .errors import RecordBroken
from .fingerprint import Fingerprint
from .records import Claim, Headers, Record, State, StoredResponse

USUAL_HEADERS: dict[str, Headers] = {
    '"json"': (("Content-Type", "application/json"),),
    '"html"': (("Content-Type", "text/html; charset=utf-8"),),
}
"""Stored headers of so many responses that one word of JSON stands for them, which saves each record 30
bytes. Stored records hold the words: one may be added, but none may ever stand for something else."""

_UNREADABLE = KeyError, OverflowError, RecursionError, TypeError, ValueError
CANNOT_BE_READ = "one of its fields cannot be read"

_WORDS = {headers: word for word, headers in USUAL_HEADERS.items()}


def claim_values(claim: Claim) -> dict[str, Any]:
    """A claim as the statements take it."""
    return {
        "key": claim.key,
        "name": claim.name,
        "version": claim.fingerprint.algorithm,
        "digest": claim.fingerprint.digest,
        "owner": claim.owner,
        "ttl": claim.ttl_seconds,
        "lease": claim.lease_seconds,
        "request": claim.request,
        "resumes": claim.resumes,
        "until": claim.begins_until,
    }


def response_values(response: StoredResponse) -> dict[str, Any]:
    """A response as the statements take it."""
    headers = response.headers
    text = None if headers is None else _WORDS.get(headers) or json.dumps(headers)
    return {"status": response.status, "headers": text, "body": response.body}


def record_of(row: tuple[Any, ...]) -> Record:
    """The record of one row: its fields in order, a fingerprint's and a response's one by one.

    Raises ``RecordBroken``.
    """
    key, name, state, version, digest, attempt, owner, expired, lease_left, *response, tries = row
    try:
        found = bytes(key), name, State(state), Fingerprint(version, bytes(digest)), attempt, owner
        return Record(*found, bool(expired), finite(lease_left), _response_of(*response), tries)
    except _UNREADABLE as error:
        raise RecordBroken(CANNOT_BE_READ) from error


def _response_of(status: int | None, headers: str | None, body: bytes | None) -> StoredResponse | None:
    if status is None:
        return None
    usual = USUAL_HEADERS.get(headers or "")
    return StoredResponse(status, usual or pairs_of(headers), None if body is None else bytes(body))


def pairs_of(headers: str | bytes | None) -> Headers | None:
    """The lines of a stored header. Raises ``TypeError`` or ``ValueError`` for what is none."""
    return None if headers is None else tuple((name, value) for name, value in json.loads(headers))


def finite(seconds: float | None) -> float | None:
    """Return what is left of a lease. Raises ``ValueError`` for one that never ends, or is none."""
    if seconds is not None and not math.isfinite(seconds):
        raise ValueError
    return seconds


@contextmanager
def legible() -> Iterator[None]:
    """Raise ``RecordBroken`` where a stored value cannot be read."""
    try:
        yield
    except _UNREADABLE as error:
        raise RecordBroken(CANNOT_BE_READ) from error
