"""Idempotency keys as clients send them, in the header or as a natural key in the request."""

from uuid import UUID

import pytest
from flask import request

MALFORMED = {
    "": "is empty",
    '"canary': "a double quote without its pair",
    "canary,b": "sent twice",
    "canary\xff\xfe": "not allowed",
    "canary" * 1350: "longer than 255",
}
"""All of them: ``tests/unit/test_keys.py``."""

RAW = {"canary\x00": "not allowed", "canary\r\nX-Other: 1": "not allowed"}
"""What Werkzeug's client refuses to send, and careless servers let through."""


def test_a_malformed_key_is_refused_and_never_counts_as_absent(world, add_view, assert_problem):
    runs = add_view(world, required=False)
    for key, fault in MALFORMED.items():
        members = assert_problem(world.post(key=key), 400, "key-malformed")
        assert fault in members["detail"], key
    for key, fault in RAW.items():
        response = world.post(key=None, environ_overrides={"HTTP_IDEMPOTENCY_KEY": key})
        assert fault in assert_problem(response, 400, "key-malformed")["detail"], key
    assert runs == []
    assert world.records() == []


def test_two_header_lines_are_refused_equal_or_not(client, world, add_view, assert_problem):
    runs = add_view(world)
    for second in "canary-1", "canary-2":
        lines = [("Idempotency-Key", "canary-1"), ("Idempotency-Key", second), ("X-User", "alice")]
        response = client.post("/payments", headers=lines, json={"amount": 5})
        assert "sent twice" in assert_problem(response, 400, "key-malformed")["detail"]
    assert runs == []


def test_bare_and_quoted_are_one_key(world, add_view, assert_replayed):
    runs = add_view(world)
    first = world.post(key="8e03-978e")
    for spelling in '"8e03-978e"', "  8e03-978e  ", ' "8e03-978e" ':
        assert_replayed(first, world.post(key=spelling))
    assert runs == [1]


def test_keys_that_differ_in_anything_are_two(world, add_view):
    runs = add_view(world)
    keys = ["key", "KEY", '"key "', '" key"', r'"k\"ey"', "a" * 255, "a" * 254, "'key'", "%6Bey"]
    for key in keys:
        response = world.post(key=key)
        assert response.status_code == 201, key
        assert "Idempotent-Replayed" not in response.headers, key
    assert len(runs) == len(keys) == len(world.records())


def test_the_header_is_a_setting(make_world, add_view, assert_problem, assert_replayed):
    world = make_world(IDEMPOTENCY_HEADER="X-Request-Token")
    add_view(world)
    assert_problem(world.post(key="canary"), 400, "key-required")
    sent = {"key": None, "headers": {"x-request-TOKEN": "canary"}}
    assert_replayed(world.post(**sent), world.post(**sent))


def test_where_no_key_is_required_a_request_without_one_is_unprotected(
    world, add_view, assert_replayed
):
    runs = add_view(world, required=False)
    answers = [world.post(key=None), world.post(key=None, user="")]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert runs == [0, 0]
    assert world.records() == []
    assert_replayed(world.post(), world.post())
    assert runs == [0, 0, 1]


def test_whether_a_key_is_required_is_a_setting_and_an_option(make_world, add_view, assert_problem):
    world = make_world(IDEMPOTENCY_REQUIRED=False)
    add_view(world)
    add_view(world, "/refunds", endpoint="refund", required=True)
    assert world.post(key=None).status_code == 201
    assert_problem(world.post("/refunds", key=None), 400, "key-required")


def test_a_callable_may_give_the_key(world, add_view, assert_problem, assert_replayed):
    runs = add_view(world, key=lambda: request.headers.get("X-Order"))
    order = {"key": None, "headers": {"X-Order": "Büro 7, 2nd"}}
    assert_replayed(world.post(**order), world.post(**order))
    assert runs == [1]
    assert_problem(world.post(key="canary"), 400, "key-required")
    assert_problem(world.post(key=None, headers={"X-Order": ""}), 400, "key-required")
    assert_problem(world.post(key=None, headers={"X-Order": "canary" * 50}), 400, "key-malformed")


