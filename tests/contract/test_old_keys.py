"""A key that is older than the memory of it is refused, on every store; a record is found first."""

import secrets
import time

import pytest
from werkzeug.http import http_date

from flask_idempotency import KeyExpired, KeyMalformed
from flask_idempotency.core.keys import uuid7
from tests.contract.test_requests import shop, store  # noqa: F401 -- fixtures

TTL = 60
IN_MEMORY = pytest.mark.parametrize("store", ["memory"], indirect=True)
"""For what is decided before any store is asked."""


def born(seconds_ago):
    """A key that was made so long ago."""
    return uuid7(round((time.time() - seconds_ago) * 1000), secrets.token_bytes(10))


AGELESS = {
    "version 4": lambda: "8e03978e-40d5-43dd-bc93-6894a57f9324",
    "natural": lambda: "order",
    "made in more than a day": lambda: born(-86500),
}


def sent(seconds_ago):
    return {"Repeatability-First-Sent": http_date(time.time() - seconds_ago)}


@pytest.fixture
def paying(shop):  # noqa: F811
    """A shop that refuses old keys, one that requires their age, or whatever the options say."""

    def open_(**options):
        shop.view(
            lambda: (shop.pay(), ({}, 201))[1], **{"ttl": TTL, "refuse_old_keys": True, **options}
        )
        return shop

    return open_


def post(api, key, headers=None, **kwargs):
    headers = {"Idempotency-Key": key, **(headers or {})}
    return api.app.test_client().post("/payments", headers=headers, **{"json": {}, **kwargs})


def name_of(response):
    return response.json["type"].rpartition(":")[2]


def test_an_old_key_without_a_record_is_refused_and_runs_nothing(paying):
    api, key = paying(), born(TTL + 1)
    for _ in range(2):
        response = post(api, key)
        assert (response.status_code, name_of(response)) == (409, "key-expired")
        assert "new key" in response.json["detail"]
        assert "Retry-After" not in response.headers
        assert response.headers["Cache-Control"] == "no-store"
    assert api.count() == 0


def test_a_young_key_runs_and_one_from_the_future_is_young(paying):
    api = paying()
    for ago in TTL - 30, -86000:
        key = born(ago)
        assert [post(api, key).status_code for _ in range(2)] == [201, 201]
    assert api.count() == 2


def test_a_record_is_found_however_old_its_key_is(paying):
    """A retry and a changed request get what they always get, and a free record may be taken over."""
    api, key = paying(), born(TTL - 0.5)
    assert post(api, key).status_code == 201
    while (left := TTL + 0.01 - (time.time() - int(key[:8] + key[9:13], 16) / 1000)) > 0:
        time.sleep(left)
    assert post(api, born(TTL + 0.01)).status_code == 409
    assert post(api, key).headers["Idempotent-Replayed"] == "true"
    assert name_of(post(api, key, json={"changed": True})) == "key-reused"
    assert api.count() == 1


def test_the_header_says_it_of_a_key_that_does_not(paying):
    api = paying()
    assert name_of(post(api, "order-1", sent(TTL + 2))) == "key-expired"
    assert post(api, "order-1", sent(TTL - 30)).status_code == 201
    assert post(api, "order-1", sent(TTL + 2)).headers["Idempotent-Replayed"] == "true"
    assert post(api, born(0), sent(TTL + 2)).status_code == 201, "the key's own word comes first"


UNREADABLE = [
    "",
    "yesterday",
    "1764109516",
    "Sun, 99 Nov 1994 08:49:37 GMT",
    "Sun, 06 Nov 1994 08:49:37 +99999999999999999999",
    "Sun, 31 Dec 9999 23:59:59 -2359",
]


@IN_MEMORY
def test_a_key_without_a_birth_passes_unless_one_is_required(paying):
    """Nor does one that was made more than a day from now: nobody can say how old that is."""
    api = paying()
    for make in AGELESS.values():
        assert post(api, make()).status_code == 201
    for number, value in enumerate(UNREADABLE):
        assert post(api, f"order-{number}", {"Repeatability-First-Sent": value}).status_code == 201


@IN_MEMORY
def test_one_that_is_required_is_asked_for_by_name(paying):
    api = paying(refuse_old_keys="require")
    for make in AGELESS.values():
        response = post(api, make())
        assert (response.status_code, name_of(response)) == (400, "key-malformed")
        for way in "UUID of version 7", "Repeatability-First-Sent":
            assert way in response.json["detail"]
        assert post(api, make(), sent(1)).status_code == 201, "it may be in the header"
    for value in UNREADABLE:
        assert post(api, "order-2", {"Repeatability-First-Sent": value}).status_code == 400
    assert post(api, born(0)).status_code == 201


@IN_MEMORY
def test_without_the_option_an_old_key_runs(paying):
    api, key = paying(refuse_old_keys=False), born(TTL + 1)
    assert [post(api, key, sent(TTL + 1)).status_code for _ in range(2)] == [201, 201]
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
