"""What is wrong is caught, by a message that says what differs and where to look."""

from __future__ import annotations

import itertools
import re
import uuid
from contextlib import nullcontext

import pytest
import sqlalchemy as sa
from flask import request

from flask_idempotency import IdempotencyError, Retryable, current_operation, idempotent
from flask_idempotency.testing import CRASH_POINTS, assert_idempotent, crash_at, every_crash
from tests.testing_kit.conftest import Shop


def message(shop, point=None, crash=None, path="/payments", **kwargs):
    """What the kit says, to somebody who counts everything."""
    kwargs = {"json": {"amount": 5}, "effects": shop.effects, **kwargs}
    crash = crash or (crash_at(point) if point else nullcontext())
    with pytest.raises(AssertionError) as error, crash:
        assert_idempotent(shop.client, "POST", path, **kwargs)
    return str(error.value)


def test_a_view_without_protection(shop):
    shop.view(shop.pay, protect=None)
    said = message(shop, effects=None, duplicates=0)
    assert "POST /payments: a retry got another response than the first request" in said
    assert re.search(r"body, 'id': first \d+, then \d+\n", said)
    assert "Nothing protects tests.testing_kit.conftest.Shop.pay: put @idempotent on it" in said
    shop.app.view_functions["pay"] = lambda: (shop.pay(), "same")[1]
    assert "without the header Idempotent-Replayed" in message(shop, effects=dict)
    said = message(shop, effects=None)
    assert "rows of payment rose by 4, not by 1\nNothing protects" in said
    assert "effects() rose by 4, not by 1" in message(shop, effects=shop.payments)


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_a_later_step_that_commits_by_itself(shop):
    def view():
        current_operation.step("charge", shop.charge, current_operation.derive_key("charge"))
        current_operation.step("pay", lambda: shop.pay()[0])
        return {}, 201

    shop.view(view, atomic=False, on_interrupted="retry")
    request = (shop.client, "POST", "/payments")
    with crash_at("in-view"):
        assert_idempotent(*request, json={}, effects=shop.payments)
    for place in (2, 3):
        with pytest.raises(AssertionError, match="rose by 2"), crash_at("in-view", place=place):
            assert_idempotent(*request, json={}, effects=shop.payments)
    said = message(shop, effects=shop.payments, crash=crash_at("in-view", place=4))
    assert "the first request got 201" in said
    assert "crash_at('in-view', place=4) was not reached: the view has 3 such places" in said


def test_each_place_is_found_without_being_counted(shop):
    def view():
        current_operation.step("charge", shop.charge, current_operation.derive_key("charge"))
        current_operation.step("pay", lambda: shop.pay()[0])
        return {}, 201

    shop.view(view, atomic=False, on_interrupted="retry")
    blocks = every_crash()
    for _ in ("after-claim", "in-view (place 1)"):
        with next(blocks):
            assert_idempotent(shop.client, "POST", "/payments", json={}, effects=shop.effects)
    said = message(shop, crash=next(blocks))
    assert said.startswith("POST /payments: after crash_at('in-view', place=2) and a retry, with 3 dup")
    assert "payments rose by 2" in said


