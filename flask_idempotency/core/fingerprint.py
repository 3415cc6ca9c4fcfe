"""Is this the same request again? Fingerprints tell, without storing the request.

Each algorithm has a code that is stored beside its digest. What an algorithm digests may never change
under its code: after a deployment, every live key would get 422. Fingerprints of two codes cannot be
compared: then the stored response is replayed, and that is logged.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NoReturn
from urllib.parse import unquote_to_bytes

from .errors import BodyMalformed, ConfigurationError, shown
from .keys import Part, digest

CUSTOM: Final = 4  # 1 to 3, 5 and 6 were the others, before forms were compared as they are parsed
REQUEST: Final = 7
JSON: Final = 8
FIELDS: Final = 9

_CODES: Final = 16
"""The algorithms' codes are below this. The code of one that was given a list of pointers is that plus
this times a number from 1 to :data:`_LISTS`, which stands for the list: see :func:`by_parts`."""

_LISTS: Final = 2047
"""The largest such code still fits the column, a smallint. One pair of lists in 2047 has the same
number: between these two, a retry that the change of the list meets may get 422."""

MAX_DEPTH: Final = 200
"""Levels of nesting in a JSON body. Far beyond real bodies, and well below the limit of Python's
``json``, which depends on version and stack: no body is accepted today and rejected tomorrow."""

_DIGEST_BYTES: Final = 16
"""128 bits of SHA-256. A fingerprint is compared only with that of the same key, in the same scope:
whoever finds two requests with one fingerprint, after some 2^64 tries, is told about their own first
request. To match the request of somebody else takes 2^128."""

MISSING: Final = object()
"""What :func:`resolve` returns for a missing member; null is None."""


@dataclass(frozen=True, slots=True)
class RequestParts:
    """What a request is compared by.

    ``host`` is None where it does not matter; ``query`` is raw, without the question mark;
    ``media_type`` is in lower case and without parameters. ``form`` replaces ``body``; it holds name
    and value of each field, and name, file name, type and SHA-256 of each file.
    """

    method: str
    host: str | None
    path: str
    query: bytes
    media_type: str
    body: bytes = field(repr=False)
    form: tuple[tuple[Part, ...], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The digest of a request, and the code of the algorithm that made it.

    A keyed ``digest`` begins with the id of its key; stores keep it as one value, of any length.
    ``older`` is the same request under the older keys, and is not stored.
    """

    algorithm: int
    digest: bytes = field(repr=False)
    older: tuple[bytes, ...] = field(default=(), repr=False, compare=False)

    def keyed(self, keys: Iterable[tuple[bytes, bytes]]) -> Fingerprint:
        """The same under secret keys, as pairs of id and key, newest first (BLAKE2b, RFC 7693).

        A digest without a key keeps no secret: whoever reads it can try all possible requests.
        """
        digests = [key_id + _mac(self.digest, key) for key_id, key in keys]
        return Fingerprint(self.algorithm, digests[0], tuple(digests[1:]))

    def matches(self, stored: Fingerprint) -> bool | None:
        """Return True if both are of the same request, compared in constant time.

        :return: None if they cannot be compared: the stored one has another algorithm or unknown key.
        """
        if self.algorithm == stored.algorithm:
            for digest in (self.digest, *self.older):
                if digest[:-_DIGEST_BYTES] == stored.digest[:-_DIGEST_BYTES]:
                    return hmac.compare_digest(digest, stored.digest)
        return None

    @property
    def is_keyed(self) -> bool:
        """True if it was made under a secret key: then responses are encrypted, too."""
        return len(self.digest) > _DIGEST_BYTES


def _mac(data: bytes, key: bytes) -> bytes:
    # Four times as fast as HMAC: this is computed for every request.
    return hashlib.blake2b(data, key=key, digest_size=_DIGEST_BYTES).digest()


def by_parts(parts: RequestParts, compared: str | Sequence[str]) -> Fingerprint:
    """Digest method, host, path, sorted query, and what counts of the rest.

    ``"request"``: media type and body. ``"json"``: the same, with a JSON body in canonical form: order
    of members and whitespace do not matter. Numbers are compared as they are written: no rounding makes
    two equal. Or only the fields of a JSON body that a list of pointers names; a missing one differs
    from null. The bytes of a body count if its media type is not JSON.

    The code is one that another list does not have, so those of two lists cannot be compared: a
    deployment that changes a list would otherwise reject the retries of what came before it.

    :param compared: pointers are as :func:`parse_pointer` returns them.
    :raises BodyMalformed: if the body is not the JSON it claims to be.
    """
    is_json = compared != "request" and parts.body and is_json_type(parts.media_type)
    document, content = parse_json(parts.body) if is_json else None, _content(parts)
    if isinstance(compared, str):
        code, target = REQUEST if compared == "request" else JSON, (*_target(parts), parts.media_type)
        return _fingerprint(code, *target, *(("json", _canonical(document)) if is_json else content))
    names = sorted(set(compared))
    if is_json:
        values = {name: resolve(document, name) for name in names}
        found = {name: None if values[name] is MISSING else _canonical(values[name]) for name in names}
        content = "fields", digest(*(digest(*each) for each in found.items()))
    number = 1 + int.from_bytes(digest(*names)[:4], "big") % _LISTS
    return _fingerprint(FIELDS + _CODES * number, *_target(parts), *content)


