"""Writes into a record of the store ``redis``, past the extension."""

from __future__ import annotations

import json
from typing import Any

import redis

VERSION_BYTES = 22


def rewrite(client: redis.Redis, place: bytes, /, *, body: bytes | None = None, **fields: Any) -> None:
    """Give the record at a place other ``fields``, and another body."""
    value: Any = client.get(place)
    head, _, stored = value[VERSION_BYTES:].partition(b"\n")
    changed = json.dumps(json.loads(head) | fields).encode()
    client.set(place, value[:VERSION_BYTES] + changed + b"\n" + (stored if body is None else body))
