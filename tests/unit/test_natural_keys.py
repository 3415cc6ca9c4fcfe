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
    rb'{"foo":["bar","baz"],"":0,"a/b":1,"c%d":2,"e^f":3,"i\\j":5,"k\"l":6," ":7,"m~n":8,"~1":9}'
)


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        ("/foo/0", "bar"),
        ("/", "0"),
        ("/a~1b", "1"),
        ("/c%d", "2"),
        ("/i\\j", "5"),
        ('/k"l', "6"),
        ("/ ", "7"),
        ("/m~0n", "8"),
        ("/~01", "9"),
    ],
)
def test_a_pointer_finds_its_value(pointer: str, value: str) -> None:
    found = value_at(RFC_6901, parse_pointer(pointer))
    assert found is not None
    assert json.loads(found).removeprefix("\ud800\udc00") == value


@pytest.mark.parametrize(
    "pointer",
    [
        "/bar",
        "/foo/2",
        "/foo/-",
        "/foo/-1",
        "/foo/01",
        "/foo/\u0661",
        "/foo/" + "9" * 5000,
        "/foo/0/0",
    ],
)
def test_a_pointer_to_nothing_finds_it_missing(pointer: str) -> None:
    assert value_at(RFC_6901, parse_pointer(pointer)) is None


def test_the_empty_pointer_finds_the_whole_document() -> None:
    whole = value_at(RFC_6901, parse_pointer(""))
    assert whole is not None
    assert json.loads(whole) == RFC_6901


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
        ("true", "neither a string nor an integer"),
        ("1.0", "neither a string nor an integer"),
        ("1e3", "neither a string nor an integer"),
        ("{}", "neither a string nor an integer"),
        ("[1]", "neither a string nor an integer"),
        ('""', "1 to 255 characters"),
        ('"' + "x" * 256 + '"', "1 to 255 characters"),
        ("9" * 256, "1 to 255 characters"),
    ],
)
def test_anything_else_is_refused_as_natural_key(body: str, fault: str) -> None:
    with pytest.raises(KeyMalformed, match=fault):
        natural_key(json.loads(body))
