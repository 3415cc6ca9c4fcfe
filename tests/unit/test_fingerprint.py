from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flask_idempotency.core.fingerprint import (
    MISSING,
    Fingerprint,
    FormPart,
    RequestParts,
    by_fields,
    by_json,
    by_request,
    by_value,
    natural_key,
    parse_json,
    parse_pointer,
    resolve,
)
from flask_idempotency.errors import BodyMalformed, ConfigurationError, KeyMalformed

Algorithm = Callable[[RequestParts], Fingerprint]

thoroughly = settings(max_examples=200, deadline=None)


def of_fields(*pointers: str) -> Algorithm:
    return lambda parts: by_fields(parts, [parse_pointer(pointer) for pointer in pointers])


def part(name: str, content: bytes, filename: str | None = None, kind: str = "") -> FormPart:
    return FormPart(name, filename, kind, hashlib.sha256(content).digest())


def of_json(body: str | bytes, **changes: Any) -> RequestParts:
    raw = body if isinstance(body, bytes) else body.encode()
    return replace(PAYMENT, body=raw, **changes)


PAYMENT = RequestParts("POST", "shop.test", "/pay", b"a=1&b=2", "application/json", b'{"n":1}')
FORM = (part("note", b"hi"), part("file", b"\x00", "a.png", "image/png"), part("n", b"1"))
UPLOAD = replace(PAYMENT, media_type="multipart/form-data", body=b"", form=FORM)
ALGORITHMS = [by_request, by_json, of_fields("/n", "/m")]


@pytest.mark.parametrize("fingerprint", ALGORITHMS)
@pytest.mark.parametrize(
    "change",
    [
        {"method": "PATCH"},
        {"host": "other.test"},
        {"host": None},
        {"host": ""},
        {"path": "/pay/"},
        {"query": b""},
        {"query": b"a=1&b=3"},
        {"query": b"a=1&b=2&c"},
        {"query": b"a=1&b=%32"},
        {"query": b"a=1b=2"},
        {"media_type": "text/plain"},
        {"body": b'{"n":2}'},
        {"body": b'{"n":"1"}'},
        {"body": b""},
        {"form": ()},
        {"form": (part("n", b"1"),)},
    ],
)
def test_each_component_changed_alone_changes_the_fingerprint(
    fingerprint: Algorithm, change: dict[str, Any]
) -> None:
    assert fingerprint(PAYMENT).matches(fingerprint(replace(PAYMENT))) is True
    assert fingerprint(PAYMENT).matches(fingerprint(replace(PAYMENT, **change))) is False


def test_the_media_type_counts_unless_fields_are_chosen() -> None:
    other = replace(PAYMENT, media_type="application/vnd.shop+json")
    assert by_request(PAYMENT) != by_request(other)
    assert by_json(PAYMENT) != by_json(other)
    assert of_fields("/n")(PAYMENT) == of_fields("/n")(other)


@pytest.mark.parametrize("fingerprint", ALGORITHMS)
def test_borders_between_components_count(fingerprint: Algorithm) -> None:
    moved = [("shop.test", "/pay"), ("shop.tes", "t/pay"), ("shop.test/pay", "")]
    moved += [("", "/pay"), ("/pay", "")]
    digests = {fingerprint(replace(PAYMENT, host=h, path=p)).digest for h, p in moved}
    digests.add(fingerprint(replace(PAYMENT, host=None)).digest)
    assert len(digests) == len(moved) + 1


@pytest.mark.parametrize("fingerprint", ALGORITHMS)
def test_the_order_of_query_names_does_not_count_but_that_of_one_names_values_does(
    fingerprint: Algorithm,
) -> None:
    def of(query: bytes | str) -> bytes:
        return fingerprint(replace(PAYMENT, query=query)).digest

    assert of(b"a=1&b=2") == of(b"b=2&a=1") == of("b=2&a=1")
    assert of(b"a=1&b=0&a=2") == of(b"b=0&a=1&a=2")
    assert of(b"a=1&a=2") != of(b"a=2&a=1")
    assert of(b"x+y=1&%78%20y=2") != of(b"%78%20y=2&x+y=1")


@pytest.mark.parametrize("fingerprint", ALGORITHMS)
@pytest.mark.parametrize(
    "form",
    [
        FORM[:2],
        FORM[::-1],
        (part("nota", b"hi"), *FORM[1:]),
        (part("note", b"ho"), *FORM[1:]),
        (part("note", b"hi", ""), *FORM[1:]),
        (part("note", b"hi", None, "text/plain"), *FORM[1:]),
        (part("note", b"hi", "text/plain"), *FORM[1:]),
    ],
)
def test_every_part_of_a_form_counts(fingerprint: Algorithm, form: tuple[FormPart, ...]) -> None:
    assert fingerprint(UPLOAD) != fingerprint(replace(UPLOAD, form=form))


