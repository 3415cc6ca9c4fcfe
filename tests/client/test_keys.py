"""The keys that the client makes, and what they follow from."""

from __future__ import annotations

import json
import subprocess
import sys
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


class TestNewKey:
    def test_it_is_a_uuid_of_version_7_whose_time_is_now(self):
        before = time.time()
        keys = [new_key() for _ in range(1000)]
        assert len(set(keys)) == 1000
        assert {(uuid.UUID(key).version, uuid.UUID(key).variant) for key in keys} == {
            (7, uuid.RFC_4122)
        }
        births = [birth_of(key) for key in keys]
        assert births == sorted(births)
        assert before - 0.001 <= births[0] <= births[-1] <= time.time()

    def test_processes_that_were_forked_make_different_ones(self):
        code = (
            "import os\n"
            "from flask_idempotency.client import new_key\n"
            "new_key()\n"
            "children = [os.fork(), os.fork()]\n"
            "os.write(1, (new_key()[-12:] + '\\n').encode())\n"
            "[os.waitpid(child, 0) for child in children if child]\n"
        )
        made = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        assert len(set(made)) == len(made) == 4


class TestDeriveKey:
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
    def test_it_never_changes(self, operation, params, key):
        """Keys derived before an upgrade must find their operations after it."""
        assert derive_key(operation, params) == key

    def test_it_is_the_same_in_another_process(self):
        code = (
            "from flask_idempotency.client import derive_key\n"
            "print(derive_key('pay', {name: {'a', name} == {'a'} for name in {'a', 'b', 'c'}}))"
        )
        keys = {
            subprocess.run(
                [sys.executable, "-c", code],
                env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed in ("1", "2", "3")
        }
        assert keys == {derive_key("pay", {"c": False, "a": True, "b": False}) + "\n"}

    @settings(deadline=None)
    @given(st.text(), plain)
    def test_it_is_a_key_that_servers_take_and_survives_a_trip_as_json(self, operation, params):
        key = derive_key(operation, params)
        assert parse_key(key) == key
        assert len(key) == 43
        assert derive_key(operation, json.loads(json.dumps(params))) == key

    @settings(deadline=None)
    @given(st.tuples(st.text(), plain), st.tuples(st.text(), plain))
    def test_others_have_another(self, one, other):
        same = one[0] == other[0] and json.dumps(one[1], sort_keys=True) == json.dumps(
            other[1], sort_keys=True
        )
        assert (derive_key(*one) == derive_key(*other)) == same

    def test_the_border_between_operation_and_params_counts(self):
        assert derive_key("pay", "a") != derive_key('pay"a', "")
        assert len({derive_key("pay", value) for value in (1, 1.0, "1", True, [1], None)}) == 6

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_what_is_not_json_is_refused(self, value):
        with pytest.raises(ValueError, match="Out of range float"):
            derive_key("pay", {"amount": value})

    @pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", uuid.uuid4()])
    def test_no_text_is_guessed(self, value):
        with pytest.raises(TypeError, match="not JSON serializable"):
            derive_key("pay", {"value": value})

    @pytest.mark.parametrize(
        "params", [(1, 2), {"a": [(1,)]}, {"a": {"b": ()}}, {1: "a"}, [{"a": [{True: 1}]}], {None: 1}]
    )
    def test_what_json_would_change_is_refused(self, params):
        with pytest.raises(TypeError, match="lists, not tuples, and str as names"):
            derive_key("pay", params)
