"""The keys that the client makes, and what they follow from."""

from __future__ import annotations

import json
import random
import time
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flask_idempotency.client import derive_key, new_key
from flask_idempotency.core.keys import birth_of, parse_key

number = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | number | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


def test_a_new_one_is_a_uuid_of_version_7_whose_time_is_now():
    before, state = time.time(), random.getstate()
    keys = [new_key() for _ in range(999)]
    random.setstate(state)  # as a fork copies it
    keys += [new_key()]
    assert len({key[-12:] for key in keys}) == 1000
    assert {(uuid.UUID(key).version, uuid.UUID(key).variant) for key in keys} == {(7, uuid.RFC_4122)}
    births = [birth_of(key) for key in keys]
    assert births == sorted(births)
    assert before - 0.001 <= births[0] <= births[-1] <= time.time()


@pytest.mark.parametrize(
    ("operation", "params", "key"),
    [
        ("create-payment", {"order": 7}, "gYkaJQSV7bN8qZ7Da6JxDJb5SbIYFMQdmXszMT7CPGo"),
        ("", None, "4dlvjRjBrWarIynKfSd5KX-1OZSv7xT3FBSmQnvBKgQ"),
        (
            "überweisen",
            {"b": [1, 2.5, "é"], "a": {"y": True, "x": None}},
            "wcEdDV70rDv7eMBXvmjjAR-mGnv8AXandHvdNiR0vMI",
        ),
    ],
)
def test_a_derived_one_never_changes(operation, params, key):
    """Keys derived before an upgrade must find their operations after it."""
    assert derive_key(operation, params) == key


@settings(deadline=None, max_examples=40)
@given(st.tuples(st.text(), plain), st.tuples(st.text(), plain))
def test_it_is_a_valid_key_survives_json_and_differs_from_others(one, other):
    key = derive_key(*one)
    assert parse_key(key) == key
    assert len(key) == 43
    assert derive_key(one[0], json.loads(json.dumps(one[1]))) == key
    texts = {json.dumps(each, sort_keys=True) for each in (one, other)}
    assert len({key, derive_key(*other)}) == len(texts)


def test_types_and_the_border_between_operation_and_params_count():
    assert derive_key("pay", "a") != derive_key('pay"a', "")
    assert len({derive_key("pay", value) for value in (1, 1.0, "1", True, [1], None)}) == 6


@pytest.mark.parametrize(
    ("params", "error", "said"),
    [
        ({"amount": float("nan")}, ValueError, "Out of range float"),
        ({"amount": -float("inf")}, ValueError, "Out of range float"),
        ({"value": b"bytes"}, TypeError, "not JSON serializable"),
        ({"value": uuid.uuid4()}, TypeError, "not JSON serializable"),
        ({"a": {"b": ()}}, TypeError, "lists, not tuples, and str as names"),
        ([{"a": [{True: 1}]}], TypeError, "lists, not tuples, and str as names"),
    ],
)
def test_what_is_no_plain_json_is_refused(params, error, said):
    with pytest.raises(error, match=said):
        derive_key("pay", params)
