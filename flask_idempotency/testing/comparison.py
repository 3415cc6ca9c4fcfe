"""Compares two responses, and makes a request that differs from another."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from typing import Any

from werkzeug.test import TestResponse

SHOWN_BYTES = 200
"""How much of a body a message shows: enough for a problem's detail."""


def shown(response: TestResponse) -> str:
    """A response's status, and the beginning of its body."""
    return f"{response.status_code} {_text(response.get_data())}".rstrip()


def differences(first: TestResponse, other: TestResponse, ignored: Collection[str]) -> list[str]:
    """List what differs between the two responses, a line for each."""
    found = []
    if first.status_code != other.status_code:
        found.append(f"status: first {shown(first)}, then {shown(other)}")
    before, after = _lines(first, ignored), _lines(other, ignored)
    if "Cache-Control" not in before and after.get("Cache-Control") == ["no-store"]:
        del after["Cache-Control"]  # every replay says so, where the first response says nothing
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            values = (", ".join(lines.get(name, ["(none)"])) for lines in (before, after))
            found.append("header {}: first {}, then {}".format(name, *values))
    if first.get_data() != other.get_data():
        found += _bodies(first.get_data(), other.get_data())
    return found


def _lines(response: TestResponse, ignored: Collection[str]) -> dict[str, list[str]]:
    headers = response.headers
    lines = {name.title(): headers.getlist(name) for name, _ in headers if name.lower() not in ignored}
    # Flask adds Cookie after a view that has used the session; a replay runs no view.
    vary = [part.strip() for value in lines.pop("Vary", []) for part in value.split(",")]
    if names := [name for name in vary if name.lower() != "cookie"]:
        lines["Vary"] = names
    return lines


def _bodies(first: bytes, other: bytes) -> list[str]:
    """The members that differ, if both are JSON objects; else the two."""
    try:
        before, after = json.loads(first), json.loads(other)
    except ValueError:
        before = after = None
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return [f"body: first {_text(first)}, then {_text(other)}"]
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [
        f"body, {name!r}: first {before.get(name)!r}, then {after.get(name)!r}" for name in names
    ] or [f"body: the same members, but first {_text(first)}, then {_text(other)}"]


def _text(body: bytes) -> str:
    text = body[:SHOWN_BYTES].decode("utf-8", "backslashreplace").strip()
    return text + "…" if len(body) > SHOWN_BYTES else text


def changed_request(kwargs: Mapping[str, Any], unchanged: str) -> dict[str, Any]:
    """The arguments of a request with another body: every value in it is changed.

    The form's field ``unchanged`` is not: it proves where the form is from.
    """
    changed = dict(kwargs)
    data: Any = kwargs.get("data")
    if hasattr(data, "read"):
        data = copy.copy(data).read()
    if kwargs.get("json") is not None:
        changed["json"] = _other(kwargs["json"])
    elif isinstance(data, (str, bytes)):
        changed["data"] = _other_text(data)
    elif data:
        fields = dict(data)
        kept = {unchanged: fields[unchanged]} if unchanged in fields else {}
        changed["data"] = {**_other(fields), **kept}
        if changed["data"] == fields:  # nothing but files
            changed["data"]["changed"] = "x"
    else:
        changed["query_string"] = {"changed": "1"}
    return changed


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str) or value is None:
        return (value or "") + "x"
    if isinstance(value, dict):
        return {name: _other(item) for name, item in value.items()} or {"x": "x"}
    if isinstance(value, list):
        return [_other(item) for item in value] or ["x"]
    return value  # a file


def _other_text(data: str | bytes) -> str | bytes:
    try:
        other = json.dumps(_other(json.loads(data)))
    except ValueError:
        return data + "x" if isinstance(data, str) else data + b"x"
    return other if isinstance(data, str) else other.encode()