@pytest.mark.parametrize("store", ["sql"], indirect=True)
class TestEveryCrash:
    def test_is_a_block_each(self, shop):
        with pytest.raises(RuntimeError, match="with crash"):
            list(every_crash())

    def test_needs_an_operation_of_its_own_for_each(self, shop):
        shop.view(shop.pay)
        blocks, request = every_crash(), (shop.client, "POST", "/payments")
        with next(blocks):
            assert_idempotent(*request, headers={"Idempotency-Key": "a"})
        with (
            pytest.raises(AssertionError, match="place=1.* was not reached.*is the key new"),
            next(blocks),
        ):
            assert_idempotent(*request, headers={"Idempotency-Key": "a"})

    @pytest.mark.parametrize("send", ["a request", "a message"])
    def test_leaves_what_a_test_sets_up_alone(self, shop, send):
        def set_up():
            key = str(uuid.uuid4())
            if send == "a request":
                return shop.client.post("/payments", headers={"Idempotency-Key": key})
            with shop.app.app_context():
                return shop.idempotency.run(key, lambda: shop.pay()[0], name="set-up")

        def pay_and_charge():
            shop.charge()
            return shop.pay()

        def crash_everywhere():
            for crash in every_crash():
                with crash:
                    set_up()
                    assert_idempotent(shop.client, "POST", "/charges", effects=shop.effects)

        shop.view(shop.pay)
        shop.app.add_url_rule("/charges", "charge", idempotent(pay_and_charge), methods=["POST"])
        with pytest.raises(AssertionError, match="charges rose by 2, not by 1"):
            crash_everywhere()

    def test_is_not_content_with_requests_that_nothing_is_asserted_of(self, shop):
        shop.view(shop.pay)
        for crash in itertools.islice(every_crash(), 1):
            with (
                pytest.raises(
                    AssertionError, match=r"only what assert_idempotent or.*use crash_at\(\)"
                ),
                crash,
            ):
                shop.client.post("/payments", headers={"Idempotency-Key": "a"})


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_each_block_of_a_place_needs_an_operation_of_its_own(shop):
    def view():
        current_operation.step("a", lambda: 1)
        current_operation.step("b", lambda: 1)
        return {}, 201

    shop.view(view, atomic=False, on_interrupted="retry")

    def crash_everywhere():
        for place in (1, 2, 3):
            with crash_at("in-view", place=place):
                shop.client.post("/payments", headers={"Idempotency-Key": "a"})

    with pytest.raises(AssertionError, match="place=3.* attempt 3 .*a new key"):
        crash_everywhere()


@pytest.mark.parametrize(("point", "place"), [("after-claim", 1), ("in-view", 0), ("in-view", -1)])
def test_a_place_that_can_be_nowhere(point, place):
    with pytest.raises(ValueError, match="only 'in-view' has places, from 1 on"):
        crash_at(point, place=place)


def test_an_after_request_function_that_adds_what_each_run_makes(shop):
    numbers = itertools.count()
    shop.view(shop.pay)

    @shop.app.after_request
    def number(response):
        response.headers["X-Run"] = str(next(numbers))
        return response

    @shop.app.after_request
    def stamp(response):
        if request.headers.get("X-Stamp"):
            response.set_data(f"at {next(numbers)}")
        return response

    said = message(shop, effects=None, duplicates=0)
    assert "header X-Run: first 0, then 1" in said
    assert "after_request functions and middleware run on it again" in said
    assert_idempotent(
        shop.client, "POST", "/payments", json={}, effects=shop.payments, ignore_headers=["x-run"]
    )
    said = message(shop, effects=None, ignore_headers=["X-Run"], headers={"X-Stamp": "1"})
    assert re.search(r"body: first at \d+, then at \d+", said)


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_a_vary_that_is_not_the_sessions(shop):
    shop.view(shop.pay)
    names = iter(["Cookie, X-First", *["X-Later"] * 9])

    @shop.app.after_request
    def vary(response):
        response.headers["Vary"] = next(names)
        return response

    said = message(shop, effects=None, duplicates=0)
    assert "header Vary: first X-First, then X-Later" in said


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_a_handler_that_makes_every_rejection_a_success(shop):
    shop.view(shop.pay)
    shop.app.register_error_handler(IdempotencyError, lambda error: ({"done": True}, 200))
    said = message(shop, effects=shop.payments)
    assert "a duplicate of a running request got 200" in said
    said = message(shop, effects=shop.payments, duplicates=0)
    assert 'with another body got 200 {"done":true}, not 422' in said


def test_a_crash_that_is_caught_still_commits_nothing(shop):
    def view():
        try:
            return shop.pay()
        except BaseException:
            return shop.pay()

    shop.view(view)
    with crash_at("in-view"):
        assert_idempotent(shop.client, "POST", "/payments", json={}, effects=shop.payments)


