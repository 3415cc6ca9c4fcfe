"""What the tests of a store use: claims to new keys, and looks at records."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.keys import KEY_BYTES
from flask_idempotency.core.ports import Records
from flask_idempotency.core.records import Claim, Record, StoredResponse
from tests.waiting import wait_until

PATIENCE_SECONDS = 10.0
SHORT_SECONDS = 0.05

until = partial(wait_until, what="it comes about")

RESPONSE = StoredResponse(
    201, (("X-Same", "1"), ("X-Same", "2"), ("X-Odd", "ü\u2028")), bytes(range(256))
)
SAME = Fingerprint(1, b"\x00\xff" * 12)  # as long as a keyed one


def a_claim(*, ttl: float = 60.0, lease: float | None = None) -> Claim:
    """A claim for a key that nobody has used."""
    return Claim(secrets.token_bytes(KEY_BYTES), "pay", SAME, secrets.token_urlsafe(16), ttl, lease)


def again(claim: Claim) -> Claim:
    """Another attempt's claim to the same key."""
    return replace(claim, owner=secrets.token_urlsafe(16))


def is_refused(got: object) -> bool:
    """Return True if a claim did not get the operation: the record that is there instead, or None."""
    return got is None or isinstance(got, Record)


def stored_record(records: Records, claim: Claim) -> Record:
    """The record, which is there."""
    record = records.look(claim.key)
    assert record is not None
    return record


def lease_left(records: Records, claim: Claim) -> float:
    """How many seconds the record's lease has left; it has one."""
    left = stored_record(records, claim).lease_left
    assert left is not None, "the record has no lease"
    return left


def has_expired(records: Records, claim: Claim) -> bool:
    """Return True if the record has expired; a store may forget it then."""
    record = records.look(claim.key)
    return record is None or record.expired


def is_renewed(records: Records, claim: Claim, renew: Callable[[], object]) -> bool:
    """Return True if ``renew`` has moved the lease's end; False also if no time had passed before."""
    before = lease_left(records, claim)
    renew()
    return lease_left(records, claim) > before
