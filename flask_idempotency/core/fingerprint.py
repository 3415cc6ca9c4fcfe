"""Is this the same request again? Fingerprints tell, without storing the request.

Each algorithm has a code that is stored beside its digest. What an algorithm digests may never change
under its code: after a deployment, every live key would get 422.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn
from urllib.parse import unquote_to_bytes

from .errors import BodyMalformed, ConfigurationError, shown
from .keys import Part, digest, encoded

REQUEST: Final = 1  # 2 and 3 were JSON and FIELDS with another canonical form
CUSTOM: Final = 4
JSON: Final = 5
FIELDS: Final = 6

_CODES: Final = 16
"""The algorithms' codes are below this. The code of one that was given a list of pointers is that plus
this times a number from 1 to :data:`_LISTS`, which stands for the list: see :func:`by_fields`."""

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
class FormPart:
    """One part of a multipart body.

    ``filename`` is None for a plain field, ``name`` for a part without one; ``sha256`` is the digest of
    the content.
    """

    name: str | None
    filename: str | None
    content_type: str
    sha256: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class RequestParts:
    """What a request is compared by.

    ``host`` is None where it does not matter; ``query`` is raw, without the question mark;
    ``media_type`` is in lower case and without parameters. ``form`` holds the decoded parts of a form
    in order and replaces ``body``: a retry may choose another boundary.
    """

    method: str
    host: str | None
    path: str
    query: bytes | str
    media_type: str
    body: bytes = field(repr=False)
    form: tuple[FormPart, ...] | None = field(default=None, repr=False)


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

    @property
    def origin(self) -> str:
        """What made it, in words for a log line."""
        key_id = self.digest[:-_DIGEST_BYTES]
        return f"version {self.algorithm}" + (f" under key {key_id.hex()}" if key_id else "")


def _mac(data: bytes, key: bytes) -> bytes:
    # Four times as fast as HMAC: this is computed for every request.
    return hashlib.blake2b(data, key=key, digest_size=_DIGEST_BYTES).digest()


def by_request(parts: RequestParts) -> Fingerprint:
    """Digest method, host, path, sorted query, media type and body."""
    return _fingerprint(REQUEST, *_target(parts), parts.media_type, *_content(parts))


def by_json(parts: RequestParts) -> Fingerprint:
    """Like :func:`by_request`, with a JSON body in canonical form.

    Order of members and whitespace do not matter. Numbers are compared as they are written: no rounding
    makes two equal. The bytes of a body count if its media type is not JSON.

    :raises BodyMalformed: if the body is not the JSON it claims to be.
    """
    is_json = _is_json(parts)
    content = ("json", _canonical_json(parts.body)) if is_json else _content(parts)
    return _fingerprint(JSON, *_target(parts), parts.media_type, *content)


def by_fields(parts: RequestParts, fields: Sequence[Pointer]) -> Fingerprint:
    """Digest method, host, path, sorted query, and only some fields of a JSON body.

    A missing field differs from null. The whole body counts if its media type is not JSON. The code is
    one that another list does not have, so those of two lists cannot be compared: a deployment that
    changes a list would otherwise reject the retries of what came before it.

    :raises BodyMalformed: if the body is not the JSON it claims to be.
    """
    if not _is_json(parts):
        content = _content(parts)
    else:
        document, values = parse_json(parts.body), []
        for pointer in sorted(set(fields)):
            value = resolve(document, pointer)
            values.append(digest(pointer.text, None if value is MISSING else _canonical(value)))
        content = "fields", digest(*values)
    found = _fingerprint(FIELDS, *_target(parts), *content)
    names = sorted({pointer.text for pointer in fields})
    number = 1 + int.from_bytes(digest(*names)[:4], "big") % _LISTS
    return Fingerprint(FIELDS + _CODES * number, found.digest)


def by_value(value: bytes) -> Fingerprint:
    """Digest the application's own fingerprint of the request.

    :raises ConfigurationError: if that is not bytes.
    """
    if not isinstance(value, bytes):
        raise ConfigurationError(
            f"The fingerprint callable must return bytes, not {type(value).__name__}."
        )
    return _fingerprint(CUSTOM, value)


def _fingerprint(algorithm: int, *parts: Part) -> Fingerprint:
    *before, content = parts
    head = encoded("fingerprint", algorithm, *before)
    return Fingerprint(algorithm, digest(content, head=head)[:_DIGEST_BYTES])


def _target(parts: RequestParts) -> tuple[str, str | None, str, bytes]:
    query = parts.query
    raw = query.encode("utf-8", "surrogatepass") if isinstance(query, str) else query
    query = digest(*sorted(raw.split(b"&"), key=_query_name)) if raw else _NO_QUERY
    return parts.method, parts.host, parts.path, query


_NO_QUERY: Final = digest(b"")
"""Most requests that write something have no query."""


def _query_name(part: bytes) -> bytes:
    # Values of one name stay in order: a view may read only the first.
    return unquote_to_bytes(part.partition(b"=")[0].replace(b"+", b" "))


def _content(parts: RequestParts) -> tuple[str, bytes]:
    if parts.form is None:
        return "body", parts.body
    return "form", digest(
        *(digest(part.name, part.filename, part.content_type, part.sha256) for part in parts.form)
    )


def _is_json(parts: RequestParts) -> bool:
    media_type = parts.media_type
    is_json = media_type == "application/json" or media_type.endswith("+json")
    return is_json and parts.form is None and parts.body != b""


def parse_json(body: bytes) -> object:
    """Read a JSON body more strictly than Python does.

    A number that is not an integer stays as written, in a tuple that only this module reads.

    :raises BodyMalformed: if it is not UTF-8 or not JSON (RFC 8259), names a member twice, contains NaN
        or Infinity, nests too deeply or has an integer with more digits than Python reads.
    """
    return _decoded(_STRICT, body, _text(body))


def _canonical_json(body: bytes) -> str:
    """The one text of all JSON bodies that mean the same. Raises what :func:`parse_json` raises.

    Only the parts of ``json`` written in C work here; a function of ours for each object and each
    integer would double the time. The text shows what these would notice: a member that is named twice
    loses a colon, and ``-0`` is rare enough for a closer look.
    """
    text = _text(body)
    canonical = _canonical(_decoded(_QUICK, body, text))
    if canonical.count(":") != text.count(":") or "\\u003" in text or _MINUS_ZERO.search(text):
        canonical = _canonical(_decoded(_STRICT, body, text))
    return canonical


def _text(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BodyMalformed("The JSON body is not UTF-8.") from None


def _decoded(decoder: json.JSONDecoder, body: bytes, text: str) -> object:
    try:
        document = decoder.decode(text)
    except RecursionError:
        fault = _TOO_DEEP
    except json.JSONDecodeError as error:
        fault = f"The body is not valid JSON, from line {error.lineno}, column {error.colno}."
    except ValueError:  # from int(), which by default refuses what no view could read either
        fault = "The JSON body has an integer of more than 4300 digits."
    else:
        if _may_be_deep(body) and _is_deep(document):
            raise BodyMalformed(_TOO_DEEP)
        return document
    raise BodyMalformed(fault)


_TOO_DEEP = f"The JSON body is nested too deeply; at most {MAX_DEPTH} levels are allowed."

_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


def _may_be_deep(body: bytes) -> bool:
    """Return True if its brackets, also those in strings, nest in more than ``MAX_DEPTH`` levels.

    Strings made for that may hide levels; Python's own limit remains.
    """
    brackets = body.translate(_SQUARE, _NO_BRACKET)
    levels = 0
    while brackets and levels < MAX_DEPTH:
        brackets, levels = brackets.replace(b"[]", b""), levels + 1
    return bool(brackets)


def _is_deep(document: object) -> bool:
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
    return any(isinstance(value, dict | list) for value in level)


def _children(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise BodyMalformed("The JSON body names a member of an object twice.")
    return members


def _as_written(text: str) -> tuple[float, str]:
    # JSON has no NaN, so no array of a body is encoded like this.
    return math.nan, text


def _integer(text: str) -> object:
    return int(text) if text != "-0" else _as_written(text)


def _constant(text: str) -> NoReturn:
    raise BodyMalformed(f"The JSON body contains {text}, which is not JSON.")


_QUICK = json.JSONDecoder(parse_float=_as_written, parse_constant=_constant)
_STRICT = json.JSONDecoder(
    object_pairs_hook=_members,
    parse_float=_as_written,
    parse_int=_integer,
    parse_constant=_constant,
)
_MINUS_ZERO = re.compile(r"-0\s*(?:[,\]}]|$)")
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), check_circular=False)


def _canonical(document: object) -> str:
    try:
        return _ENCODER.encode(document)
    except RecursionError:
        raise BodyMalformed(_TOO_DEEP) from None


@dataclass(frozen=True, slots=True, order=True)
class Pointer:
    """A JSON pointer, parsed: where in a document to look."""

    text: str
    tokens: tuple[str, ...]


def parse_pointer(text: str) -> Pointer:
    """Read a JSON pointer such as ``/order/id`` (RFC 6901 section 3); ``""`` is the whole body.

    :raises ConfigurationError: if it is not one.
    """
    if not re.fullmatch(r"(?:/(?:[^~/]|~[01])*)*", str(text)):
        raise ConfigurationError(
            f"{shown(text)} is not a JSON pointer (RFC 6901): write a slash before every name, as in "
            "'/order/id', and within a name ~1 for a slash and ~0 for a tilde."
        )
    tokens = (token.replace("~1", "/").replace("~0", "~") for token in text.split("/")[1:])
    return Pointer(text, tuple(tokens))


def resolve(document: object, pointer: Pointer) -> object:
    """Find the value a pointer names (RFC 6901 section 4), or :data:`MISSING`."""
    for token in pointer.tokens:
        match document:
            case dict():
                document = document.get(token, MISSING)
            case list() if _has_item(document, token):
                document = document[int(token)]
            case _:
                return MISSING
    return document


def _has_item(items: list[object], token: str) -> bool:
    return bool(re.fullmatch("0|[1-9][0-9]{0,9}", token)) and int(token) < len(items)