@pytest.mark.parametrize("fingerprint", ALGORITHMS)
def test_a_new_multipart_boundary_does_not_count(fingerprint: Algorithm) -> None:
    assert fingerprint(UPLOAD) == fingerprint(replace(UPLOAD, body=b"--other-boundary\r\n"))


@pytest.mark.parametrize("fingerprint", ALGORITHMS)
def test_a_body_cannot_pass_for_a_form(fingerprint: Algorithm) -> None:
    upload = fingerprint(replace(UPLOAD, form=()))
    assert upload != fingerprint(replace(UPLOAD, form=None))
    assert upload != fingerprint(replace(UPLOAD, form=None, body=hashlib.sha256().digest()))


@pytest.mark.parametrize("fingerprint", ALGORITHMS)
def test_a_body_that_is_not_json_counts_byte_for_byte(fingerprint: Algorithm) -> None:
    text, spaced, broken = (
        fingerprint(of_json(body, media_type="text/plain")) for body in ('{"n":1}', '{"n": 1}', "{")
    )
    assert len({text, spaced, broken}) == 3


scalars = st.sampled_from([None, True, False, 0, 1, -1, 1.0, 1e300, 0.1, "", "1", "null", "é", "😀"])
documents = st.recursive(
    scalars | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from('ab1"é'), inner, max_size=3)
    ),
    max_leaves=6,
)


def rewritten(document: object) -> object:
    if isinstance(document, dict):
        return {name: rewritten(value) for name, value in reversed(document.items())}
    return [rewritten(item) for item in document] if isinstance(document, list) else document


@thoroughly
@given(documents, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_member_order_whitespace_and_escapes_do_not_count_in_canonical_json(
    document: object, indent: int | str | None, escaped: bool
) -> None:
    other = json.dumps(rewritten(document), indent=indent, ensure_ascii=escaped)
    assert by_json(of_json(json.dumps(document))) == by_json(of_json(f" {other}\r\n"))


@thoroughly
@given(documents, documents)
def test_different_values_differ_in_canonical_json(one: object, other: object) -> None:
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    fingerprints = by_json(of_json(json.dumps(one))), by_json(of_json(json.dumps(other)))
    assert (fingerprints[0] == fingerprints[1]) is same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", "1.0"),
        ("1.10", "1.1"),
        ("9007199254740993", "9007199254740992"),
        ("0.1", "0.1000000000000000055511151231257827"),
        ("1e400", "1e401"),
        ("1", "true"),
        ("1", '"1"'),
        ("null", '"null"'),
        ("[]", "{}"),
        ("[[1],2]", "[[1,2]]"),
        ("[1,2]", "[12]"),
        ('{"a":null}', "{}"),
        ('["a,b"]', '["a","b"]'),
        (r'"\ud800"', r'"\udfff"'),
    ],
)
def test_json_values_that_only_look_alike_differ(one: str, other: str) -> None:
    assert by_json(of_json(one)) != by_json(of_json(other))


@pytest.mark.parametrize("fingerprint", [by_json, of_fields("/n")])
@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("{", "not valid JSON, from line 1, column 2"),
        ("\n [1,]", "not valid JSON, from line 2"),
        ("1 2", "not valid JSON"),
        (" ", "not valid JSON"),
        ('"a\nb"', "not valid JSON"),
        ('{"n":1,"n":1}', "names a member of an object twice"),
        (r'[{"n":1,"\u006e":2}]', "names a member of an object twice"),
        ('{"n":NaN}', "contains NaN"),
        ("[Infinity]", "contains Infinity"),
        ("-Infinity", "contains -Infinity"),
        ('{"n":' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deep"),
        ('{"n":' * 100_000 + "1" + "}" * 100_000, "nested too deep"),
        ('{"n":' + "[" * 250 + "]" * 250 + "}", "nested too deep"),
        ("9" * 4301, "integer of more than 4300 digits"),
        (b'{"n":"\xff"}', "not UTF-8"),
        ('{"n":1}'.encode("utf-16"), "not UTF-8"),
    ],
    ids=lambda value: None if len(value) > 99 else repr(value),
)
def test_a_malformed_json_body_is_refused(
    fingerprint: Algorithm, body: str | bytes, fault: str
) -> None:
    with pytest.raises(BodyMalformed, match=fault):
        fingerprint(of_json(body))


@pytest.mark.parametrize(
    "body", ["9" * 4300, "-" + "9" * 4300, "[" * 200 + "]" * 200], ids=["digits", "minus", "depth"]
)
def test_json_at_the_limits_is_accepted(body: str) -> None:
    assert by_json(of_json(body)) == by_json(of_json(body + " "))


def test_a_byte_order_mark_does_not_count() -> None:
    assert by_json(of_json("\ufeff[1]")) == by_json(of_json("[1]"))