class TestACrashThatIsCaught:
    @pytest.fixture(autouse=True)
    def swallow(self, shop):
        def view():
            try:
                return shop.pay()
            except BaseException:
                return {}, 200

        shop.view(view)

    def test_it_is_named_although_the_view_succeeds(self, shop):
        with shop.app.app_context():
            before = shop.payments()
        assert "something caught the crash, and the view returned" in message(shop, "in-view")
        with shop.app.app_context():
            assert shop.payments() == before

    def test_so_it_is_for_a_plain_request(self, shop):
        with (
            pytest.raises(AssertionError, match="in-view.*something caught the crash"),
            crash_at("in-view"),
        ):
            shop.client.post("/payments", json={}, headers={"Idempotency-Key": "plain"})


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_a_request_that_fails_says_nothing_of_idempotency(shop):
    shop.view(lambda: ({"error": "no such customer"}, 404))
    said = message(shop, effects=None)
    assert 'after the first request the response is 404 {"error":"no such customer"}' in said
    assert "status=" in said
    assert "is 404" in message(shop, effects=None, status=201)
    assert_idempotent(shop.client, "POST", "/payments", json={}, effects=shop.payments, status=404)


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_a_crash_that_never_happens(shop):
    shop.view(lambda: ({}, 500))
    said = message(shop, "after-commit", effects=None)
    assert "the first request got 500" in said
    assert "crash_at('after-commit') was not reached" in said
    with pytest.raises(AssertionError, match="not reached"), crash_at("in-view"):
        pass


@pytest.mark.parametrize("store", ["sql"], indirect=True)
class TestWhatIsMissing:
    def test_because_it_is_not_counted(self, shop):
        shop.view(shop.pay)
        for point in (None, "after-claim", "in-view"):
            said = message(shop, point, effects=lambda: {"mails": 0})
            assert "mails did not change\n" in said
            assert "Does effects() count it, and can it see what is committed?" in said
            assert "before_request" not in said
            assert "the dead attempt" not in said

    def test_because_the_response_is_not_stored(self, shop):
        shop.view(shop.pay, store=lambda response: False)
        said = message(shop, effects=shop.payments)
        assert "effects() did not change" in said
        assert "If store=... rejects the response, the view's writes are rolled back" in said
        assert "before_request" not in said

    def test_while_something_else_is_there_twice(self, shop):
        shop.view(shop.charge)
        shop.app.view_functions["pay"] = idempotent(lambda: (shop.charge(), ({}, 201))[1])
        said = message(shop, "before-commit")
        assert "charges rose by 2, not by 1\n  payments did not change\n" in said
        assert "the dead attempt" in said
        assert "Does effects() count it" in said


@pytest.mark.parametrize("store", ["sql"], indirect=True)
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_an_effect_before_the_view_is_not_put_down_to_the_crash(shop, point):
    shop.view(shop.pay)
    shop.app.before_request(shop.charge)
    said = message(shop, point)
    assert "charges rose by 5, not by 1" in said
    assert "before_request" in said
    assert "the dead attempt" not in said


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_an_operation_that_is_held_says_so(shop):
    shop.view(shop.pay, atomic=False)
    said = message(shop, "before-commit", effects=shop.payments)
    assert "operation-interrupted" in said
    assert "status=409" in said


def test_a_point_that_does_not_exist():
    with (
        pytest.raises(ValueError, match="the points are " + ", ".join(CRASH_POINTS)),
        crash_at("later"),
    ):
        pass


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_an_error_of_the_view_comes_out_as_it_is(shop):
    def view():
        raise Retryable

    shop.view(view, atomic=False)
    said = message(shop, effects=None)
    assert "the response is 503" in said
    shop.app.view_functions["pay"] = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        assert_idempotent(shop.client, "POST", "/payments", json={})


@pytest.mark.parametrize("store", ["sql"], indirect=True)
@pytest.mark.parametrize("status", [None, 201])
def test_or_the_message_says_how(shop, status):
    shop.view(lambda: 1 / 0)
    shop.app.testing = False
    said = message(shop, effects=None, status=status)
    assert "the response is 500" in said
    assert "app.testing = True shows the error" in said


