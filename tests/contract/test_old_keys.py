"""A key that is older than the memory of it is refused, on every store; a record is found first."""

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from flask_idempotency import KeyExpired, KeyMalformed, Retryable, current_operation
from flask_idempotency.core.keys import uuid7
from tests.contract.test_requests import shop, store  # noqa: F401 -- fixtures
from tests.killed import Killed

TTL = 60
ONE_STORE = pytest.mark.parametrize("store", ["sql"], indirect=True)
"""For what is decided before any store is asked."""


def born(seconds_ago):
    """A key that was made so long ago."""
    return uuid7(round((time.time() - seconds_ago) * 1000), secrets.token_bytes(10))


AGELESS = {
    "version 4": lambda: "8e03978e-40d5-43dd-bc93-6894a57f9324",
    "natural": lambda: "order",
    "made in more than a day": lambda: born(-86500),
}


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


def test_an_old_key_without_a_record_is_refused_and_runs_nothing(paying):
    api, key = paying(), born(TTL + 1)
    for _ in range(2):
        response = api.post(key)
        assert (response.status_code, name_of(response)) == (409, "key-expired")
        assert "new key" in response.json["detail"]
        assert "Retry-After" not in response.headers
        assert response.headers["Cache-Control"] == "no-store"
    assert api.count() == 0


def test_a_young_key_runs_and_one_from_the_future_is_young(paying):
    api = paying()
    for ago in TTL - 30, -86000:
        key = born(ago)
        assert [api.post(key).status_code for _ in range(2)] == [201, 201]
    assert api.count() == 2


def test_what_was_done_is_replayed_however_old_its_key_is(paying, later):
    api, key, unknown = paying(), born(0), born(0)
    assert api.post(key).status_code == 201
    later(TTL + 1)
    assert name_of(api.post(unknown)) == "key-expired"
    assert api.post(key).headers["Idempotent-Replayed"] == "true"
    assert name_of(api.post(key, json={"changed": True})) == "key-reused"
    assert api.count() == 1


def test_what_still_runs_is_in_progress(paying, later):
    inside, go_on, key = Event(), Event(), born(0)

    def view():
        inside.set()
        assert go_on.wait(10)
        return {}, 201

    api = paying(view)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(api.post, key)
        assert inside.wait(10)
        later(TTL + 1)
        assert name_of(api.post(key)) == "request-in-progress"
        go_on.set()
        assert first.result().status_code == 201
    assert api.post(key).headers["Idempotent-Replayed"] == "true"


ENDS = {
    "released": (Retryable, {}, 201),
    "interrupted": (Killed, {}, "operation-interrupted"),
    "to be tried again": (Killed, {"on_interrupted": "retry"}, 201),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_has_finished_a_step_goes_on_and_charges_once(paying, later, end):
    """A client that is refused would take a new key, and charge a second time."""
    error, options, expected = ENDS[end]
    charged, errors, key = [], [error], born(0)

    def view():
        current_operation.step("charge", charged.append, current_operation.attempt)
        if errors:
            raise errors.pop()
        return {}, 201

    api = paying(view, atomic=False, **options)
    if error is Killed:
        with pytest.raises(Killed):
            api.post(key)
    else:
        assert api.post(key).status_code == 503
    later(TTL + 1)
    response = api.post(key)
    assert expected in (response.status_code, name_of(response))
    assert charged == [1]


def test_what_was_given_back_may_be_tried_again(paying, later):
    errors, key = [Retryable], born(0)

    def view():
        if errors:
            raise errors.pop()
        return {}, 201

    api = paying(view)
    assert api.post(key).status_code == 503
    later(TTL + 1)
    assert api.post(key).status_code == 201


@pytest.mark.parametrize("store", ["sql", "redis", "hybrid", "postgres"], indirect=True)
def test_what_is_found_is_what_is_replayed_whatever_becomes_of_it_then(paying, later, monkeypatch):
    """Its record expires and is purged, the lock is forgotten: between the look-up and a claim."""
    api, key = paying(), born(0)
    assert api.post(key).status_code == 201
    later(TTL + 1)
    records = api.app.extensions["idempotency"].records
    look = records.look

    def look_at_the_last_moment(hashed):
        found = look(hashed)
        assert records.admin().erase([hashed]) == 1
        return found

    with monkeypatch.context() as patch:
        patch.setattr(records, "look", look_at_the_last_moment)
        assert api.post(key).headers["Idempotent-Replayed"] == "true"
    assert name_of(api.post(key)) == "key-expired"
    assert api.count() == 1


@ONE_STORE
def test_a_key_without_a_birth_passes_unless_one_is_required(paying):
    """Nor does one that was made more than a day from now: nobody can say how old that is."""
    api = paying()
    for make in AGELESS.values():
        assert api.post(make()).status_code == 201


@ONE_STORE
def test_one_that_is_required_is_asked_for_by_name(paying):
    api = paying(refuse_old_keys="require")
    for make in AGELESS.values():
        response = api.post(make())
        assert (response.status_code, name_of(response)) == (400, "key-malformed")
        assert "UUID of version 7" in response.json["detail"]
    assert api.post(born(0)).status_code == 201


@ONE_STORE
def test_without_the_option_an_old_key_runs(paying):
    api, key = paying(refuse_old_keys=False), born(TTL + 1)
    assert [api.post(key).status_code for _ in range(2)] == [201, 201]
    assert api.count() == 1


def test_run_raises_it(paying):
    api = paying()
    options = {"name": "pay", "ttl": TTL, "atomic": api.atomic}

    def run(key, refuse):
        with api.app.app_context():
            return api.idempotency.run(key, api.pay, refuse_old_keys=refuse, **options)

    old = born(TTL + 1)
    with pytest.raises(KeyExpired):
        run(old, True)
    with pytest.raises(KeyMalformed, match="version 7"):
        run("event-1", "require")
    assert api.count() == 0
    run(born(0), "require")
    run("event-1", True)
    run(old, False)
    assert api.count() == 3
    run(old, True)
    assert api.count() == 3
