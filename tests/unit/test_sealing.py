"""Encryption of what is stored, and its keys."""

from __future__ import annotations

import base64
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flask_idempotency.core.errors import ConfigurationError, RecordBroken
from flask_idempotency.stores.sealing import Sealed

OLD, NEW = b"o" * 32, bytes(range(200, 232))
ROW, OTHER_ROW = b"row 1", b"row 2"

sealer = Sealed([NEW])


def seal(plain: bytes, key: bytes = ROW, by: Sealed = sealer) -> bytes:
    return by.seal_bytes(plain, key, "step")


def opened(sealed: bytes, key: bytes = ROW, by: Sealed = sealer) -> bytes:
    return by.open_bytes(sealed, key, "step")


@settings(deadline=None)
@given(st.binary(), st.binary())
def test_what_was_sealed_opens_for_its_record(plain: bytes, key: bytes) -> None:
    sealed = seal(plain, key)
    assert opened(sealed, key) == plain
    assert len(sealed) == len(plain) + 37


def test_what_was_changed_or_moved_is_refused() -> None:
    sealed = seal(b"answer")
    changed = [sealed[:length] for length in range(len(sealed))] + [sealed + b"\0", b"answer"]
    for position in range(len(sealed) * 8):
        flipped = bytearray(sealed)
        flipped[position // 8] ^= 1 << position % 8
        changed.append(bytes(flipped))
    changed += [seal(b"answer", OTHER_ROW), sealer.seal_bytes(b"answer", ROW, "mail")]
    for each in changed:
        with pytest.raises(RecordBroken):
            opened(each)


def test_the_same_response_is_never_sealed_alike() -> None:
    nonces = {seal(b"answer")[9:21] for _ in range(100)}
    assert len(nonces) == 100


@pytest.mark.parametrize(
    "key",
    [
        base64.urlsafe_b64encode(NEW).decode(),
        base64.urlsafe_b64encode(NEW),
        base64.urlsafe_b64encode(NEW).decode().rstrip("="),  # as secrets.token_urlsafe(32) makes it
    ],
)
def test_a_key_may_be_in_urlsafe_base64(key: str | bytes) -> None:
    assert opened(seal(b"answer"), by=Sealed([key])) == b"answer"


def test_without_cryptography_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigurationError, match=r"flask-idempotency\[encryption\]"):
        Sealed([NEW])
