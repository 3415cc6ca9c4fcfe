"""Another user's request with the same key, and a protection that is at the wrong place."""

from __future__ import annotations

import pytest
from flask import request, session

from flask_idempotency import idempotent
from flask_idempotency.testing import CRASH_POINTS, assert_idempotent, crash_at
from tests.testing_kit.test_wrong_endpoints import message

ALICE, BOB = ({"headers": {"X-User": name, "Accept": "*/*"}} for name in ("alice", "bob"))


def user():
    return request.headers.get("X-User")


def test_each_user_has_a_response_and_an_effect_of_their_own(shop):
    shop.view(lambda: ({"user": user()} | shop.pay()[0], 201), scope=user)
    first = assert_idempotent(shop.client, "POST", "/payments", json={}, **ALICE, other=BOB)
    assert first.json["user"] == "alice"
    for point in CRASH_POINTS:
        with crash_at(point):
            assert_idempotent(
                shop.client, "POST", "/payments", json={}, effects=shop.payments, other=BOB, **ALICE
            )


@pytest.mark.parametrize("scope", [None, lambda: "everybody"])
def test_users_who_share_their_keys_are_told(shop, scope):
    shop.view(shop.pay, scope=scope)
    said = message(shop, effects=shop.payments, **ALICE, other=BOB)
    assert "POST /payments: another user's request with the same key got 201 {" in said
    assert "it is taken for the first user's\n" in said
    assert "Let scope=..., the one of init_app() or of the route, return whose request it is" in said
    said = message(shop, effects=shop.payments, **ALICE, other={"json": {"amount": 6}, **BOB})
    assert "another user's request with the same key got 422" in said
    assert "scope=lambda" in said


@pytest.mark.parametrize("store", ["sql"], indirect=True)
class TestOther:
    def test_may_be_a_client_that_has_signed_in(self, shop):
        shop.app.secret_key = "secret"
        shop.app.add_url_rule("/in/<name>", "in", lambda name: session.update(user=name) or "")
        shop.view(shop.pay, scope=lambda: session.get("user"))
        alice, bob = shop.client, shop.client
        for client, name in ((alice, "alice"), (bob, "bob")):
            client.get(f"/in/{name}")
        assert_idempotent(alice, "POST", "/payments", other=bob)
        with pytest.raises(AssertionError, match="taken for the first user's"):
            assert_idempotent(alice, "POST", "/payments", other=alice)

    def test_has_to_succeed(self, shop):
        shop.view(shop.pay, scope=user)
        said = message(shop, effects=None, **ALICE, other={"headers": {}})
        assert "another user's request with the same key got 401" in said
        assert "one of a user who is signed in" in said

    def test_has_an_effect(self, shop):
        shop.view(lambda: shop.pay() if user() == "alice" else ({}, 201), scope=user)
        said = message(shop, effects=None, **ALICE, other=BOB)
        assert "another user's request with the same key had no effect of its own" in said

    def test_has_no_second_effect(self, shop):
        @shop.app.before_request
        def charge():
            if user() == "bob":
                shop.charge()

        shop.view(lambda: (shop.charge(), shop.pay())[1], scope=user)
        said = message(shop, **ALICE, other=BOB)
        assert "after retries of both users\n  charges rose by 2, not by 1\n" in said

    def test_has_the_same_key_if_it_is_the_tests_own(self, shop):
        shop.view(shop.pay, scope=lambda: "everybody")
        mine = {"headers": {"X-User": "alice", "Idempotency-Key": "mine"}}
        assert "taken for the first user's" in message(shop, effects=None, **mine, other=BOB)

    def test_of_an_operation_that_is_held_is_not_held(self, shop):
        shop.view(shop.pay, scope=user, atomic=False)
        with crash_at("before-commit"):
            assert_idempotent(
                shop.client, "POST", "/payments", effects=shop.payments, status=409, other=BOB, **ALICE
            )


@pytest.mark.parametrize("testing", [True, False])
@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_a_protection_above_the_route_is_told_by_name(shop, testing):
    shop.app.testing = testing

    @idempotent
    @shop.app.post("/payments")
    def create_payment():
        return shop.pay()

    said = message(shop, effects=None)
    assert said.startswith("POST /payments: the view is not protected\n")
    assert "create_payment, the view of the endpoint 'create_payment', is not protected by its" in said
    assert "Put @idempotent below the route." in said


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_a_decorator_that_hides_a_protection_is_named(shop):
    def charged(view):
        def charge_and_view(*args, **kwargs):
            shop.charge()
            return view(*args, **kwargs)

        return charge_and_view

    shop.view(charged(idempotent(shop.pay)), protect=None)
    said = message(shop, duplicates=0)
    assert "charges rose by 2, not by 1\nNothing protects" in said
    assert "A decorator without functools.wraps hides a protection below it" in said


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_a_route_that_finds_no_key_is_not_called_unprotected(shop):
    shop.view(shop.pay, required=False, key=lambda: None)
    said = message(shop, effects=None, duplicates=0)
    assert "got another response than the first request" in said
    assert "Does the route read its key where the request has it" in said


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_a_query_in_the_address_is_changed_too(shop):
    shop.view(shop.pay)
    assert_idempotent(shop.client, "POST", "/payments?currency=EUR")
    shop.app.view_functions["pay"] = idempotent(fingerprint=lambda: b"same")(shop.pay)
    said = message(shop, path="/payments?currency=EUR", json=None, effects=None)
    assert "the same key with another body got 201" in said


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_an_address_that_leads_nowhere(shop):
    shop.view(shop.pay)
    assert "the response is 404" in message(shop, path="/charges")
