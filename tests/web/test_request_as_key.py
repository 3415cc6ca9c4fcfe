"""``key="request"``: an equal request within the ttl is a duplicate, whatever header comes with it."""

import pytest
from flask import request

from flask_idempotency import ConfigurationError, idempotent
from tests.stores import BOTH


@pytest.fixture
def runs(world):
    return add(world)


def add(world, **options):
    runs = []

    def pay():
        runs.append(1)
        return {"run": len(runs), "note": request.form.get("note")}, 201

    options = {"key": "request", "ttl": 30, **options}
    world.app.add_url_rule("/payments", "pay", idempotent(**options)(pay), methods=["POST"])
    return runs


@pytest.mark.parametrize("body", [{"json": {"amount": 5}}, {"data": {"note": "x"}}, {"data": b""}])
def test_an_equal_request_gets_the_same_response(world, runs, assert_replayed, body):
    first, second = (world.post(key=None, **body) for _ in range(2))
    assert_replayed(first, second)
    assert runs == [1]


@pytest.mark.parametrize(
    "other", [{"json": {"amount": 6}}, {"path": "/payments?x=1"}, {"user": "bob"}], ids=str
)
def test_another_request_is_another_operation(world, runs, other):
    world.post(key=None)
    assert world.post(key=None, **other).status_code == 201
    assert runs == [1, 1]


def test_after_the_ttl_an_equal_request_is_a_new_one(world, runs):
    world.post(key=None)
    world.sql("update idempotency_record set expires_at = clock_timestamp() - interval '1 second'")
    assert world.post(key=None).json["run"] == 2


@BOTH
@pytest.mark.parametrize("body", [{"json": {"amount": 5}}, {"data": {"note": "x"}}])
def test_a_key_in_the_header_makes_no_second_operation(world, runs, assert_replayed, body):
    """Some browsers send one with each POST, and a new one each time."""
    first, *others = (world.post(key=key, **body) for key in ("key-1", "key-2", None, "a,b"))
    for other in others:
        assert_replayed(first, other)
    assert runs == [1]
    seconds = "extract(epoch from expires_at - created_at)"
    assert [round(row[0]) for row in world.sql(f"select {seconds} from idempotency_record")] == [30]


def test_what_the_option_fingerprint_compares_is_the_key(world):
    runs = add(world, fingerprint=["/order"])
    for amount in (5, 6):
        world.post(key=None, json={"order": 1, "amount": amount})
    world.post(key=None, json={"order": 2, "amount": 5})
    assert runs == [1, 1]


@pytest.mark.parametrize("options", [{}, {"ttl": 3601}, {"ttl": 86400}])
def test_it_needs_a_short_ttl(options):
    with pytest.raises(ConfigurationError, match="key='request' needs the option ttl"):
        idempotent(key="request", **options)


def test_it_has_no_birth_to_require():
    """Where the option is given, or where the setting meets it."""
    said = "has key='request', and a request does not say when it was first sent"
    with pytest.raises(ConfigurationError, match=said):
        idempotent(key="request", ttl=30, refuse_old_keys="require")
    idempotent(key="request", ttl=30, refuse_old_keys=True)


def test_nor_one_that_a_setting_may_require(make_world):
    world = make_world(IDEMPOTENCY_REFUSE_OLD_KEYS="require", PROPAGATE_EXCEPTIONS=True)
    runs = add(world)
    with pytest.raises(ConfigurationError, match="pay has key='request'"):
        world.post(key=None)
    assert runs == []
