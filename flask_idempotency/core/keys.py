"""From what a client sends to what is stored: the key read from its header, then hashed.

Only the hash goes to a store or into a log line.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache, partial
from typing import TypeAlias
from uuid import UUID

from .errors import ConfigurationError, KeyMalformed

Scope: TypeAlias = str | int | UUID | None
"""Whose key it is; None in an API with one tenant."""

Part: TypeAlias = str | bytes | int | UUID | None

SCOPE_BYTES = 7
"""How many bytes of a key's hash stand for its scope alone. They are the last ones, so that all records
of a tenant are found without a column of their own, and the first ones still spread keys evenly. Of a
million tenants, two share these 56 bits with a chance of 1 in 140,000."""

KEY_BYTES = 16 + SCOPE_BYTES
"""How many bytes a key's hash has: 16 for the operation and 7 for its scope. Clients choose their keys,
so they may search. Two of their own with one hash take about 2^64 tries and gain nothing. To meet the
key of another tenant, somebody would have to be of a scope with the same 7 bytes, and then try 2^128
keys. A column of 23 bytes takes 24, so a row and an index lose nothing to alignment: each record is 28
bytes smaller than with all 32 of a SHA-256."""

MAX_LENGTH = 255
"""The longest key, in characters after decoding: what other APIs allow."""

KEY_SYNTAX = (
    f"1 to {MAX_LENGTH} characters, printable ASCII in double quotes (a string of RFC 8941) or, without"
    " quotes, visible ASCII except comma, semicolon, double quote and backslash"
)
"""How a key in the header must look, in words."""


def parse_key(value: str) -> str:
    """Read the value of an ``Idempotency-Key`` header.

    A structured-field string (``"8e03…"``, RFC 8941 section 3.3.3) and the bare token that most
    clients send name the same key. Case counts; spaces around the value do not.

    :param value: the value as WSGI gives it, bytes decoded as latin-1.
    :return: the key, 1 to :data:`MAX_LENGTH` printable ASCII characters.
    :raises KeyMalformed: otherwise; the detail says what is wrong, but never the key.
    """
    found = _KEY.fullmatch(value.strip(" "))
    key = found and (found[1] or _ESCAPED.sub(r"\1", found[2] or ""))
    if key and len(key) <= MAX_LENGTH:
        return key
    fault = f"is longer than {MAX_LENGTH} characters" if key else "is empty"
    if found is None:
        fault = _TWICE if "," in value else _NOT_ALLOWED
    raise KeyMalformed(f"The idempotency key {fault}. Allowed: {KEY_SYNTAX}.")


_KEY = re.compile(r'([!#-+\--:<-\[\]-~]*)|"((?:[ !#-\[\]-~]|\\["\\])*)"')  # bare, or quoted
_ESCAPED = re.compile(r"\\(.)")
_NOT_ALLOWED = "contains a character that is not allowed there, or a double quote without its pair"
_TWICE = "contains a comma outside quotes: the header may have been sent twice"


def natural_key(value: object) -> str:
    """Take a value of the request as idempotency key: a string as it is, an integer or UUID as text.

    :raises KeyMalformed: if it is something else, or too long; the detail never contains it.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | UUID):
        raise KeyMalformed("What serves as the key is neither a string nor an integer, nor a UUID.")
    # Python refuses to write very long integers.
    is_long = isinstance(value, int) and abs(value) >= 10**MAX_LENGTH
    key = "" if is_long else str(value)
    if not 1 <= len(key) <= MAX_LENGTH:
        raise KeyMalformed(f"What serves as the key must have 1 to {MAX_LENGTH} characters.")
    return key


_UUID7 = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def birth_of(key: str) -> float | None:
    """When a key was made, if it says so: a UUID of version 7 begins with that (RFC 9562 section 5.7).

    :return: seconds since 1970 by its maker's clock; None for any other key.
    """
    found = _UUID7.fullmatch(key.lower())
    return None if found is None else int(found[1] + found[2], 16) / 1000


