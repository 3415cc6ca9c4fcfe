"""Is this the same request again? Fingerprints tell, without keeping the request.

Each algorithm has a version code that is stored beside its digest. What an algorithm digests may
never change under its code: every live key would answer 422 after a deploy.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NoReturn
from urllib.parse import unquote_to_bytes

from ..errors import BodyMalformed, ConfigurationError, KeyMalformed
from .keys import Part, digest

REQUEST: Final = 1
JSON: Final = 2
FIELDS: Final = 3
CUSTOM: Final = 4

MAX_DEPTH: Final = 200
"""Levels of nesting in a JSON body. Far beyond real bodies, and two stack frames a level stay
well below Python's limit of 1000, so that a body is not read today and refused tomorrow."""

MAX_DIGITS: Final = 4300
"""Digits of an integer in a JSON body: Python's own limit, beyond which no view could read it."""

_DIGEST_BYTES: Final = 32

MISSING: Final = object()
"""What :func:`resolve` gives for a member that is not there; null is None."""


@dataclass(frozen=True, slots=True)
class FormPart:
    """One part of a multipart body.

    ``filename`` is None for a plain field; ``sha256`` is the digest of the content.
    """

    name: str
    filename: str | None
    content_type: str
    sha256: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class RequestParts:
    """What a request is compared by.

    ``host`` is None where it does not matter; ``query`` is raw, without the question mark;
    ``media_type`` is in lower case and without parameters. ``form`` holds the decoded parts of a
    form in their order and stands for ``body`` then: a retry may choose another boundary.
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
    ``older`` is the same request under the other keys, and is not stored.
    """

    version: int
    digest: bytes = field(repr=False)
    older: tuple[bytes, ...] = field(default=(), repr=False, compare=False)

    def keyed(self, keys: Iterable[tuple[bytes, bytes]]) -> Fingerprint:
        """The same under secret keys, as pairs of id and key, newest first (BLAKE2b, RFC 7693).

        Without a key a digest keeps no secret: who reads it can try all requests there may have been.
        """
        digests = [key_id + _mac(self.digest, key) for key_id, key in keys]
        return Fingerprint(self.version, digests[0], tuple(digests[1:]))

    def matches(self, stored: Fingerprint) -> bool | None:
        """Say whether both are of the same request, in constant time.

        :return: None if they cannot be compared, as another algorithm or a key that is not known here
            made the stored one.
        """
        if self.version == stored.version:
            for digest in (self.digest, *self.older):
                if digest[:-_DIGEST_BYTES] == stored.digest[:-_DIGEST_BYTES]:
                    return hmac.compare_digest(digest, stored.digest)
        return None

    @property
    def origin(self) -> str:
        """What made it, for a log line."""
        key_id = self.digest[:-_DIGEST_BYTES]
        return f"version {self.version}" + (f" under key {key_id.hex()}" if key_id else "")


def _mac(data: bytes, key: bytes) -> bytes:
    # A quarter of the time that HMAC takes: this is computed for every request.
    return hashlib.blake2b(data, key=key, digest_size=_DIGEST_BYTES).digest()


def by_request(parts: RequestParts) -> Fingerprint:
    """Digest method, host, path, sorted query, media type and body."""
    return _fingerprint(REQUEST, *_target(parts), parts.media_type, *_content(parts))


def by_json(parts: RequestParts) -> Fingerprint:
    """Like :func:`by_request`, with a JSON body in canonical form.

    Order of members and whitespace do not matter; numbers are compared as text, so that no
    rounding makes two amounts one. A body that is not JSON by its media type counts as bytes.

    :raises BodyMalformed: if the body is not the JSON it claims to be.
    """
    content = ("json", _canonical(parse_json(parts.body))) if _is_json(parts) else _content(parts)
    return _fingerprint(JSON, *_target(parts), parts.media_type, *content)


def by_fields(parts: RequestParts, pointers: Iterable[Pointer]) -> Fingerprint:
    """Digest method, host, path, sorted query and only some fields of a JSON body.

    A missing field differs from null. A body that is not JSON by its media type has no fields and
    counts as a whole.

    :raises BodyMalformed: if the body is not the JSON it claims to be.
    """
    if not _is_json(parts):
        return _fingerprint(FIELDS, *_target(parts), *_content(parts))
    document, fields = parse_json(parts.body), []
    for pointer in sorted(set(pointers)):
        value = resolve(document, pointer)
        fields.append(digest(pointer.text, None if value is MISSING else _canonical(value)))
    return _fingerprint(FIELDS, *_target(parts), "fields", digest(*fields))


