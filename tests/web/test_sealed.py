"""Answers encrypted at rest: who reads or changes the table reads and changes no answer."""

import secrets

import pytest
from flask import Response

from flask_idempotency import idempotent
from flask_idempotency.core.fingerprint import RequestParts, by_parts

OLD, NEW = secrets.token_bytes(32), secrets.token_urlsafe(32)


@pytest.fixture
def deploy(make_world):
    """An application with these keys; each later one is on the database of the first."""
    uri = {}

    def make(*keys, **config):
        world = make_world(IDEMPOTENCY_ENCRYPTION_KEYS=list(keys), **uri, **config)
        uri["SQLALCHEMY_DATABASE_URI"] = world.app.config["SQLALCHEMY_DATABASE_URI"]

        @world.app.post("/payments/<name>")
        @idempotent
        def pay(name):
            world.db.session.add(world.Payment(amount=5))
            world.db.session.commit()
            return Response(f"paid by {name}", 201, {"Location": f"/payments/of-{name}"})

        return world

    return make


def post(world, name="canary", **kwargs):
    return world.post(f"/payments/{name}", key=name, **kwargs)


def assert_shut(response):
    assert response.status_code == 500
    assert b"paid" not in response.data
    assert "Location" not in response.headers


@pytest.mark.parametrize("limit", [{}, {"IDEMPOTENCY_MAX_RESPONSE_BYTES": 3}])
def test_the_table_holds_nothing_readable(deploy, assert_replayed, limit):
    world = deploy(NEW, **limit)
    first, again = post(world), post(world)
    (record,) = world.records()
    stored = repr(record) + bytes(record.body or b"").decode("latin-1")
    assert "canary" not in stored
    assert "Location" not in stored
    if limit:
        assert (again.status_code, again.headers["Location"]) == (409, first.headers["Location"])
    else:
        assert_replayed(first, again)
    assert world.count() == 1


KEYS = {
    "a new one": ([OLD], [NEW], {}, "SealBroken"),
    "a new one first": ([OLD], [NEW, OLD], {}, None),
    "the first one": ([], [NEW], {}, "SealBroken: The stored response is not encrypted"),
    "the first one, where that is accepted": ([], [NEW], {"IDEMPOTENCY_ACCEPT_UNSEALED": True}, None),
}


@pytest.mark.parametrize("keys", KEYS)
def test_a_response_is_opened_by_its_key_or_the_setting_or_not_at_all(
    deploy, assert_replayed, caplog, heard, keys
):
    """Nothing runs again. What was in plain is logged: its fingerprint cannot be compared."""
    old, new, config, said = KEYS[keys]
    first = post(deploy(*old))
    heard.clear()
    after = deploy(*new, **config)
    again = post(after)
    if said is None:
        assert_replayed(first, again)
        assert ("the stored fingerprint was made in another way" in caplog.text) == bool(config)
    else:
        assert_shut(again)
        assert [event.problem for _, event in heard] == ["record-unreadable"]
        assert said in caplog.text
        assert ("IDEMPOTENCY_ACCEPT_UNSEALED" in caplog.text) == (not old)
    assert after.count() == 1


@pytest.mark.parametrize(
    "forgery",
    [
        "body = set_byte(body, length(body) - 1, get_byte(body, length(body) - 1) # 1)",
        "body = ''",
        "status = 202",
        "body = (select body from idempotency_record other where other.key <> idempotency_record.key)",
    ],
)
def test_a_response_that_was_changed_or_moved_in_the_table_stays_shut(deploy, forgery):
    world = deploy(NEW)
    for name in "ann", "bob":
        assert post(world, name).status_code == 201
    world.sql(f"update idempotency_record set {forgery}")
    for name in "ann", "bob":
        assert_shut(post(world, name))
    assert world.count() == 2


@pytest.mark.parametrize("keys", [(), (NEW,)], ids=["in plain", "keyed"])
def test_what_is_in_a_request_can_be_guessed_from_its_row_only_without_keys(deploy, keys):
    world, body = deploy(*keys), b'{"pin":"4711"}'
    assert post(world, data=body, content_type="application/json").status_code == 201
    parts = RequestParts("POST", None, "/payments/canary", b"", "application/json", body)
    stored = bytes(world.records()[0].fingerprint)
    assert (by_parts(parts, "request").digest in stored) == (not keys)


@pytest.mark.parametrize("stored_under", [(OLD,), (OLD, NEW), (NEW, OLD)])
def test_a_changed_request_is_told_under_every_key_of_the_list(deploy, assert_problem, stored_under):
    before = deploy(*stored_under)
    assert post(before).status_code == 201
    for keys in (stored_under, (OLD, NEW), (NEW, OLD)):
        world = deploy(*keys)
        assert_problem(post(world, json={"amount": 6}), 422, "key-reused")
        assert post(world).status_code == 201
    assert before.count() == 1


@pytest.mark.parametrize("keys", [((), (NEW,)), ((OLD,), (NEW,)), ((NEW,), ())])
def test_an_operation_under_way_runs_again_though_its_fingerprint_cannot_be_compared(deploy, keys):
    """Keys that came, went or changed between two releases make no error out of a retry."""
    statuses = [503, 201]
    for each, expected in zip(keys, (503, 201), strict=True):
        deployed = deploy(*each)
        deployed.app.post("/answer")(idempotent(name="a")(lambda: ("", statuses.pop(0))))
        assert deployed.post("/answer").status_code == expected
