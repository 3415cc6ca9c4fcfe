"""Keys in a header or of a value, digests of operations, and the age that a key may tell."""

from __future__ import annotations

import json
import re
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flask_idempotency.core.errors import KeyMalformed
from flask_idempotency.core.fingerprint import parse_json, parse_pointer, value_at
from flask_idempotency.core.keys import Scope, birth_of, hash_key, parse_key, scope_tail, uuid7

thoroughly = settings(max_examples=300, deadline=None)

printable = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=255)
latin_1 = st.text(st.characters(max_codepoint=0xFF))
almost_quoted = st.text('"\\,; a\t\x7fé')

ACCEPTED = [
    *((key, key) for key in ("abc", "ABC", "A-Za-z0-9._~:+/=@-", "!#$%&'()*<>?[]^`{|}", "x" * 255)),
    *((value, "abc") for value in ('"abc"', "  abc  ", '  "abc"  ')),
    *((f'"{key}"', key) for key in (" abc ", "a,b;c", " ")),
    (r'"a\"b\\c"', 'a"b\\c'),
    ('"' + r"\"" * 255 + '"', '"' * 255),
]

TWICE = "contains a comma.*sent twice"
REFUSED = [
    *((value, "is empty") for value in ("", "   ", '""')),
    *((value, "longer than 255 characters") for value in ("x" * 256, f'"{"x" * 256}"', "x" * 8100)),
    *((value, TWICE) for value in ("a,b", "a, a", ",", '"a","b"', '"a" , "a"')),
    *(
        (value, "not allowed there")
        for value in ('"abc', '"', 'abc"', r'"a\x"', '"a\\"', r"a\b", '"abc";p=1', "abc;p=1", '"a"b')
    ),
    *((value, "not allowed there") for value in ("a b", "a\tb", '"a\tb"', "a\x00b", "a\r\nb", "abc\n")),
    *((value, "not allowed there") for value in ("a\x7fb", "clé", '"clé"', "\xa0")),
]


def quote(key: str) -> str:
    return '"' + key.replace("\\", r"\\").replace('"', r"\"") + '"'


def refusal(value: str) -> str | None:
    try:
        parse_key(value)
    except KeyMalformed as problem:
        return problem.detail
    return None


@pytest.mark.parametrize(("value", "key"), ACCEPTED)
def test_a_well_formed_value_gives_its_key(value: str, key: str) -> None:
    assert parse_key(value) == key


@pytest.mark.parametrize(("value", "fault"), REFUSED)
def test_a_malformed_value_is_refused_with_what_is_wrong_and_what_is_allowed(
    value: str, fault: str
) -> None:
    with pytest.raises(KeyMalformed, match=fault) as refused:
        parse_key(value)
    assert "Allowed: 1 to 255 characters" in refused.value.detail


@thoroughly
@given(printable)
def test_every_printable_key_parses_to_itself_quoted_and_most_do_bare(key: str) -> None:
    assert parse_key(quote(key)) == key
    if not set(key) & set(' ,;"\\'):
        assert parse_key(key) == key


@thoroughly
@given(latin_1 | almost_quoted)
def test_any_text_is_a_key_in_the_alphabet_or_refused_by_a_fixed_sentence(value: str) -> None:
    """So no refusal contains the key."""
    detail = refusal(value)
    if detail is None:
        assert re.fullmatch(r"[ -~]{1,255}", parse_key(value))
    else:
        assert detail in {refusal(malformed) for malformed, _ in REFUSED}


parts = st.sampled_from(["", "1", "a", "a:", ":a", "acme", "acme:eu", "eu:42", "42", "n0:", "i1:1"])
scopes: st.SearchStrategy[Scope] = st.one_of(
    st.none(), st.integers(-2, 2), parts, st.sampled_from([UUID(int=0), UUID(int=1)])
)
operations = st.tuples(parts | st.text(), parts | st.text(), scopes | st.text(), parts | st.text())


@thoroughly
@given(operations, operations)
def test_hashes_are_alike_and_end_alike_exactly_if_operations_and_their_scopes_are_the_same(
    one: tuple[str, str, Scope, str], other: tuple[str, str, Scope, str]
) -> None:
    same = one[2] == other[2] and type(one[2]) is type(other[2])
    assert (hash_key(*one) == hash_key(*other)) is (same and one == other)
    assert (hash_key(*one)[-7:] == hash_key(*other)[-7:]) is same
    assert hash_key(*one).endswith(scope_tail(one[2]))


def test_parts_that_look_alike_when_joined_stay_apart() -> None:
    keys: list[tuple[Scope, str]] = [("acme", "eu:42"), ("acme:eu", "42"), ("ab", "c"), ("a", "bc")]
    keys += [(scope, "k") for scope in (None, "", 1, -1, "1", UUID(int=1), str(UUID(int=1)))]
    operations = [("", "pay", *key) for key in keys]
    operations += [(*name, None, "k") for name in (("v1", "pay"), ("", "v1pay"), ("v", "1pay"))]
    assert len({hash_key(*operation)[:16] for operation in operations}) == len(operations)


def test_hashes_of_stored_keys_never_change() -> None:
    stored = hash_key("v1", "payments.create", UUID(int=42), "8e03978e-40d5-43dd-bc93-6894a57f9324")
    assert stored.hex() == "86de7cf71f42dfda459214fee0e9fe2faea389a466cfa3"


@pytest.mark.parametrize(
    ("key", "birth"),
    [
        ("017f22e2-79b0-7cc3-98c4-dc0c0c07398f", 1645557742.0),  # RFC 9562, appendix A.6
        ("017F22E2-79B0-7CC3-98C4-DC0C0C07398F", 1645557742.0),
        ("00000000-0000-7000-8000-000000000000", 0.0),
        ("017f22e2-79b0-4cc3-98c4-dc0c0c07398f", None),  # of version 4
        ("017f22e2-79b0-7cc3-d8c4-dc0c0c07398f", None),  # of another variant
        ("017f22e279b07cc398c4dc0c0c07398f", None),
        ("pay-017f22e2-79b0-7cc3-98c4-dc0c0c07398f", None),
        ("017f22e2-79b0-7cc3-98c4-dc0c0c07398f\n", None),
        ("order-1", None),
        ("", None),
    ],
)
def test_a_uuid_of_version_7_says_when_it_was_made_and_no_other_key_does(key, birth):
    assert birth_of(key) == birth


def test_a_uuid_of_version_7_is_its_time_and_what_stands_behind_it():
    made = uuid7(0x017F22E279B0, bytes.fromhex("fcc3d8c4dc0c0c07398f"))
    assert made == "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"


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
