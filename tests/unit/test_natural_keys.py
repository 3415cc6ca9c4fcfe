"""Pointers into a JSON body, and which values of a request serve as keys."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import pytest

from flask_idempotency.core.errors import ConfigurationError, KeyMalformed
from flask_idempotency.core.fingerprint import parse_json, parse_pointer, value_at
from flask_idempotency.core.keys import natural_key

RFC_6901 = parse_json(
    rb'{"foo":["bar","x"],"":"0","a/b":"1","c%d":"2","i\\j":"5","k\"l":"6"," ":"7","m~n":"8","~1":"9"}'
)


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        ("", RFC_6901),
        *{"/foo/0": "bar", "/": "0", "/a~1b": "1", "/c%d": "2", "/i\\j": "5", '/k"l': "6"}.items(),
        *{"/ ": "7", "/m~0n": "8", "/~01": "9"}.items(),
        *dict.fromkeys(["/bar", "/foo/2", "/foo/-", "/foo/-1", "/foo/01", "/foo/\u0661"]).items(),
        *dict.fromkeys(["/foo/" + "9" * 5000, "/foo/0/0"]).items(),
    ],
)
def test_a_pointer_finds_its_value_or_finds_it_missing(pointer: str, value: Any) -> None:
    found = value_at(RFC_6901, parse_pointer(pointer))
    assert (None if found is None else json.loads(found)) == value


@pytest.mark.parametrize("pointer", ["foo", "#/foo", "/a~", "/a~2", "foo/", " /foo", None, 1])
def test_a_bad_pointer_is_a_mistake_in_the_application(pointer: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a JSON pointer.*'/order/id'"):
        parse_pointer(pointer)


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("A-7", "A-7"),
        ("é", "é"),
        (42, "42"),
        (-1, "-1"),
        (0, "0"),
        ("x" * 255, "x" * 255),
        (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
    ],
)
def test_a_string_an_integer_or_a_uuid_serves_as_natural_key(value: object, key: str) -> None:
    assert natural_key(value) == key


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        *((body, "neither a string nor an integer") for body in ("true", "1.0", "1e3", "{}", "[1]")),
        *((body, "1 to 255 characters") for body in ('""', '"' + "x" * 256 + '"', "9" * 256)),
    ],
)
def test_anything_else_is_refused_as_natural_key(body: str, fault: str) -> None:
    with pytest.raises(KeyMalformed, match=fault):
        natural_key(json.loads(body))
