"""Compares two responses, and makes a request that differs from another."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from typing import Any

from werkzeug.test import TestResponse

SHOWN = 200
"""How many characters of a body a message shows: enough for a problem's detail."""

Facts = Mapping[str, Any]
"""What must be the same in each replay, by name."""


def shown(response: TestResponse) -> str:
    """A response's status, and the beginning of its body."""
    return f"{response.status_code} {_text(response.get_data())}".rstrip()


def facts_of(response: TestResponse, ignored: Collection[str]) -> Facts:
    """Status, headers that are not ``ignored``, and the body: also the members of a JSON object."""
    headers = {name.title(): ", ".join(response.headers.getlist(name)) for name, _ in response.headers}
    body = response.get_json(silent=True)
    members = body if isinstance(body, dict) else {}
    return {
        "status": response.status_code,
        **{f"header {name}": headers[name] for name in headers if name.lower() not in ignored},
        **{f"body, {name!r}": value for name, value in members.items()},
        "body": response.get_data(),
    }


def differences(first: Facts, other: Facts) -> list[str]:
    """List what differs, a line for each; the body as a whole only if none of its members does."""
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    if any(name.startswith("body,") for name in names):
        names.remove("body")
    return [
        f"{name}: first {_text(first.get(name, '(none)'))}, then {_text(other.get(name, '(none)'))}"
        for name in names
    ]


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace").strip()
    text = value if isinstance(value, str) else repr(value)
    return text[:SHOWN] + "…" if len(text) > SHOWN else text


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
        changed["data"] = {**_other(fields), **kept, "changed": "x"}  # there may be nothing but files
    else:
        changed["query_string"] = {"changed": "1"}
    return changed


def _other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str() | None:
            return f"{value or ''}x"
        case dict():
            return {name: _other(item) for name, item in value.items()} or {"x": "x"}
        case list():
            return [_other(item) for item in value] or ["x"]
    return value  # a file


def _other_text(data: str | bytes) -> str | bytes:
    try:
        return json.dumps(_other(json.loads(data)))
    except ValueError:
        return data + "x" if isinstance(data, str) else data + b"x"
