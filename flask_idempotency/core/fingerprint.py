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
from typing import Any, Final, NoReturn, TypeAlias
from urllib.parse import unquote_to_bytes

from .errors import BodyMalformed, ConfigurationError, shown
from .keys import Part, digest

CUSTOM: Final = 4  # 1 to 3, 5, 6 and 8 were others, before they changed
REQUEST: Final = 7
FIELDS: Final = 9
JSON: Final = 10

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


Form: TypeAlias = tuple[tuple[Part, ...], ...]
"""What was parsed of a form: name and value of each field; name, file name, type and SHA-256 of each
file."""


@dataclass(frozen=True, slots=True)
class RequestParts:
    """What a request is compared by.

    ``host`` is None where it does not matter; ``query`` is raw, without the question mark;
    ``media_type`` is in lower case and without parameters. ``form`` replaces ``body``.
    """

    method: str
    host: str | None
    path: str
    query: bytes
    media_type: str
    body: bytes = field(repr=False)
    form: Form = field(default=(), repr=False)


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
    names, media_types = [""], [parts.media_type]  # the whole body
    code = REQUEST if compared == "request" else JSON
    if not isinstance(compared, str):
        names, media_types = sorted(set(compared)), []
        code = FIELDS + _CODES * (1 + int.from_bytes(digest(*names)[:4], "big") % _LISTS)
    content: tuple[str, Part] = "body", parts.body
    if parts.form:
        content = "form", digest(*(digest(*part) for part in parts.form))
    elif compared != "request" and parts.body and is_json_type(parts.media_type):
        document = parse_json(parts.body)
        content = "fields", digest(*(digest(name, value_at(document, name)) for name in names))
    query = digest(*sorted(parts.query.split(b"&"), key=_query_name)) if parts.query else b""
    counted = parts.method, parts.host, parts.path, query, *media_types, *content
    return Fingerprint(code, digest("fingerprint", code, *counted)[:_DIGEST_BYTES])


def by_value(value: bytes) -> Fingerprint:
    """Digest the application's own fingerprint of the request.

    :raises ConfigurationError: if that is not bytes.
    """
    if not isinstance(value, bytes):
        raise ConfigurationError(f"fingerprint() must return bytes, not {type(value).__name__}.")
    return Fingerprint(CUSTOM, digest("fingerprint", CUSTOM, value)[:_DIGEST_BYTES])


def _query_name(part: bytes) -> bytes:
    # Values of one name stay in order: a view may read only the first.
    return unquote_to_bytes(part.partition(b"=")[0].replace(b"+", b" "))


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


def value_at(document: Any, pointer: str) -> str | None:
    """The value that a pointer names (RFC 6901 section 4), in canonical form; None if it is missing."""
    for escaped in pointer.split("/")[1:]:
        name = escaped.replace("~1", "/").replace("~0", "~")
        if isinstance(document, dict) and name in document:
            document = document[name]
            continue
        is_number = isinstance(document, list) and re.fullmatch("0|[1-9][0-9]{0,9}", name)
        if not is_number or int(name) >= len(document):
            return None
        document = document[int(name)]
    return _canonical(document)