def by_value(value: bytes) -> Fingerprint:
    """Digest the application's own fingerprint of the request.

    :raises ConfigurationError: if that is not bytes.
    """
    if not isinstance(value, bytes):
        raise ConfigurationError(f"fingerprint() must return bytes, not {type(value).__name__}.")
    return _fingerprint(CUSTOM, value)


def _fingerprint(algorithm: int, *parts: Part) -> Fingerprint:
    return Fingerprint(algorithm, digest("fingerprint", algorithm, *parts)[:_DIGEST_BYTES])


def _target(parts: RequestParts) -> tuple[str, str | None, str, bytes]:
    query = digest(*sorted(parts.query.split(b"&"), key=_query_name)) if parts.query else b""
    return parts.method, parts.host, parts.path, query


def _query_name(part: bytes) -> bytes:
    # Values of one name stay in order: a view may read only the first.
    return unquote_to_bytes(part.partition(b"=")[0].replace(b"+", b" "))


def _content(parts: RequestParts) -> tuple[str, bytes | str]:
    if not parts.form:
        return "body", parts.body
    return "form", digest(*(digest(*part) for part in parts.form))


def is_json_type(media_type: str) -> bool:
    """Return True if this is the media type of JSON, in lower case and without parameters."""
    return media_type == "application/json" or media_type.endswith("+json")


_NUMBER: Final = "\ud800\udc00"
"""What a number as it is written begins with in a document. No string of JSON does: it would have this
pair of surrogates as the one character that they stand for."""

_STEPS: Final = bytes.maketrans(b"[{]}", b"\1\1\xff\xff")
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[{]}"))


def parse_json(body: bytes) -> object:
    """Read a JSON body more strictly than Python does.

    Each number is a string that only this module makes: see :data:`_NUMBER`.

    :raises BodyMalformed: if it is not UTF-8 or not JSON (RFC 8259), names a member twice, contains NaN
        or Infinity, or nests too deeply.
    """
    # Decoded first: that ends at the first error, and where Python's own limit of levels is reached.
    try:
        document = _DECODER.decode(body.decode("utf-8-sig"))
    except ValueError:
        raise BodyMalformed("The body is not valid JSON in UTF-8.") from None
    except RecursionError:
        raise _too_deep() from None
    outside = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]  # of strings
    steps = memoryview(b"".join(outside).translate(_STEPS, _NO_BRACKETS)).cast("b")  # 1 or -1 each
    if max(accumulate(steps), default=0) > MAX_DEPTH:
        raise _too_deep()
    return document


def _too_deep() -> BodyMalformed:
    return BodyMalformed(f"The JSON body is nested too deeply: at most {MAX_DEPTH} levels.")


def _members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise BodyMalformed("The JSON body names a member of an object twice.")
    return members


def _constant(text: str) -> NoReturn:
    raise BodyMalformed(f"The JSON body contains {text}, which is not JSON.")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_members,
    parse_float=_NUMBER.__add__,
    parse_int=_NUMBER.__add__,
    parse_constant=_constant,
)
# With ASCII alone, the pair in _NUMBER would be written as the character is.
_canonical: Final = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), check_circular=False, ensure_ascii=False
).encode


def parse_pointer(text: str) -> str:
    """Check a JSON pointer such as ``/order/id`` (RFC 6901 section 3); ``""`` is the whole body.

    :raises ConfigurationError: if it is not one.
    """
    if not isinstance(text, str) or not re.fullmatch(r"(?:/(?:[^~/]|~[01])*)*", text):
        raise ConfigurationError(
            f"{shown(text)} is not a JSON pointer (RFC 6901): write a slash before every name, as in "
            "'/order/id', and within a name ~1 for a slash and ~0 for a tilde."
        )
    return text


def resolve(document: object, pointer: str) -> object:
    """Find the value a pointer names (RFC 6901 section 4), or :data:`MISSING`."""
    for escaped in pointer.split("/")[1:]:
        name = escaped.replace("~1", "/").replace("~0", "~")
        if isinstance(document, dict):
            document = document.get(name, MISSING)
        elif isinstance(document, list) and re.fullmatch("0|[1-9][0-9]{0,9}", name):
            document = document[int(name)] if int(name) < len(document) else MISSING
        else:
            return MISSING
    return document
