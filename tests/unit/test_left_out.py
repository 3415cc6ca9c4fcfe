"""What a fingerprint leaves out, and nothing beside it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flask_idempotency.core.errors import BodyMalformed
from flask_idempotency.core.fingerprint import Fingerprint, by_fields, by_json, by_request
from tests.unit.payments import FORM, PAYMENT, UPLOAD, names, of_json, part

thoroughly = settings(max_examples=200, deadline=None)
scalars = st.sampled_from([None, True, 0, 1, 1.5, "", "0", "a"])
tokens = st.sampled_from(["a", "b", "0", "1", "a/b", "~", ""])
documents = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(tokens, inner, max_size=4),
    max_leaves=12,
)


def without(body: str, *texts: str, by_value: bool = False) -> Fingerprint:
    return by_json(of_json(body), names(*texts), by_value=by_value)


def document_without(document: Any, *texts: str, by_value: bool = False) -> Fingerprint:
    return without(json.dumps(document), *texts, by_value=by_value)


def places(document: Any, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The path of every member and item."""
    pairs: list[tuple[str, Any]] = []
    if isinstance(document, dict):
        pairs = [*document.items()]
    elif isinstance(document, list):
        pairs = [(str(index), item) for index, item in enumerate(document)]
    found = [(*above, name) for name, _ in pairs]
    return found + [place for name, value in pairs for place in places(value, (*above, name))]


def text_of(place: tuple[str, ...]) -> str:
    return "".join("/" + token.replace("~", "~0").replace("/", "~1") for token in place)


def put(document: Any, place: tuple[str, ...], value: object) -> Any:
    document = copy.deepcopy(document)
    at = document
    for token in place[:-1]:
        at = at[int(token) if isinstance(at, list) else token]
    at[int(place[-1]) if isinstance(at, list) else place[-1]] = value
    return document


@thoroughly
@given(st.data(), documents, documents, st.booleans())
def test_a_change_does_not_count_if_and_only_if_it_is_below_a_pointer(
    data: st.DataObject, document: Any, value: Any, by_value: bool
) -> None:
    known = places(document)
    assume(known)
    excluded = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=3))
    changed = data.draw(st.sampled_from(known))
    other = put(document, changed, value)
    pointers = [text_of(place) for place in excluded]
    one, two = (document_without(each, *pointers, by_value=by_value) for each in (document, other))
    same = one == two
    if any(changed[: len(place)] == place for place in excluded):
        assert same
    elif not any(place[: len(changed)] == changed for place in excluded):
        assert same is (json.dumps(document, sort_keys=True) == json.dumps(other, sort_keys=True))


@thoroughly
@given(documents, st.lists(tokens, max_size=3))
def test_a_pointer_that_finds_nothing_changes_nothing(document: Any, place: list[str]) -> None:
    missing = (*place, "missing")
    assert document_without(document, text_of(missing)).digest == document_without(document).digest


def test_a_missing_member_is_like_any_other_value_of_it() -> None:
    bodies = [{"n": 1}, {"n": 1, "at": None}, {"at": [1, {}], "n": 1}]
    assert len({document_without(body, "/at") for body in bodies}) == 1


@pytest.mark.parametrize(
    ("pointers", "left"),
    [
        (["/0"], [1, 2, 3]),
        (["/0", "/1"], [2, 3]),
        (["/2", "/0", "/3"], [1]),
        (["/1", "/1"], [0, 2, 3]),
        (["/-"], [0, 1, 2, 3]),
        (["/00", "/01", "/4", "/+1", "/ 1"], [0, 1, 2, 3]),
    ],
)
def test_items_are_counted_before_anything_is_removed(pointers: list[str], left: list[int]) -> None:
    assert document_without([0, 1, 2, 3], *pointers).digest == document_without(left).digest


def test_the_tenth_item_comes_after_the_second() -> None:
    document = [{"n": number, "at": number} for number in range(12)]
    left = [each for each in document if each["n"] != 2]
    left[9] = {"n": 10}
    assert document_without(document, "/10/at", "/2").digest == document_without(left).digest
    assert document_without(document, "/2", "/2/at", "/10/at").digest == document_without(left).digest


def test_what_is_left_must_be_json_and_so_must_what_is_left_out() -> None:
    for body in ('{"at":1,"at":2}', '{"at":NaN}', "{", "[" * 250 + "]" * 250):
        with pytest.raises(BodyMalformed):
            without(body, "/at")


def test_a_pointer_removes_nothing_from_other_bodies() -> None:
    for text in ('{"at":1}', '{"at":2}'):
        body = of_json(text, media_type="text/plain")
        assert by_json(body, names("/at")).digest == by_json(body).digest


@pytest.mark.parametrize("by_value", [True, False])
def test_numbers_that_are_left_are_compared_as_ever(by_value: bool) -> None:
    one, other = (without(f'{{"n":{n},"at":{n}}}', "/at", by_value=by_value) for n in ("1", "1.0"))
    assert (one == other) is by_value


