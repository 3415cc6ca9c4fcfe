"""A wrong option is named where the view is decorated, not in the first request."""

import pytest
from flask import Blueprint

from flask_idempotency import ConfigurationError, Idempotency, idempotent
from flask_idempotency.core.errors import shown


async def find_out(_operation):
    return None


KEY, SCOPE = "a callable that gives the key", "a callable, or None"
FINGERPRINT = "'request', 'json', a list of JSON pointers"
POLICY = "'hold', 'retry', or a callable, not async"
WRONG_OPTIONS = [
    ("required", "no", "True or False"),
    ("ttl", 0, "from 1 second to 10 years"),
    ("ttl", "1h", "from 1 second to 10 years"),
    ("wait", -1, "0 to 300 seconds"),
    ("refuse_old_keys", 60, "True, False or 'require'"),
    ("key", "order_id", KEY),
    ("scope", "alice", SCOPE),
    ("fingerprint", "body", FINGERPRINT),
    ("fingerprint", [], FINGERPRINT),
    ("max_request_bytes", -1, "an integer from 0 to 1 GiB"),
    ("store", True, "a callable that takes the response"),
    ("namespace", "v 1", "visible ASCII"),
    ("authorize_replay", True, "a callable that takes the operation"),
    ("name", "", "1 to 255 characters"),
    ("name", "x" * 256, "1 to 255 characters"),
    ("name", "a\0b", "without NUL"),
    ("name", "a\ud800b", "lone surrogates"),
    ("other_binds", "log", "a list of bind keys"),
    ("other_binds", 7, "a list of bind keys"),
    ("on_interrupted", "fail", POLICY),
    ("on_interrupted", None, POLICY),
    ("on_interrupted", find_out, POLICY),
]


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG_OPTIONS)
def test_a_wrong_option_is_named_where_the_view_is_decorated(name, value, allowed):
    covered = Blueprint("shop", __name__)
    uses = [idempotent, lambda **options: Idempotency().protect(covered, **options)]
    for use in uses[: 1 if name == "name" else 2]:
        with pytest.raises(ConfigurationError) as caught:
            use(atomic=name != "on_interrupted", **{name: value})
        assert str(caught.value).startswith(f"{name} is {shown(value)}; allowed: ")
        assert allowed in str(caught.value)


@pytest.mark.parametrize("pointer", ["order", "/order~2", "order/id"])
def test_a_pointer_that_is_none_is_explained(pointer):
    with pytest.raises(ConfigurationError, match="is not a JSON pointer") as caught:
        idempotent(fingerprint=["/ok", pointer])
    assert repr(pointer) in str(caught.value)


def test_an_unknown_option_and_what_is_given_without_a_name():
    with pytest.raises(ConfigurationError, match="timeout is not an option.* required, ttl, wait"):
        idempotent(timeout=5)
    with pytest.raises(ConfigurationError, match="lease is an option for atomic=False"):
        idempotent(lease=5)
    with pytest.raises(ConfigurationError, match="takes a view, or options by name"):
        idempotent("payments")
