"""``assert_idempotent_call``: right and wrong consumers of messages."""

from __future__ import annotations

import itertools
import uuid
from contextlib import nullcontext
from functools import partial

import pytest
from flask import request

from flask_idempotency import KeyReused, OperationInterrupted, RequestInProgress
from flask_idempotency.testing import assert_idempotent_call, crash_at
from tests.testing_kit.conftest import CLAIM, ON_EACH, OUTSIDE
from tests.testing_kit.test_wrong import RETRY


@pytest.fixture
def order():
    """What a message is about; a new one for each test, as the databases are used again."""
    return str(uuid.uuid4())


@pytest.fixture
def consume(shop, order):
    """Consumes a message about an order."""

    def consume(order=order, *, amount=5, function=lambda: shop.pay()[0], **options):
        return shop.idempotency.run(order, function, **{"name": "pay", "payload": amount, **options})

    return consume


@pytest.fixture
def crashes(shop):
    """Says where the function died, one message after the other."""

    def check(call, effects):
        assert_idempotent_call(shop.app, partial(call, str(uuid.uuid4())), effects=effects)

    return lambda call, effects: shop.died(check, call, effects)


@pytest.fixture
def message(shop):
    """What the kit says to somebody who counts the payments."""

    def message(call, crash=None, **kwargs):
        with pytest.raises(AssertionError) as error, crash or nullcontext():
            assert_idempotent_call(shop.app, call, **{"effects": shop.payments, **kwargs})
        return str(error.value)

    return message


class TestRight:
    """What is right passes."""

    @ON_EACH
    def test_a_message_that_is_consumed_once(self, shop, consume, crashes, order):
        result = assert_idempotent_call(
            shop.app,
            consume,
            changed=lambda: consume(amount=6),
            other=lambda: consume(f"{order}-2"),
        )
        assert set(result) == {"id"}
        died = crashes(consume, shop.payments)
        assert died == [*OUTSIDE, "crash_at('in-view', place=1)", "nowhere", CLAIM]

    def test_steps_with_a_derived_key(self, shop, consume, crashes):
        died = crashes(partial(consume, function=lambda: shop.in_steps()[0], **RETRY), shop.effects)
        assert died[2:6] == [*(f"crash_at('in-view', place={n})" for n in (1, 2, 3)), "nowhere"]

    def test_an_operation_that_nobody_runs_again(self, shop, consume):
        with crash_at("in-view"):
            assert_idempotent_call(
                shop.app,
                partial(consume, atomic=False),
                changed=partial(consume, amount=6, atomic=False),
                effects=shop.payments,
                raises=OperationInterrupted,
            )

    def test_a_message_of_two_operations(self, shop, consume, crashes):
        def work(order):
            consume(f"{order}-a", function=lambda: shop.charge(order))
            consume(f"{order}-b")

        crashes(work, shop.effects)

    def test_errors_that_the_consumer_translates_for_its_queue(self, shop, consume):
        def translated(amount=5):
            try:
                return consume(amount=amount)
            except RequestInProgress:
                raise LookupError from None
            except KeyReused:
                return "logged and dropped"

        changed = partial(translated, 6)
        assert_idempotent_call(shop.app, translated, changed=changed, effects=shop.payments)

    def test_a_request_to_a_webhook_whose_view_calls_run(self, shop, consume, crashes):
        def deliver(order):
            response = shop.client.post("/payments", json={"id": order})
            assert response.status_code < 400

        shop.app.add_url_rule(
            "/payments", "pay", lambda: consume(request.get_json()["id"]), methods=["POST"]
        )
        crashes(deliver, shop.payments)


class TestWrong:
    """What is wrong is caught, by a message that says what and where to look."""

    def test_a_call_that_is_no_operation(self, shop, message):
        def consume():
            return shop.pay()[0]

        said = message(consume)
        assert "consume: the first call returned {'id': 1}, and ran no operation\n" in said
        assert "idempotency.run" in said
        assert "no protected request or run() got that far" in message(consume, crash_at("in-view"))

    @pytest.mark.parametrize(("duplicates", "what"), [(3, "a duplicate"), (0, "a retry")])
    def test_a_key_that_each_delivery_makes_anew(self, consume, message, duplicates, what):
        said = message(lambda: consume(str(uuid.uuid4())), effects=dict, duplicates=duplicates)
        assert f": {what} returned {{'id': " in said
        assert "which is no replay of the first\n" in said
        assert "Is its key or scope=... another one" in said

    @pytest.mark.parametrize("crash", [None, "in-view"])
    def test_a_payload_that_each_delivery_makes_anew(self, consume, message, crash):
        times = itertools.count()
        said = message(lambda: consume(amount=next(times)), crash and crash_at(crash))
        who = "after crash_at('in-view') a retry" if crash else "a duplicate"
        assert f"{who} raised KeyReused(" in said
        assert "or payload=..., depend on a time" in said

    def test_a_payload_that_is_not_given(self, consume, message):
        same = partial(consume, payload=None)
        said = message(same, changed=same)
        assert "a changed call with the same key returned {'id': 1}, and was not rejected" in said

    def test_a_result_that_each_delivery_makes_anew(self, consume, message):
        times = itertools.count()
        said = message(lambda: [consume(), next(times)], duplicates=0)
        assert "a retry returned [{'id': 1}, 1], which differs from the first\n" in said
        assert "Let a call return what run() returns" in said

    def test_a_function_that_fails_or_should(self, consume, message):
        said = message(partial(consume, function=lambda: 1 / 0))
        assert "the first call raised ZeroDivisionError('division by zero'), not a result" in said
        said = message(consume, raises=LookupError)
        assert "the first call returned {'id': 1}, not LookupError" in said

    def test_a_duplicate_that_is_swallowed(self, consume, message):
        def call():
            try:
                return consume()
            except RequestInProgress:
                return None

        said = message(call)
        assert "call: a duplicate of a running call returned None\n" in said
        assert "Let RequestInProgress out" in said
