"""Writes into a record of the store ``redis``, past the extension."""

from __future__ import annotations

import json
from typing import Any

import redis


def rewrite(client: redis.Redis, place: bytes, /, *, body: bytes | None = None, **fields: Any) -> None:
    """Give the record at a place other ``fields``, and another body."""
    value: Any = client.get(place)
    head, _, stored = value.partition(b"\n")
    changed = json.dumps(json.loads(head) | fields).encode()
    client.set(place, changed + b"\n" + (stored if body is None else body))