@pytest.mark.parametrize("store", ["sql"], indirect=True)
@pytest.mark.parametrize("effects", [None, dict])
def test_a_scope_that_is_another_one_in_each_request_is_named(shop, effects):
    shop.view(shop.pay, scope=lambda: f"alice-{uuid.uuid4()}")
    assert "scope=..." in message(shop, effects=effects)


@pytest.mark.parametrize("point", [None, "before-commit"])
def test_a_protection_that_is_switched_off_is_named(tmp_path, point):
    shop = Shop("sql", f"sqlite:///{tmp_path}/off.db", IDEMPOTENCY_ENABLED=False)
    shop.view(shop.pay)
    said = message(shop, point)
    assert "the view is not protected\nIDEMPOTENCY_ENABLED is False" in said
    shop.close()


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_a_form_whose_change_is_refused_is_told_to_pass_another(shop):
    shop.app.before_request(lambda: None if request.form["amount"] == "5" else ("No", 400))
    shop.view(shop.pay)
    said = message(shop, json=None, effects=None, data={"amount": "5"})
    assert "the same key with another body got 400 No, not 422" in said
    assert "changed={'data': {...}} for a form" in said


@pytest.mark.parametrize("store", ["sql"], indirect=True)
class TestATestThatIsWrong:
    """It is told what to write instead."""

    def test_has_one_key_for_two_operations(self, shop):
        shop.view(shop.pay)
        mine = {"headers": {"Idempotency-Key": "mine"}}
        assert_idempotent(shop.client, "POST", "/payments", **mine)
        said = message(shop, effects=dict, json=None, **mine)
        assert "the first request got 201 {" in said
        assert "an earlier operation's response\nIts key was used before" in said

    def test_has_the_same_data_in_each_block(self, shop):
        def view():
            order = request.get_json()["order"]
            if shop.db.session.scalar(sa.select(shop.Payment).filter_by(order=order)):
                return {"error": "this order is paid"}, 409
            return shop.pay(order)

        shop.view(view)
        said = []
        for crash in every_crash():
            try:
                with crash:
                    assert_idempotent(shop.client, "POST", "/payments", json={"order": "1"})
            except AssertionError as error:
                said.append(str(error))
                break
        assert "the response is 409 {" in said[0]
        assert (
            "If it conflicts with what an earlier request wrote, let each send other data." in said[0]
        )
        assert "on_interrupted" not in said[0]

    def test_does_not_expect_an_operation_that_is_held(self, shop):
        shop.view(shop.pay, atomic=False)
        said = message(shop, "before-commit")
        assert "stays interrupted: pass status=409" in said
        assert "conflicts" not in said

    def test_leaves_out_a_slash(self, shop):
        shop.app.add_url_rule("/orders/", "orders", idempotent(shop.pay), methods=["POST"])
        said = message(shop, path="/orders")
        assert "POST /orders: the request is redirected to " in said
        assert "/orders/\nSend it to the address of the route" in said
        follow = {"effects": shop.payments, "follow_redirects": True}
        assert_idempotent(shop.client, "POST", "/orders", json={}, **follow)

    @pytest.mark.parametrize("point", [None, "before-commit"])
    def test_does_not_see_the_error_of_its_view(self, shop, point):
        shop.app.testing = False
        shop.view(lambda: 1 / 0)
        assert "app.testing = True shows the error" in message(shop, point)

    def test_has_arguments_of_a_wrong_type(self, shop):
        shop.view(shop.pay)
        with pytest.raises(TypeError, match=r"app\.test_client\(\)\. This is of the type Flask"):
            assert_idempotent(shop.app, "POST", "/payments")
        for name in ("changed", "other"):
            with pytest.raises(TypeError, match=f"{name} must be arguments.* This is of the type str"):
                assert_idempotent(shop.client, "POST", "/payments", **{name: "bob"})
