"""What is stored, encrypted under keys of the operator's own, or left as it is."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from flask_idempotency.core.errors import ConfigurationError, RecordBroken, SealBroken
from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.records import SEALED, Claim, Record, Sealer, StoredResponse

_KEY_BYTES = 32
_KEY_ID_BYTES = 8
"""Eight tell a list of keys apart (four already would), and say nothing about a random key."""
_NONCE_BYTES = 12
"""The length GCM is made for. Random ones are safe for 2**32 encryptions under one key (NIST
SP 800-38D section 8.3): rotate before that."""
_HEADER_BYTES = len(SEALED) + _KEY_ID_BYTES


class Sealed(Sealer):
    """Encrypts what is stored, so that whoever reads the database does not read the responses.

    :param keys: newest first. The first seals; all of them open, so a key may be rotated out once
        the records sealed under it have expired. Each is 32 bytes, or those in urlsafe base64.
    :param accept_unsealed: whether to open also what was stored without encryption. Then whoever can
        write to the store can forge responses.
    :raises ConfigurationError: if a key is anything else, or ``cryptography`` is not installed. No
        message holds a key.

    What is sealed is bound to its record, and to what it is there: format byte, key id, nonce and
    ciphertext, 37 bytes more than it was. The binding is not stored, but needed to open it.
    """

    def __init__(self, keys: Sequence[bytes | str], *, accept_unsealed: bool = False) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigurationError(
                f"IDEMPOTENCY_ENCRYPTION_KEYS needs the package cryptography ({error}): "
                "pip install 'flask-idempotency[encryption]'"
            ) from error
        secrets = [_secret(key, position) for position, key in enumerate(keys)]
        self._ciphers: dict[bytes, Any] = {_key_id(secret): AESGCM(secret) for secret in secrets}
        self._fingerprint_keys = [(_key_id(secret), _fingerprint_key(secret)) for secret in secrets]
        self.key_ids, self.accepts_unsealed = tuple(self._ciphers), accept_unsealed

    def keyed(self, fingerprint: Fingerprint) -> Fingerprint:
        """See :class:`Sealer`: keyed, so that whoever reads it cannot guess at the request."""
        return fingerprint.keyed(self._fingerprint_keys)

    def seal(self, response: StoredResponse, claim: Claim) -> StoredResponse:
        """See :class:`Sealer`. The status stays in clear, the rest is in ``body``."""
        lines = json.dumps({"headers": response.headers, "kept": response.body is not None})
        plain = lines.encode() + b"\n" + (response.body or b"")
        return StoredResponse(response.status, None, self.seal_bytes(plain, *_bound(claim, response)))

    def open(self, response: StoredResponse, record: Record) -> StoredResponse:
        """See :class:`Sealer`."""
        if not response.is_sealed():
            self._check_accepted("response")
            return response
        lines, _, body = self.open_bytes(response.body or b"", *_bound(record, response)).partition(
            b"\n"
        )
        meta = json.loads(lines)
        headers = tuple((name, value) for name, value in meta["headers"])
        return StoredResponse(response.status, headers, body if meta["kept"] else None)

    def seal_bytes(self, plain: bytes, key: bytes, purpose: str) -> bytes:
        """See :class:`Sealer`."""
        header, nonce = SEALED + self.key_ids[0], os.urandom(_NONCE_BYTES)
        context = header + purpose.encode() + b" " + key
        return bytes(header + nonce + self._ciphers[self.key_ids[0]].encrypt(nonce, plain, context))

    def open_bytes(self, stored: bytes, key: bytes, purpose: str) -> bytes:
        """See :class:`Sealer`."""
        from cryptography.exceptions import InvalidTag

        if not stored.startswith(SEALED):
            self._check_accepted(purpose)
            return stored
        header, nonce = stored[:_HEADER_BYTES], stored[_HEADER_BYTES:][:_NONCE_BYTES]
        cipher = self._ciphers.get(header[len(SEALED) :])
        if cipher is None:
            raise SealBroken(
                "The stored response is sealed under a key that is not in "
                "IDEMPOTENCY_ENCRYPTION_KEYS: put that key back at the end of the list."
            )
        context = header + purpose.encode() + b" " + key
        try:
            return bytes(cipher.decrypt(nonce, stored[_HEADER_BYTES + _NONCE_BYTES :], context))
        except (InvalidTag, ValueError):  # it was changed, shortened, or is another record's
            raise RecordBroken from None

    def _check_accepted(self, what: str) -> None:
        if not self.accepts_unsealed:
            raise SealBroken(
                f"The stored {what} is not encrypted, so anyone with access to the store may have"
                " written it. If it is from before IDEMPOTENCY_ENCRYPTION_KEYS was set, set"
                " IDEMPOTENCY_ACCEPT_UNSEALED = True for one retention (IDEMPOTENCY_TTL)."
            )


def _bound(of: Claim | Record, response: StoredResponse) -> tuple[bytes, str]:
    """Return what a response is bound to: its record with the request's fingerprint, and its status."""
    fingerprint = of.fingerprint
    return of.key + fingerprint.digest, f"{fingerprint.algorithm} {response.status}"


def _key_id(secret: bytes) -> bytes:
    return hashlib.sha256(b"flask-idempotency key id:" + secret).digest()[:_KEY_ID_BYTES]


def _fingerprint_key(secret: bytes) -> bytes:
    return hmac.digest(secret, b"flask-idempotency fingerprints", "sha256")


def _secret(key: bytes | str, position: int) -> bytes:
    if isinstance(key, bytes) and len(key) == _KEY_BYTES:
        return key
    text = key.decode("latin-1") if isinstance(key, bytes) else str(key)
    if re.fullmatch(r"[A-Za-z0-9_-]{43}=?", text):
        return base64.urlsafe_b64decode(text[:43] + "=")
    raise ConfigurationError(
        f"IDEMPOTENCY_ENCRYPTION_KEYS[{position}] is not a key. Allowed are 32 bytes, or 32 bytes "
        "in urlsafe base64; to make one: "
        'python -c "import secrets; print(secrets.token_urlsafe(32))"'
    )
