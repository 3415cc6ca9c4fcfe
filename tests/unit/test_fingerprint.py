"""Fingerprints of requests: what counts, and JSON that is equal or only looks so."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flask_idempotency.core.errors import BodyMalformed
from flask_idempotency.core.fingerprint import (
    Fingerprint,
    RequestParts,
    by_parts,
    by_value,
    parse_pointer,
)
from flask_idempotency.core.keys import digest

thoroughly = settings(max_examples=200, deadline=None)

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
    def of(query: bytes) -> bytes:
        return fingerprint(replace(PAYMENT, query=query)).digest

    assert len({of(query) for query in (b"a=1&b=2", b"a=1b=2", b"")}) == 3
    assert of(b"a=1&b=2") == of(b"b=2&a=1")
    assert of(b"a=1&b=0&a=2") == of(b"b=0&a=1&a=2")
    assert of(b"a=1&a=2") != of(b"a=2&a=1")
    assert of(b"x+y=1&%78%20y=2") != of(b"%78%20y=2&x+y=1")


@pytest.mark.parametrize("fingerprint", ALGORITHMS)
@pytest.mark.parametrize(
    "form",
    [
        FORM[:2],
        FORM[::-1],
        (*FORM[:2], file("scan", b"\x01", "a.png", "image/png")),
        (*FORM[:2], file("scan", b"\x00", "a.png", None)),
        (*FORM[:2], file("scan", b"\x00", "image/png", "a.png")),
    ],
)
def test_every_part_of_a_form_counts(fingerprint: Algorithm, form: tuple[Any, ...]) -> None:
    assert fingerprint(UPLOAD) != fingerprint(replace(UPLOAD, form=form))


@pytest.mark.parametrize("fingerprint", ALGORITHMS)
def test_a_new_boundary_of_a_form_does_not_count_and_no_body_passes_for_one(fingerprint) -> None:
    assert fingerprint(UPLOAD) == fingerprint(replace(UPLOAD, body=b"--other-boundary\r\n"))
    body = digest(*(digest(*part) for part in FORM))
    assert fingerprint(UPLOAD) != fingerprint(replace(UPLOAD, form=(), body=body))


def test_fingerprints_of_two_algorithms_cannot_be_compared() -> None:
    made = [by_request(PAYMENT), by_json(PAYMENT), by_value(b"n")]
    assert [fingerprint.algorithm for fingerprint in made] == [7, 10, 4]
    made += [of_fields(*each)(PAYMENT) for each in (["/n"], ["/at"], ["/n", "/at"])]
    assert len({fingerprint.digest for fingerprint in made}) == len(made)
    for one in made:
        assert [one.matches(other) for other in made].count(None) == len(made) - 1
    assert made[0].matches(Fingerprint(99, made[0].digest)) is None


@given(st.lists(st.text("ab0~/é😀").map(lambda name: f"/{name.replace('~', '~0').replace('/', '~1')}")))
def test_the_code_of_a_list_fits_a_smallint_and_is_no_algorithms_own(pointers: list[str]) -> None:
    made = of_fields("/n", *pointers)(PAYMENT)
    assert made == of_fields(*reversed(pointers), "/n", "/n")(PAYMENT)
    assert 16 < made.algorithm < 2**15


def test_stored_fingerprints_never_change_under_their_version() -> None:
    pinned = {
        "13a3ac1debefc186": by_request(PAYMENT),
        "6c9ebdfe7003fa8a": by_request(UPLOAD),
        "46b2540e67127451": by_json(PAYMENT),
        "8736e34f46d51786": of_fields("/n", "/c", "/b", "/a")(PAYMENT),
        "116549e601594c2a": by_value(b"n"),
    }
    assert [fingerprint.digest.hex()[:16] for fingerprint in pinned.values()] == list(pinned)
    assert of_fields("/n", "/m")(PAYMENT).algorithm == 16313


def test_neither_a_body_nor_a_digest_shows_in_a_repr() -> None:
    assert repr(PAYMENT) == (
        "RequestParts(method='POST', host='shop.test', path='/pay', query=b'a=1&b=2',"
        " media_type='application/json')"
    )
    assert repr(by_request(PAYMENT)) == "Fingerprint(algorithm=7)"


OLD, NEW = ((bytes([number]) * 8, bytes([number]) * 32) for number in range(2))


def test_a_keyed_fingerprint_says_nothing_without_its_key() -> None:
    value = by_value(b"0000")
    assert value.digest not in value.keyed([NEW]).digest
    assert value.keyed([(NEW[0], OLD[1])]).matches(value.keyed([NEW])) is False
    assert repr(value.keyed([NEW, OLD])) == repr(value) == "Fingerprint(algorithm=4)"


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


def test_json_values_that_only_look_alike_differ() -> None:
    """As do strings from the numbers that they spell."""
    bodies = ["1", "1.0", "1e2", "1E2", "1e400", "1e401", "0.1", "0.1000000000000000055511151231257827"]
    bodies += ["9007199254740993", "9007199254740992", "0", "-0", '{"a":0}', '{"a":-0}', '{"a":null}']
    bodies += ["true", "null", '"null"', "[]", "{}", "[1,2]", "[12]", '["a,b"]', '["a","b"]']
    bodies += ["1.5", '"1.5"', '["1.5"]', '"\U000100001.5"', r'"\ud800\udc002.5"', '"2.5"', "2.5"]
    bodies += [r'"\ud800"', r'"\udfff"', r'"\udc00\ud8001.5"', r'"\ud800\ud8001.5"']
    assert len({by_json(of_json(body)).digest for body in bodies}) == len(bodies)


@pytest.mark.parametrize("fingerprint", [by_json, of_fields("/n")])
@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("{", "not valid JSON"),
        (" ", "not valid JSON"),
        ('"a\nb"', "not valid JSON"),
        ('{"n":1,"n":1}', "names a member of an object twice"),
        (r'[{"n":1,"\u006e":2}]', "names a member of an object twice"),
        (r'{"a":"\u003a","a":1}', "names a member of an object twice"),
        ('{"n":NaN}', "contains NaN"),
        ("[Infinity]", "contains Infinity"),
        ('{"n":' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"n":' + "[" * 250 + "]" * 250 + "}", "nested too deeply"),
        (b'{"n":"\xff"}', "not valid JSON in UTF-8"),
        ('{"n":1}'.encode("utf-16"), "not valid JSON in UTF-8"),
    ],
    ids=lambda value: None if len(value) > 99 else repr(value),
)
def test_a_malformed_json_body_is_refused(
    fingerprint: Algorithm, body: str | bytes, fault: str
) -> None:
    with pytest.raises(BodyMalformed, match=fault):
        fingerprint(of_json(body))


@pytest.mark.parametrize(("inner", "levels"), [("", 0), ("1.5", 0), ("{}", 1), ('{"a":1}', 1)])
def test_levels_are_counted_whatever_is_in_the_last_one(inner: str, levels: int) -> None:
    around = 200 - levels
    by_json(of_json("[" * around + inner + "]" * around))
    with pytest.raises(BodyMalformed, match="at most 200 levels"):
        by_json(of_json("[" * (around + 1) + inner + "]" * (around + 1)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("\ufeff[1]", "[1]"),
        (r'{"a\u003ab":1}', '{"a:b":1}'),
        (r'{"a":"\\u003a"}', r'{"a":"\u005cu003a"}'),
        ('[-0 ,"-0"]', '[ -0,"-0" ]'),
        ('{"from":"2026-01-05","n":-0.5}', '{"n":-0.5,"from":"2026\\u002d01-05"}'),
    ],
)
def test_json_values_that_only_look_different_are_equal(one: str, other: str) -> None:
    assert by_json(of_json(one)) == by_json(of_json(other))


def test_only_the_named_fields_count() -> None:
    fingerprint = of_fields("/order/id", "/lines/1")
    one = fingerprint(of_json('{"order":{"id":7,"at":1},"lines":[1,2]}'))
    assert one == fingerprint(of_json('{"lines":[0,2,3],"order":{"at":2,"id":7}}'))
    assert one != fingerprint(of_json('{"order":{"id":8,"at":1},"lines":[1,2]}'))
    assert one != fingerprint(of_json('{"order":{"id":7,"at":1},"lines":[2,1]}'))
    assert one != fingerprint(of_json('{"order":{"id":2,"at":1},"lines":[1,7]}'))


def test_a_missing_field_differs_from_null_and_from_its_neighbour() -> None:
    bodies = ["{}", '{"a":null}', '{"b":null}', '{"a":1}', '{"b":1}', '{"a":"null"}']
    fingerprint = of_fields("/a", "/b")
    assert len({fingerprint(of_json(body)) for body in bodies}) == len(bodies)
    assert fingerprint(of_json("{}")) == fingerprint(of_json("[]"))


LARGE = {
    "fractions": "[" + ",".join(["0.1"] * 50_000) + "]",
    "members": "[" + ",".join(['{"a":1}'] * 30_000) + "]",
    "deep": "[" + ",".join(["[" * 190 + "]" * 190] * 600) + "]",
    "quotes": '"' + r"\"" * 500_000 + '"',
    "names": json.dumps(dict.fromkeys(map(str, range(20_000)))),
    "too deep": "[" * 1_000_000,
}


@pytest.mark.parametrize("body", LARGE.values(), ids=LARGE)
def test_no_json_takes_long_to_compare(body: str) -> None:
    request, started = of_json(body), time.process_time()
    with suppress(BodyMalformed):  # what is refused takes time, too
        by_json(request)
    assert time.process_time() - started < 2


def test_no_string_hides_levels() -> None:
    for string in '"]"', '"[[{"', r'"\"]"', r'"\\"', r'"\\\"]"':
        fits, deep = (f"[{string}," * depth + "1" + f",{string}]" * depth for depth in (200, 201))
        assert by_json(of_json(fits)) == by_json(of_json(fits + " "))
        with pytest.raises(BodyMalformed, match="at most 200 levels"):
            by_json(of_json(deep))
