"""A wrong option is named where the view is decorated, not in the first request."""

import pytest
from flask import Blueprint

from flask_idempotency import ConfigurationError, Idempotency, idempotent
from flask_idempotency.core.errors import shown

WRONG_OPTIONS = [
    ("required", "no", "True or False"),
    ("ttl", 0, "from 1 second to 10 years"),
    ("ttl", "1h", "from 1 second to 10 years"),
    ("wait", -1, "0 to 300 seconds"),
    ("refuse_old_keys", "required", "True, False or 'require'"),
    ("refuse_old_keys", 60, "True, False or 'require'"),
    ("key", "order_id", "a callable that gives the key"),
    ("key", 7, "a callable that gives the key"),
    ("scope", "alice", "a callable, or None"),
    ("fingerprint", "body", "'request', 'json', a list of JSON pointers"),
    ("fingerprint", [], "'request', 'json', a list of JSON pointers"),
    ("fingerprint", 7, "'request', 'json', a list of JSON pointers"),
    ("max_request_bytes", -1, "an integer from 0 to 1 GiB"),
    ("max_request_bytes", "1M", "an integer from 0 to 1 GiB"),
    ("store", True, "a callable that takes the response"),
    ("namespace", "v 1", "visible ASCII"),
    ("authorize_replay", True, "a callable that takes the operation"),
    ("name", "", "1 to 255 characters"),
    ("name", "x" * 256, "1 to 255 characters"),
    ("name", "a\0b", "without NUL"),
    ("name", "a\ud800b", "lone surrogates"),
    ("other_binds", "log", "a list of bind keys"),
    ("other_binds", 7, "a list of bind keys"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG_OPTIONS)
def test_a_wrong_option_is_named_where_the_view_is_decorated(name, value, allowed):
    covered = Blueprint("shop", __name__)
    uses = [idempotent, lambda **options: Idempotency().protect(covered, **options)]
    for use in uses[: 1 if name == "name" else 2]:
        with pytest.raises(ConfigurationError) as caught:
            use(**{name: value})
        assert str(caught.value).startswith(f"{name} is {shown(value)}; allowed: ")
        assert allowed in str(caught.value)


async def find_out(_operation):
    return None


@pytest.mark.parametrize("policy", ["fail", None, find_out])
def test_who_decides_about_an_interruption_is_a_word_or_a_plain_function(policy):
    message = "on_interrupted is .*; allowed: 'hold', 'retry', or a callable, not async"
    with pytest.raises(ConfigurationError, match=message):
        idempotent(atomic=False, on_interrupted=policy)


@pytest.mark.parametrize("pointer", ["order", "/order~2", "order/id"])
def test_a_pointer_that_is_none_is_explained(pointer):
    with pytest.raises(ConfigurationError, match="is not a JSON pointer") as caught:
        idempotent(fingerprint=["/ok", pointer])
    assert repr(pointer) in str(caught.value)


def test_an_unknown_option_lists_the_known_ones():
    with pytest.raises(ConfigurationError, match="timeout is not an option.* required, ttl, wait"):
        idempotent(timeout=5)


@pytest.mark.parametrize("wrong", ["payments", 60, {"ttl": 60}])
def test_options_are_given_by_name(wrong):
    with pytest.raises(ConfigurationError, match="takes a view, or options by name"):
        idempotent(wrong)