def uuid7(milliseconds: int, tail: bytes) -> str:
    """The UUID of version 7 (RFC 9562 section 5.7) of a time since 1970, with these 10 bytes behind it.

    Six of their 80 bits give way to version and variant.
    """
    number = milliseconds << 80 | int.from_bytes(tail, "big")
    number = number & ~(0xF << 76 | 0b11 << 62) | 7 << 76 | 0b10 << 62
    return str(UUID(int=number))


def observed_namespace(namespace: str) -> str:
    """The namespace of operations that are only observed; with a space, it is no other's."""
    return f"observed {namespace}"


SHOWN = 8
"""How many digits of a key's hash are shown: enough to tell records apart, too few to try keys
against."""


def hash_key(namespace: str, name: str, scope: Scope, key: str) -> bytes:
    """Hash what identifies an operation into the one value that stores look it up by.

    Plain SHA-256 rather than an HMAC under the application's secret: rotating that secret would forget
    every live key and run every retry a second time. Different parts never collide, whatever separators
    they hold: each is hashed with its type and length. The last bytes are :func:`scope_tail`.

    :param namespace: version of the route's meaning.
    :param name: name of the route.
    :param scope: whose key it is; ``1`` and ``"1"`` are two.
    :param key: any text; a natural key may hold any Unicode, even lone surrogates.
    :return: :data:`KEY_BYTES` bytes.
    :raises ConfigurationError: if ``scope`` is of another type. Its text is no substitute: the objects
        of two tenants may print alike.
    """
    tail = scope_tail(scope)
    return digest("key", namespace, name, scope, key)[: KEY_BYTES - SCOPE_BYTES] + tail


def scope_tail(scope: Scope) -> bytes:
    """The bytes with which the hashes of all keys of a scope end.

    :return: :data:`SCOPE_BYTES` bytes.
    :raises ConfigurationError: as :func:`hash_key` does.
    """
    if isinstance(scope, bool) or not (scope is None or isinstance(scope, str | int | UUID)):
        raise ConfigurationError(
            f"The scope of an idempotency key must be a str, int, UUID or None, not "
            f"{type(scope).__name__}: return the id of the tenant or user from the scope callable."
        )
    return _scope_digest(scope)[:SCOPE_BYTES]


def derive_key(key: bytes, name: str) -> str:
    """A key for another API: the same for every attempt at an operation and ``name``.

    :param key: what :func:`hash_key` gave for the operation.
    :return: 43 characters of the URL-safe base64 alphabet, which reveal nothing of ``key``.
    """
    return base64.urlsafe_b64encode(digest("derived", key, name)).rstrip(b"=").decode()


def digest(*parts: Part) -> bytes:
    """SHA-256 over parts in order, each preceded by its type and its length in bytes.

    :return: 32 bytes. Other parts, another order or another type give another digest. Stored records
        are found and compared by it, so its format may never change.
    """
    *before, last = parts or (b"",)
    tag, data = _tagged(last)
    sha256 = hashlib.sha256(b"%b%b%d:" % (b"".join(map(_encoded, before)), tag, len(data)))
    sha256.update(data)  # not joined: it may be a body of megabytes
    return sha256.digest()


_scope_digest = lru_cache(512, typed=True)(partial(digest, "scope"))


@lru_cache(512, typed=True)  # an application's endpoints with their paths and scopes
def _encoded(part: Part) -> bytes:
    tag, data = _tagged(part)
    return b"%b%d:%b" % (tag, len(data), data)


def _tagged(part: Part) -> tuple[bytes, bytes]:
    """One byte for the type of a part, and its value as bytes."""
    if part is None:
        return b"n", b""
    if isinstance(part, str):
        return b"s", part.encode("utf-8", "surrogatepass")
    if isinstance(part, bytes):
        return b"b", part
    if isinstance(part, UUID):
        return b"u", part.bytes
    return b"i", b"%x" % part  # Python refuses to write very long integers in decimal