@pytest.mark.parametrize("key", [7, UUID(int=7)])
def test_a_callable_may_give_a_number(world, add_view, assert_problem, assert_replayed, key):
    answers = [key, key, 7.5, True, ["canary"], b"canary", object()]
    add_view(world, key=lambda: answers.pop(0))
    assert_replayed(world.post(), world.post())
    while answers:
        assert_problem(world.post(), 400, "key-malformed")


def test_a_member_of_a_json_body_may_be_the_key(world, add_view, assert_problem, assert_replayed):
    runs = add_view(world, key=lambda: request.get_json()["order"]["id"])
    order = {"order": {"id": "Büro"}, "amount": 5}
    assert_replayed(world.post(key=None, json=order), world.post(key="ignored", json=order))
    changed = world.post(key=None, json={**order, "amount": 6})
    assert_problem(changed, 422, "key-reused")
    for number in 7, 8, "8 ", 10**30:
        assert world.post(key=None, json={"order": {"id": number}}).status_code == 201
    assert len(runs) == 5
    assert_problem(world.post(key=None, json={"order": {"id": ["canary"]}}), 400, "key-malformed")
    assert len(runs) == 5


def test_nothing_is_said_of_a_strangers_body(world, add_view, assert_problem):
    add_view(world, key=lambda: request.get_json()["order"])
    add_view(world, "/compared", endpoint="compared", fingerprint="json")
    for body in (b"{", b"{}", b'{"order": ""}'):
        sent = {"data": body, "content_type": "application/json", "user": ""}
        assert_problem(world.post(key=None, **sent), 401, "scope-unknown")
        assert_problem(world.post("/compared", **sent), 401, "scope-unknown")


MISSING = {"an error": lambda: {}["order"], "None": lambda: None, "nothing": lambda: ""}


@pytest.mark.parametrize("key", MISSING.values(), ids=MISSING)
def test_a_missing_natural_key_counts_as_no_key(world, add_view, assert_problem, key):
    runs = add_view(world, key=key)
    free = add_view(world, "/free", endpoint="free", key=key, required=False)
    assert_problem(world.post(key="canary"), 400, "key-required")
    assert world.post("/free", key="canary").status_code == 201
    assert (runs, free, world.records()) == ([], [0], [])


def test_what_flask_says_of_a_body_that_has_no_key_stays(world, add_view):
    """Its own 400 and 415; a field that a form lacks is a missing key, though, as it is a KeyError."""
    runs = add_view(world, key=lambda: request.get_json()["order"])
    sent = {"content_type": "application/json"}
    assert world.post(key=None, data=b"{canary", **sent).status_code == 400
    assert world.post(key=None, data=b"order=1").status_code == 415
    assert runs == []


def test_a_callable_that_gives_an_endless_integer_gives_no_key(world, add_view, assert_problem):
    runs = add_view(world, key=lambda: 10**5000)
    assert "1 to 255 characters" in assert_problem(world.post(), 400, "key-malformed")["detail"]
    assert runs == []


FORMS = ["application/x-www-form-urlencoded", "multipart/form-data"]


@pytest.mark.parametrize("content_type", FORMS)
def test_a_field_of_a_form_may_be_the_key(
    world, add_view, assert_problem, assert_replayed, content_type
):
    runs = add_view(world, key=lambda: request.form["order"])

    def post(**fields):
        return world.post(key=None, data=fields, content_type=content_type)

    assert_replayed(post(order="7", amount="5"), post(order="7", amount="5"))
    assert_problem(post(order="7", amount="6"), 422, "key-reused")
    assert_problem(post(amount="5"), 400, "key-required")
    assert_problem(post(order=""), 400, "key-required")
    assert runs == [1]


def test_a_part_of_the_path_may_be_the_key(world, add_view, assert_replayed):
    runs = add_view(world, "/orders/<int:number>/pay", key=lambda: request.view_args["number"])
    assert_replayed(*(world.post("/orders/7/pay", key=None) for _ in range(2)))
    assert world.post("/orders/8/pay", key=None).status_code == 201
    assert runs == [1, 1]
