"""Answers encrypted at rest: who reads or changes the table reads and changes no answer."""

import secrets

import pytest
from flask import Response

from flask_idempotency import idempotent, operation_rejected
from flask_idempotency.core.fingerprint import Fingerprint, RequestParts, by_parts

OLD, NEW = secrets.token_bytes(32), secrets.token_urlsafe(32)


@pytest.fixture
def sealed_world(make_world):
    def make(*keys, **config):
        world = make_world(IDEMPOTENCY_ENCRYPTION_KEYS=list(keys), **config)

        @world.app.post("/payments/<name>")
        @idempotent
        def pay(name):
            world.db.session.add(world.Payment(amount=5))
            world.db.session.commit()
            return Response(f"paid by {name}", 201, {"Location": f"/payments/of-{name}"})

        return world

    return make


def dump(world):
    """The whole table as text, and its bytes as text."""
    records = world.records()
    return repr(records) + "".join(bytes(r.body or b"").decode("latin-1") for r in records)


def test_the_table_holds_nothing_readable(sealed_world, assert_replayed):
    world = sealed_world(NEW)
    first = world.post("/payments/canary", key="canary-1")
    assert first.data == b"paid by canary"
    assert "canary" not in dump(world)
    assert "Location" not in dump(world)
    assert_replayed(first, world.post("/payments/canary", key="canary-1"))
    assert world.count() == 1


def with_keys(world, sealed_world, *keys, **config):
    """The same database after a deploy with other keys."""
    config["SQLALCHEMY_DATABASE_URI"] = world.app.config["SQLALCHEMY_DATABASE_URI"]
    return sealed_world(*keys, **config)


def test_a_key_that_was_taken_away_opens_nothing_and_runs_nothing(sealed_world):
    before = sealed_world(OLD)
    assert before.post("/payments/ann").status_code == 201
    after, problems = with_keys(before, sealed_world, NEW), []
    with operation_rejected.connected_to(lambda _app, event: problems.append(event.problem), after.app):
        for _ in range(2):
            response = after.post("/payments/ann")
            assert response.status_code == 500
            assert b"paid" not in response.data
    assert after.count() == 1
    assert problems == ["record-unreadable"] * 2


def test_a_response_from_before_there_were_keys_is_refused_by_name(sealed_world, caplog):
    before = sealed_world()
    assert before.post("/payments/ann").status_code == 201
    after = with_keys(before, sealed_world, NEW)
    refused = after.post("/payments/ann")
    assert refused.status_code == 500
    assert b"paid" not in refused.data
    assert "SealBroken: The stored response is not encrypted" in caplog.text
    assert "IDEMPOTENCY_ACCEPT_UNSEALED" in caplog.text
    assert after.count() == 1


def test_a_response_from_before_there_were_keys_is_replayed_where_the_setting_allows_it(
    sealed_world, assert_replayed, caplog
):
    """And logged: its fingerprint cannot be compared."""
    before = sealed_world()
    first = before.post("/payments/ann")
    assert "paid by ann" in dump(before)
    after = with_keys(before, sealed_world, NEW, IDEMPOTENCY_ACCEPT_UNSEALED=True)
    assert_replayed(first, after.post("/payments/ann"))
    assert after.count() == 1
    assert "the stored fingerprint was made in another way" in caplog.text


def test_responses_swapped_in_the_table_stay_shut(sealed_world):
    world = sealed_world(NEW)
    for name in "ann", "bob":
        assert world.post(f"/payments/{name}", key=name, user=name).status_code == 201
    world.sql(
        "update idempotency_record as mine set body = other.body"
        " from idempotency_record as other where mine.key <> other.key"
    )
    for name in "ann", "bob":
        response = world.post(f"/payments/{name}", key=name, user=name)
        assert response.status_code == 500
        assert b"paid" not in response.data
        assert "Location" not in response.headers
    assert world.count() == 2


@pytest.mark.parametrize(
    "forgery",
    [
        "body = set_byte(body, length(body) - 1, get_byte(body, length(body) - 1) # 1)",
        "body = ''",
        "status = 202",
    ],
)
def test_a_response_changed_in_the_table_stays_shut(sealed_world, forgery):
    world = sealed_world(NEW)
    assert world.post("/payments/ann").status_code == 201
    world.sql(f"update idempotency_record set {forgery}")
    response = world.post("/payments/ann")
    assert response.status_code == 500
    assert b"paid" not in response.data
    assert world.count() == 1


def stored_fingerprint(world):
    (record,) = world.records()
    return Fingerprint(record.fingerprint_version, bytes(record.fingerprint))


def guesses():
    """What everybody who reads a row can try in a moment: all requests there can be."""
    for pin in range(10_000):
        body = b'{"pin":"%04d"}' % pin
        yield by_parts(
            RequestParts("POST", None, "/payments/ann", b"", "application/json", body), "request"
        )


@pytest.mark.parametrize("keys", [(), (NEW,)], ids=["in plain", "keyed"])
def test_what_is_in_a_request_can_be_guessed_from_its_row_only_without_keys(sealed_world, keys):
    world = sealed_world(*keys)
    body = {"data": b'{"pin":"4711"}', "content_type": "application/json"}
    assert world.post("/payments/ann", **body).status_code == 201
    digest = stored_fingerprint(world).digest
    assert any(guess.digest in digest for guess in guesses()) == (not keys)
    assert world.post("/payments/ann", **body).headers["Idempotent-Replayed"] == "true"


def test_a_changed_request_is_told_under_every_key_of_the_list(sealed_world, assert_problem):
    before = sealed_world(OLD)
    assert before.post("/payments/ann").status_code == 201
    for keys in ((OLD,), (OLD, NEW), (NEW, OLD)):
        world = with_keys(before, sealed_world, *keys)
        assert_problem(world.post("/payments/ann", json={"amount": 6}), 422, "key-reused")
        assert world.post("/payments/ann").status_code == 201
    assert before.count() == 1


@pytest.mark.parametrize("keys", [((), (NEW,)), ((OLD,), (NEW,)), ((NEW,), ())])
def test_an_operation_under_way_runs_again_though_its_fingerprint_cannot_be_compared(
    sealed_world, keys
):
    """Keys that came, went or changed between two releases make no error out of a retry."""
    before, after = keys
    world = sealed_world(*before)
    statuses = [503, 201]
    deploys = [world, with_keys(world, sealed_world, *after)]
    for deployed in deploys:
        deployed.app.post("/answer")(idempotent(name="a")(lambda: ("", statuses.pop(0))))
    assert [deployed.post("/answer").status_code for deployed in deploys] == [503, 201]


def test_a_response_too_large_to_store_is_reported_without_its_secrets(sealed_world, assert_problem):
    world = sealed_world(NEW, IDEMPOTENCY_MAX_RESPONSE_BYTES=3)
    assert world.post("/payments/ann").status_code == 201
    retry = world.post("/payments/ann")
    assert_problem(retry, 409, "response-not-kept")
    assert retry.headers["Location"] == "/payments/of-ann"
    assert "of-ann" not in dump(world)
