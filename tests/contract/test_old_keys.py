"""A key that is older than the memory of it is refused, on every store; a record is found first."""

import secrets
import time

import pytest

from flask_idempotency import KeyExpired, KeyMalformed, Retryable, current_operation
from flask_idempotency.core.keys import uuid7
from tests.contract.test_requests import shop, store  # noqa: F401 -- fixtures
from tests.killed import Killed

TTL = 60


def born(seconds_ago):
    """A key that was made so long ago."""
    return uuid7(round((time.time() - seconds_ago) * 1000), secrets.token_bytes(10))


@pytest.fixture
def paying(shop):  # noqa: F811
    """A shop that refuses old keys, one that requires their age, or whatever the options say."""

    def open_(does=None, **options):
        usual = {"ttl": TTL, "refuse_old_keys": True}
        shop.view(does or (lambda: (shop.pay(), ({}, 201))[1]), **{**usual, **options})
        return shop

    return open_


@pytest.fixture
def later(monkeypatch):
    """The host's clock is set: so many seconds ahead of what it shows now."""
    real = time.time

    def set_(seconds):
        monkeypatch.setattr(time, "time", lambda: real() + seconds)

    return set_


def name_of(response):
    return response.json.get("type", "").rpartition(":")[2]


def test_an_old_key_without_a_record_runs_nothing_and_a_young_one_runs(paying):
    api, key = paying(), born(TTL + 1)
    for _ in range(2):
        response = api.post(key)
        assert (response.status_code, name_of(response)) == (409, "key-expired")
    assert api.count() == 0
    for ago in TTL - 30, -86000:  # also one from the future
        key = born(ago)
        assert [api.post(key).status_code for _ in range(2)] == [201, 201]
    assert api.count() == 2


def test_what_was_done_is_replayed_however_old_its_key_is(paying, later, monkeypatch):
    """Whatever becomes of its record then: it is purged between the look-up and a claim."""
    api, key, unknown = paying(), born(0), born(0)
    assert api.post(key).status_code == 201
    later(TTL + 1)
    assert name_of(api.post(unknown)) == "key-expired"
    assert api.post(key).headers["Idempotent-Replayed"] == "true"
    assert name_of(api.post(key, json={"changed": True})) == "key-reused"
    records = api.app.extensions["idempotency"].records
    look = records.look

    def look_at_the_last_moment(hashed):
        found = look(hashed)
        (line,) = records.admin().lines(1, start=hashed)
        assert records.admin().erase(line)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(records, "look", look_at_the_last_moment)
        assert api.post(key).headers["Idempotent-Replayed"] == "true"
    assert name_of(api.post(key)) == "key-expired"
    assert api.count() == 1


def test_what_still_runs_is_in_progress(shop, later):  # noqa: F811
    key = born(0)

    def much_later():
        later(TTL + 1)
        assert name_of(shop.post(key)) == "request-in-progress"

    shop.while_it_runs(much_later, key, ttl=TTL, refuse_old_keys=True)


LEASED = {"atomic": False}


@pytest.mark.parametrize(
    ("error", "options", "expected"),
    [
        pytest.param(Retryable, {}, 201, id="given back"),
        pytest.param(Retryable, LEASED, 201, id="released"),
        pytest.param(Killed, LEASED, "operation-interrupted", id="interrupted"),
        pytest.param(Killed, {**LEASED, "on_interrupted": "retry"}, 201, id="to be tried again"),
    ],
)
def test_what_has_begun_goes_on_and_charges_once(paying, later, error, options, expected):
    """A client that is refused would take a new key, and charge a second time."""
    charged, errors, key = [], [error], born(0)

    def view():
        if options:
            current_operation.step("charge", charged.append, current_operation.attempt)
        if errors:
            raise errors.pop()
        return {}, 201

    api = paying(view, **options)
    try:
        assert api.post(key).status_code == 503
    except Killed:
        assert error is Killed
    later(TTL + 1)
    response = api.post(key)
    assert expected in (response.status_code, name_of(response))
    assert charged == [1] * bool(options)


@pytest.mark.parametrize("store", ["sql"], indirect=True)  # none is asked
@pytest.mark.parametrize(
    "ageless",
    [
        pytest.param(lambda: "8e03978e-40d5-43dd-bc93-6894a57f9324", id="version 4"),
        pytest.param(lambda: "order", id="natural"),
        pytest.param(lambda: born(-86500), id="made in more than a day: nobody can say how old it is"),
    ],
)
@pytest.mark.parametrize("refuse", [True, "require"])
def test_a_key_without_a_birth_passes_unless_one_is_required(paying, ageless, refuse):
    api = paying(refuse_old_keys=refuse)
    response = api.post(ageless())
    if refuse == "require":
        assert (response.status_code, name_of(response)) == (400, "key-malformed")
        assert "UUID of version 7" in response.json["detail"]
        response = api.post(born(0))
    assert response.status_code == 201


def test_run_raises_it(paying):
    api, old = paying(), born(TTL + 1)

    def run(key, refuse):
        with api.app.app_context():
            options = {"name": "pay", "ttl": TTL, "atomic": api.atomic}
            return api.idempotency.run(key, api.pay, refuse_old_keys=refuse, **options)

    with pytest.raises(KeyExpired):
        run(old, True)
    with pytest.raises(KeyMalformed, match="version 7"):
        run("event-1", "require")
    assert api.count() == 0
    for key, refuse in (born(0), "require"), ("event-1", True), (old, False), (old, True):
        run(key, refuse)
    assert api.count() == 3
