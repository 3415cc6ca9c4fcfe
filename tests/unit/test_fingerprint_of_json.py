"""Fingerprints of JSON: equal where the values are, different where they only look alike."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flask_idempotency.core.errors import BodyMalformed
from flask_idempotency.core.fingerprint import by_json, by_request
from tests.unit.payments import ALGORITHMS, PAYMENT, Algorithm, of_fields, of_json

thoroughly = settings(max_examples=200, deadline=None)


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
        ("0", "-0"),
        ("[-0]", "[0]"),
        ('{"a":-0}', '{"a":0}'),
        ("1e2", "1E2"),
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
        ('{"n":' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"n":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
        ('{"n":' + "[" * 250 + "]" * 250 + "}", "nested too deeply"),
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


@pytest.mark.parametrize(("inner", "levels"), [("", 0), ("1.5", 0), ("{}", 1), ('{"a":1}', 1)])
def test_levels_are_counted_whatever_is_in_the_last_one(inner: str, levels: int) -> None:
    around = 200 - levels
    by_json(of_json("[" * around + inner + "]" * around))
    with pytest.raises(BodyMalformed, match="at most 200 levels"):
        by_json(of_json("[" * (around + 1) + inner + "]" * (around + 1)))


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


def invoice(lines: int) -> bytes:
    """About 150 bytes a line, in UTF-8: objects in an array, escapes, dates, numbers of each kind."""
    line = {
        "sku": "SKU-000017",
        "quantity": 12,
        "price": 19.99,
        "note": 'a "quoted" note\twith a tab',
        "from": "2026-01-05T08:00:00Z",
        "size": {"w": 120, "h": 0.25, "fragile": True, "colours": ["grün", None, -3]},
    }
    customer = {"id": "8e03978e-40d5", "name": 'Jürgen "Ji" O\'Neil'}
    body = {"amount": 500, "customer": customer, "lines": [line] * lines, "total": 1e3}
    return json.dumps(body, ensure_ascii=False).encode()


def cpu_seconds(function: Callable[[], object], times: int) -> float:
    begun = time.process_time()
    for _ in range(times):
        function()
    return time.process_time() - begun


@pytest.mark.parametrize(
    ("body", "times", "most"),
    [
        (invoice(0), 200, 5),  # some of it is the same for every body
        (invoice(90), 5, 3),
        (invoice(4500), 1, 3),
        (json.dumps([*range(9000)]).encode(), 5, 4),
    ],
    ids=["small", "20 kB", "1 MB", "integers"],
)
def test_canonical_json_costs_no_more_than_a_few_times_what_reading_it_costs(
    body: bytes, times: int, most: int
) -> None:
    request = of_json(body)
    least = [math.inf] * 3
    for _ in range(150):  # until the machine has left us alone for a round
        spent = (
            cpu_seconds(lambda: by_json(request), times),
            cpu_seconds(lambda: by_request(request), times),
            cpu_seconds(lambda: json.loads(body), times),
        )
        by_meaning, by_bytes, reading = least = [*map(min, least, spent)]
        if (by_meaning - by_bytes) / reading < most:
            return
    pytest.fail(f"{(by_meaning - by_bytes) / reading:.1f} times")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r'{"a\u003ab":1}', '{"a:b":1}'),
        (r'{"a":"\\u003a"}', r'{"a":"\u005cu003a"}'),
        ('[-0 ,"-0"]', '[ -0,"-0" ]'),
        ('{"from":"2026-01-05","n":-0.5}', '{"n":-0.5,"from":"2026\\u002d01-05"}'),
    ],
)
def test_what_needs_a_second_look_is_still_compared_by_its_meaning(one: str, other: str) -> None:
    assert by_json(of_json(one)) == by_json(of_json(other))


@pytest.mark.parametrize(
    "body",
    [
        r'{"a":"\u003a","a":1}',
        '{"a":1,"a":":"}',
        '{"a":{"b":1,"b":2},"c":"\\u003A"}',
        '{"n":-0,"n":0}',
    ],
)
def test_no_escaped_colon_hides_a_member_that_is_named_twice(body: str) -> None:
    with pytest.raises(BodyMalformed, match="names a member of an object twice"):
        by_json(of_json(body))


def test_brackets_in_strings_are_no_levels() -> None:
    body = json.dumps({"note": "[" * 300 + "}" * 10, "other": "]" * 300})
    assert by_json(of_json(body)) == by_json(of_json(" " + body))


def test_strings_do_not_pass_for_numbers() -> None:
    bodies = ["1.5", '"1.5"', '["1.5"]', '[null,"1.5"]', '["NaN","1.5"]', '{"NaN":"1.5"}']
    assert len({by_json(of_json(body)).digest for body in bodies}) == len(bodies)


def test_levels_that_strings_hide_are_refused_at_the_latest_by_pythons_own_limit() -> None:
    answers = []
    for depth in [*range(201, 1200), 100_000]:
        try:
            by_json(of_json('["]",' * depth + "1" + ',"["]' * depth))
        except BodyMalformed as refusal:
            answers.append(refusal.detail)
    assert answers  # up to Python 3.11 from about a thousand levels on
    assert set(answers) == {"The JSON body is nested too deeply; at most 200 levels are allowed."}
