"""Between the values of the core and the rows of the table."""

from __future__ import annotations

import json
from typing import Any

from ..core.fingerprint import Fingerprint
from ..core.records import Answer, Claim, Record, State


def claim_values(claim: Claim) -> dict[str, Any]:
    """A claim as the statements take it."""
    return {
        "key": claim.key,
        "name": claim.name,
        "version": claim.fingerprint.version,
        "digest": claim.fingerprint.digest,
        "owner": claim.owner,
        "ttl": claim.ttl_seconds,
        "lease": claim.lease_seconds,
        "request": claim.request,
    }


def answer_values(answer: Answer) -> dict[str, Any]:
    """An answer as the statements take it."""
    return {
        "status": answer.status,
        "headers": None if answer.headers is None else json.dumps(answer.headers),
        "body": answer.body,
    }


def record_of(row: tuple[Any, ...]) -> Record:
    """A row of ``statements.COLUMNS``."""
    key, name, state, version, digest, attempt, owner, expired, lease_left, *answered = row
    status, headers, body = answered
    answer = None
    if status is not None:
        pairs = None if headers is None else tuple((str(n), str(v)) for n, v in json.loads(headers))
        answer = Answer(status, pairs, None if body is None else bytes(body))
    fingerprint = Fingerprint(version, bytes(digest))
    found = bytes(key), name, State(state), fingerprint, attempt, owner, bool(expired), lease_left
    return Record(*found, answer)
