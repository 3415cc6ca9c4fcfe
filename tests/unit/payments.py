"""A request for a payment, an upload, and the ways to make a fingerprint of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flask_idempotency.core.fingerprint import (
    Fingerprint,
    RequestParts,
    by_parts,
    parse_pointer,
)

Algorithm = Callable[[RequestParts], Fingerprint]


def by_request(parts: RequestParts) -> Fingerprint:
    return by_parts(parts, "request")


def by_json(parts: RequestParts) -> Fingerprint:
    return by_parts(parts, "json")


def of_fields(*pointers: str) -> Algorithm:
    return lambda parts: by_parts(parts, [parse_pointer(pointer) for pointer in pointers])


def file(name: str, content: bytes, filename: str | None, kind: str | None) -> tuple[Any, ...]:
    return name, filename, kind, hashlib.sha256(content).digest()


def of_json(body: str | bytes, **changes: Any) -> RequestParts:
    raw = body if isinstance(body, bytes) else body.encode()
    return replace(PAYMENT, body=raw, **changes)


PAYMENT = RequestParts("POST", "shop.test", "/pay", b"a=1&b=2", "application/json", b'{"n":1}')
FORM = (("note", "hi"), ("n", "1"), file("scan", b"\x00", "a.png", "image/png"))
UPLOAD = replace(PAYMENT, media_type="multipart/form-data", body=b"", form=FORM)
ALGORITHMS = [by_request, by_json, of_fields("/n", "/m")]
