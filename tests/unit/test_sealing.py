from __future__ import annotations

import base64
import secrets
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flask_idempotency.core.errors import ConfigurationError, RecordBroken, SealBroken
from flask_idempotency.stores.sealing import Sealed

OLD, NEW = b"o" * 32, bytes(range(200, 232))
ROW, OTHER_ROW = b"row 1", b"row 2"

sealer = Sealed([NEW])


@settings(deadline=None)
@given(st.binary(), st.binary())
def test_what_was_sealed_opens_in_its_context(plain: bytes, context: bytes) -> None:
    sealed = sealer.encrypt(plain, context)
    assert sealer.decrypt(sealed, context) == plain
    assert len(sealed) == len(plain) + 37


def test_neither_response_nor_context_nor_key_can_be_read_in_what_is_sealed() -> None:
    sealed = sealer.encrypt(b"4111 1111", ROW)
    assert not any(secret in sealed for secret in (b"4111", ROW, NEW[:4]))


def test_every_flipped_bit_is_refused() -> None:
    sealed = sealer.encrypt(b"answer", ROW)
    for position in range(len(sealed) * 8):
        flipped = bytearray(sealed)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(RecordBroken):
            sealer.decrypt(bytes(flipped), ROW)


def test_every_shortened_or_lengthened_seal_is_refused() -> None:
    sealed = sealer.encrypt(b"answer", ROW)
    for changed in (*(sealed[:length] for length in range(len(sealed))), sealed + b"\0", b"answer"):
        with pytest.raises(RecordBroken):
            sealer.decrypt(changed, ROW)


def test_a_response_moved_to_another_row_stays_shut() -> None:
    with pytest.raises(RecordBroken):
        sealer.decrypt(sealer.encrypt(b"answer", ROW), OTHER_ROW)


def test_a_context_cannot_borrow_from_the_header() -> None:
    sealed = sealer.encrypt(b"answer", b"")
    with pytest.raises(RecordBroken):
        sealer.decrypt(sealed[:8] + sealed[9:], sealed[8:9])


def test_the_same_response_is_never_sealed_alike() -> None:
    nonces = {sealer.encrypt(b"answer", ROW)[9:21] for _ in range(100)}
    assert len(nonces) == 100


def test_the_newest_key_seals_and_older_ones_still_open() -> None:
    before, rotated = Sealed([OLD]), Sealed([NEW, OLD])
    assert rotated.decrypt(before.encrypt(b"old", ROW), ROW) == b"old"
    assert sealer.decrypt(rotated.encrypt(b"new", ROW), ROW) == b"new"


def test_a_response_under_a_key_taken_out_says_which_setting_to_mend() -> None:
    with pytest.raises(SealBroken, match="IDEMPOTENCY_ENCRYPTION_KEYS: put that key back"):
        sealer.decrypt(Sealed([OLD]).encrypt(b"answer", ROW), ROW)


@pytest.mark.parametrize(
    "key",
    [
        base64.urlsafe_b64encode(NEW).decode(),
        base64.urlsafe_b64encode(NEW),
        base64.urlsafe_b64encode(NEW).decode().rstrip("="),
    ],
)
def test_a_key_may_be_in_urlsafe_base64(key: str | bytes) -> None:
    assert Sealed([key]).decrypt(sealer.encrypt(b"answer", ROW), ROW) == b"answer"


def test_a_key_made_as_the_message_says_is_accepted() -> None:
    fresh = Sealed([secrets.token_urlsafe(32)])
    assert fresh.decrypt(fresh.encrypt(b"answer", ROW), ROW) == b"answer"


@pytest.mark.parametrize(
    "key",
    [
        "correct horse battery staple 123",
        "short-key",
        b"short-key",
        b"n" * 31,
        b"n" * 33,
        "A" * 42,
        "A" * 44,
        "+/" * 21 + "A=",
        "A" * 43 + "=\n",
        "\u00e9" * 43,
        "",
        None,
        42424242,
    ],
)
def test_anything_else_is_refused_by_its_position_and_never_shown(key: Any) -> None:
    with pytest.raises(ConfigurationError, match="32 bytes in urlsafe base64; to make one") as it:
        Sealed([OLD, key])
    assert it.value.detail.startswith("IDEMPOTENCY_ENCRYPTION_KEYS[1] is not a key.")
    assert not key or str(key) not in it.value.detail


@pytest.mark.parametrize("keys", [[], (), "A" * 43, b"n" * 32])
def test_the_keys_must_be_a_list_of_at_least_one(keys: Any) -> None:
    with pytest.raises(ConfigurationError, match="a list of at least one key"):
        Sealed(keys)


def test_without_cryptography_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigurationError, match=r"flask-idempotency\[encryption\]"):
        Sealed([NEW])