QUERY = names("query:at")


@pytest.mark.parametrize(
    ("query", "left"),
    [
        (b"a=1&at=5", b"a=1"),
        (b"at=5&a=1&at=6&at", b"a=1"),
        (b"a=1&%61t=5", b"a=1"),
        (b"at=5", b""),
        ("at=5&a=1", "a=1"),
        (b"att=5&a=at&At=5", b"att=5&a=at&At=5"),
        (b"", b""),
    ],
)
def test_a_parameter_of_the_query_is_left_out_each_time_it_occurs(
    query: bytes | str, left: bytes | str
) -> None:
    for fingerprint in (by_request, by_json):
        found = fingerprint(replace(PAYMENT, query=query), QUERY)
        assert found.digest == fingerprint(replace(PAYMENT, query=left)).digest


def test_names_are_compared_decoded() -> None:
    for text, name in ((b"a+b=1", "a b"), (b"%C3%BC=1", "ü"), (b"a%26b=1", "a&b")):
        found = by_request(replace(PAYMENT, query=text), names(f"query:{name}"))
        assert found.digest == by_request(replace(PAYMENT, query=b"")).digest


def test_a_field_of_an_urlencoded_form_is_left_out_and_no_parameter_of_the_query() -> None:
    form = replace(PAYMENT, media_type="application/x-www-form-urlencoded", query=b"at=1")
    one, other, changed = (
        by_request(replace(form, body=body), names("form:at"))
        for body in (b"a=1&at=5", b"at=6&a=1", b"a=2&at=5")
    )
    assert one == other != changed
    assert one.digest == by_request(replace(form, body=b"a=1")).digest
    assert one != by_request(replace(form, body=b"a=1", query=b"at=2"), names("form:at"))
    text = replace(form, media_type="text/plain", body=b"at=5")
    assert by_request(text, names("form:at")).digest == by_request(text).digest


@pytest.mark.parametrize("name", ["note", "file"])
def test_a_part_of_a_multipart_form_is_left_out(name: str) -> None:
    left = tuple(each for each in FORM if each.name != name)
    for form in (FORM, left, (*FORM, part(name, b"more", "b.txt"))):
        found = by_request(replace(UPLOAD, form=form), names(f"form:{name}"))
        assert found.digest == by_request(replace(UPLOAD, form=left)).digest


def of_list(*texts: str, exclude: tuple[str, ...] = (), **headers: str | None) -> Fingerprint:
    values = {f"header:{name}": value for name, value in headers.items()}
    return by_fields(PAYMENT, names(*texts, *values), values, names(*exclude))


def test_a_header_is_compared_beside_fields() -> None:
    found = [of_list("/n", Prefer=value) for value in (None, "", "a", "b", "null")]
    assert len({each.digest for each in found}) == len(found)
    assert len({each.algorithm for each in found}) == 1
    assert of_list("/n", A="1", B="2") != of_list("/n", A="2", B="1")
    assert of_list("", Prefer="a") != by_fields(
        replace(PAYMENT, body=b'{"n":1,"m":1}'), names("", "header:Prefer"), {"header:Prefer": "a"}
    )


def test_a_header_counts_whatever_the_body_is() -> None:
    text = replace(PAYMENT, media_type="text/plain")
    one, other = (by_fields(text, names("", "header:A"), {"header:A": value}) for value in "ab")
    assert one.matches(other) is False


LISTS = [
    by_request(PAYMENT),
    by_request(PAYMENT, QUERY),
    by_request(PAYMENT, names("form:at")),
    by_request(PAYMENT, names("form:at", "query:at")),
    without("{}", "/at"),
    without("{}", "/at", "/by"),
    without("{}", "/at", by_value=True),
    of_list("/n"),
    of_list("/at"),
    of_list("/n", "/at"),
    of_list("/n", Prefer="1"),
    of_list("/n", exclude=("query:at",)),
    of_list("query:at", "/n"),
]


def test_what_was_compared_with_other_lists_cannot_be_compared() -> None:
    for one in LISTS:
        assert [one.matches(other) for other in LISTS].count(None) == len(LISTS) - 1


def test_the_order_of_a_list_does_not_matter() -> None:
    assert by_request(PAYMENT, names("query:a", "form:b")) == by_request(
        PAYMENT, names("form:b", "query:a", "form:b")
    )


@given(st.lists(st.text(), min_size=1, max_size=5))
def test_every_code_fits_a_smallint_and_is_no_algorithms_own(texts: list[str]) -> None:
    for made in (by_request(PAYMENT, names(*(f"form:{text}" for text in texts))), of_list(*["/n"])):
        assert 16 < made.algorithm < 2**15


def test_codes_of_lists_never_change() -> None:
    pinned = [(each.algorithm, each.digest.hex()[:8]) for each in (LISTS[1], LISTS[5], LISTS[10])]
    assert pinned == [(29697, "919c0ab1"), (2885, "f1a513ad"), (16710, "74c6b2e4")]