def by_value(value: bytes) -> Fingerprint:
    """Digest what the application says the request is.

    :raises ConfigurationError: if that is not bytes.
    """
    if not isinstance(value, bytes):
        raise ConfigurationError(
            f"The fingerprint callable must return bytes, not {type(value).__name__}."
        )
    return _fingerprint(CUSTOM, value)


def _fingerprint(version: int, *parts: Part) -> Fingerprint:
    return Fingerprint(version, digest("fingerprint", version, *parts))


def _target(parts: RequestParts) -> tuple[str, str | None, str, bytes]:
    query = parts.query
    raw = query.encode("utf-8", "surrogatepass") if isinstance(query, str) else query
    return parts.method, parts.host, parts.path, digest(*sorted(raw.split(b"&"), key=_query_name))


def _query_name(part: bytes) -> bytes:
    # Values of one name stay in order: a view that reads the first of them can tell.
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


_TOO_DEEP = f"The JSON body is nested too deep; at most {MAX_DEPTH} levels are allowed."


@dataclass(frozen=True, slots=True)
class Number:
    """A JSON number as it was written: 1.0 is not 1, and no digit is lost."""

    text: str


def parse_json(body: bytes) -> object:
    """Read a JSON body more strictly than Python does, with every number as :class:`Number`.

    :raises BodyMalformed: if it is not UTF-8 or not JSON (RFC 8259), names a member twice, holds
        NaN or Infinity, nests too deep or has an integer of more than ``MAX_DIGITS`` digits.
    """
    try:
        return _DECODER.decode(body.decode("utf-8-sig"))
    except UnicodeDecodeError:
        fault = "The JSON body is not UTF-8."
    except RecursionError:
        fault = _TOO_DEEP
    except json.JSONDecodeError as error:
        fault = f"The body is not valid JSON, from line {error.lineno}, column {error.colno}."
    raise BodyMalformed(fault)


def _members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise BodyMalformed("The JSON body names a member of an object twice.")
    return members


def _integer(text: str) -> Number:
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise BodyMalformed(f"The JSON body has an integer of more than {MAX_DIGITS} digits.")
    return Number(text)


def _constant(text: str) -> NoReturn:
    raise BodyMalformed(f"The JSON body contains {text}, which is not JSON.")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_members, parse_float=Number, parse_int=_integer, parse_constant=_constant
)


def _canonical(value: object, depth: int = 0) -> str:
    if depth > MAX_DEPTH:
        raise BodyMalformed(_TOO_DEEP)
    match value:
        case Number(text):
            return text
        case dict():
            members = (f"{json.dumps(n)}:{_canonical(value[n], depth + 1)}" for n in sorted(value))
            return "{" + ",".join(members) + "}"
        case list():
            return "[" + ",".join(_canonical(item, depth + 1) for item in value) + "]"
        case _:
            return json.dumps(value)


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
            f"{text!r} is not a JSON pointer (RFC 6901): write a slash before every name, as in "
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
            case list() if re.fullmatch("0|[1-9][0-9]{0,9}", token) and int(token) < len(document):
                document = document[int(token)]
            case _:
                return MISSING
    return document


_KINDS = {
    type(None): "null",
    bool: "a boolean",
    dict: "an object",
    list: "an array",
    type(MISSING): "missing",
}


def natural_key(value: object, max_length: int = 255) -> str:
    """Take a value of a JSON body as idempotency key.

    :param value: what :func:`resolve` found.
    :param max_length: the most characters a key may have.
    :return: a string as it is, an integer in decimal; -0 is 0.
    :raises KeyMalformed: if it is neither, empty or too long; the detail never holds it.
    """
    match value:
        case str():
            key = value
        case Number(text) if text.lstrip("-").isdecimal():
            key = "0" if text == "-0" else text
        case int() if not isinstance(value, bool):
            key = str(value)
        case _:
            kind = _KINDS.get(type(value), "a number with a fraction or an exponent")
            raise KeyMalformed(
                "The field that serves as idempotency key must be a string or an integer, "
                f"but is {kind}."
            )
    if not 1 <= len(key) <= max_length:
        raise KeyMalformed(
            f"The field that serves as idempotency key must have 1 to {max_length} characters."
        )
    return key
