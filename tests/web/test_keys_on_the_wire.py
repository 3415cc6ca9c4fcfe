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


def test_a_malformed_key_is_refused_and_never_counts_as_absent(world, add_view, assert_problem):
    runs = add_view(world, required=False)
    sent = [({"key": key}, fault) for key, fault in MALFORMED.items()]
    for second in "canary-1", "canary-2":  # equal or not
        sent += [({"key": "canary-1", "headers": {"Idempotency-Key": second}}, "sent twice")]
    for each, fault in sent:
        members = assert_problem(world.post(**each), 400, "key-malformed")
        assert fault in members["detail"], each
    assert (runs, world.records()) == ([], [])


def test_the_header_and_whether_a_key_is_required_are_settings(
    make_world, add_view, assert_problem, assert_replayed
):
    world = make_world(IDEMPOTENCY_HEADER="X-Request-Token", IDEMPOTENCY_REQUIRED=False)
    runs = add_view(world)
    add_view(world, "/refunds", endpoint="refund", required=True)
    assert [world.post(key="canary", user=user).status_code for user in ("alice", "")] == [201, 201]
    assert (runs, world.records()) == ([0, 0], [])
    assert_problem(world.post("/refunds", key="canary"), 400, "key-required")
    sent = {"key": None, "headers": {"x-request-TOKEN": "canary"}}
    assert_replayed(world.post(**sent), world.post(**sent))
    assert runs == [0, 0, 1]


FORM, MULTIPART, JSON = "application/x-www-form-urlencoded", "multipart/form-data", "application/json"


def order(kind, amount=5, **members):
    sent = {"amount": amount, **members}
    return {"json": sent} if kind == JSON else {"data": sent, "content_type": kind}


@pytest.mark.parametrize("kind", [JSON, FORM, MULTIPART])
def test_a_natural_key_may_be_in_the_body(world, add_view, assert_problem, assert_replayed, kind):
    def key():
        return request.get_json()["order"] if kind == JSON else request.form["order"]

    runs = add_view(world, key=key)
    free = add_view(world, "/free", endpoint="free", key=key, required=False)
    sent = order(kind, order="Büro")
    assert_replayed(world.post(key=None, **sent), world.post(key="ignored", **sent))
    assert_problem(world.post(key=None, **order(kind, 6, order="Büro")), 422, "key-reused")
    for lacking in order(kind, order=""), order(kind):
        assert_problem(world.post(key="canary", **lacking), 400, "key-required")
        assert world.post("/free", **lacking).status_code == 201
    assert (runs, free, len(world.records())) == ([1], [0, 0], 1)


def test_a_natural_key_is_a_text_an_integer_or_a_uuid(world, add_view, assert_problem, assert_replayed):
    wrong = [7.5, True, ["canary"], b"canary", "canary" * 50, 10**5000]
    keys = iter([7, 7, "7 ", UUID(int=7), None, *wrong])
    add_view(world, key=lambda: next(keys))
    assert_replayed(world.post(), world.post())
    assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert len(world.records()) == 3
    assert_problem(world.post(), 400, "key-required")
    for _ in wrong:
        assert_problem(world.post(), 400, "key-malformed")


def test_nothing_is_said_of_a_strangers_body(world, add_view, assert_problem):
    runs = add_view(world, key=lambda: request.get_json()["order"])
    add_view(world, "/compared", endpoint="compared", fingerprint="json")
    for body in (b"{", b"{}", b'{"order": ""}'):
        sent = {"data": body, "content_type": JSON, "user": ""}
        assert_problem(world.post(key=None, **sent), 401, "scope-unknown")
        assert_problem(world.post("/compared", **sent), 401, "scope-unknown")
    # What Flask says of a body that has no key stays.
    assert world.post(key=None, data=b"{canary", content_type=JSON).status_code == 400
    assert world.post(key=None, data=b"order=1").status_code == 415
    assert runs == []