def test_only_the_named_fields_count() -> None:
    fingerprint = of_fields("/order/id", "/lines/1")
    one = fingerprint(of_json('{"order":{"id":7,"at":1},"lines":[1,2]}'))
    assert one == fingerprint(of_json('{"lines":[0,2,3],"order":{"at":2,"id":7}}'))
    assert one != fingerprint(of_json('{"order":{"id":8,"at":1},"lines":[1,2]}'))
    assert one != fingerprint(of_json('{"order":{"id":7,"at":1},"lines":[2,1]}'))
    assert one != fingerprint(of_json('{"order":{"id":2,"at":1},"lines":[1,7]}'))


def test_a_missing_field_differs_from_null_and_from_its_neighbour() -> None:
    fingerprint = of_fields("/a", "/b")
    bodies = ["{}", '{"a":null}', '{"b":null}', '{"a":1}', '{"b":1}', '{"a":"null"}', "[]"]
    assert len({fingerprint(of_json(body)) for body in bodies}) == len(bodies) - 1
    assert fingerprint(of_json("{}")) == fingerprint(of_json("[]"))


def test_the_order_in_which_fields_are_named_does_not_count() -> None:
    names = [f"/{name}" for name in "abcdefgn"]
    assert of_fields(*names)(PAYMENT) == of_fields(*reversed(names), "/n")(PAYMENT)


def test_a_custom_value_counts_alone() -> None:
    assert by_value(b"a") == by_value(b"a") != by_value(b"b")
    with pytest.raises(ConfigurationError, match="must return bytes, not str"):
        by_value("a")  # type: ignore[arg-type]


def test_fingerprints_of_two_algorithms_cannot_be_compared() -> None:
    made = [by_request(PAYMENT), by_json(PAYMENT), of_fields("/n")(PAYMENT), by_value(b"n")]
    assert [fingerprint.version for fingerprint in made] == [1, 2, 3, 4]
    assert len({fingerprint.digest for fingerprint in made}) == 4
    for one in made:
        assert [one.matches(other) for other in made].count(None) == 3
    assert made[0].matches(Fingerprint(99, made[0].digest)) is None


def test_stored_fingerprints_never_change_under_their_version() -> None:
    pinned = {
        "919c0ab1cf84ba5a": by_request(PAYMENT),
        "2f54de4cb3d0ce59": by_request(UPLOAD),
        "fa4cce9a5fc46f29": by_json(PAYMENT),
        "a5e954a44ef6b09a": of_fields("/n", "/c", "/b", "/a")(PAYMENT),
        "116549e601594c2a": by_value(b"n"),
    }
    assert [fingerprint.digest.hex()[:16] for fingerprint in pinned.values()] == list(pinned)


def test_neither_a_body_nor_a_digest_shows_in_a_repr() -> None:
    assert repr(PAYMENT) == (
        "RequestParts(method='POST', host='shop.test', path='/pay', query=b'a=1&b=2',"
        " media_type='application/json')"
    )
    assert repr(part("note", b"hi")) == "FormPart(name='note', filename=None, content_type='')"
    assert repr(by_request(PAYMENT)) == "Fingerprint(version=1)"


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
    assert natural_key(resolve(RFC_6901, parse_pointer(pointer))) == value


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
    assert resolve(RFC_6901, parse_pointer(pointer)) is MISSING


def test_the_empty_pointer_finds_the_whole_document() -> None:
    assert resolve(RFC_6901, parse_pointer("")) is RFC_6901


@pytest.mark.parametrize("pointer", ["foo", "#/foo", "/a~", "/a~2", "foo/", " /foo", None, 1])
def test_a_bad_pointer_is_a_mistake_in_the_application(pointer: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a JSON pointer.*'/order/id'"):
        parse_pointer(pointer)


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ('"A-7"', "A-7"),
        ('"é"', "é"),
        ("42", "42"),
        ("-1", "-1"),
        ('"' + "x" * 255 + '"', "x" * 255),
    ],
)
def test_a_string_or_an_integer_serves_as_natural_key(body: str, key: str) -> None:
    assert natural_key(parse_json(body.encode())) == key
    assert natural_key(json.loads(body)) == key


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("null", "but is null"),
        ("true", "but is a boolean"),
        ("1.0", "but is a number with a fraction"),
        ("1e3", "but is a number with a fraction or an exponent"),
        ("{}", "but is an object"),
        ("[1]", "but is an array"),
        ('""', "1 to 255 characters"),
        ('"' + "x" * 256 + '"', "1 to 255 characters"),
        ("9" * 256, "1 to 255 characters"),
    ],
)
def test_anything_else_is_refused_as_natural_key(body: str, fault: str) -> None:
    for value in (parse_json(body.encode()), json.loads(body)):
        with pytest.raises(KeyMalformed, match=fault):
            natural_key(value)


def test_a_missing_field_is_refused_as_natural_key() -> None:
    with pytest.raises(KeyMalformed, match="but is missing"):
        natural_key(resolve(RFC_6901, parse_pointer("/order_id")))
