"""``assert_idempotent_call``: right and wrong consumers of messages."""

from __future__ import annotations

import itertools
import uuid
from contextlib import nullcontext
from functools import partial

import pytest

from flask_idempotency import KeyReused, OperationInterrupted, RequestInProgress, current_operation
from flask_idempotency.testing import assert_idempotent_call, crash_at, every_crash

SQL = pytest.mark.parametrize("store", ["sql"], indirect=True)


@pytest.fixture
def order():
    """What a message is about; a new one for each test, as the databases are used again."""
    return str(uuid.uuid4())


@pytest.fixture
def consume(shop):
    """Consumes a message about an order."""

    def consume(order, amount=5, function=lambda: shop.pay()[0], **options):
        return shop.idempotency.run(order, function, **{"name": "pay", "payload": amount, **options})

    return consume


def message(shop, call, crash=None, **kwargs):
    """What the kit says to somebody who counts the payments."""
    with pytest.raises(AssertionError) as error, crash or nullcontext():
        assert_idempotent_call(shop.app, call, **{"effects": shop.payments, **kwargs})
    return str(error.value)


def crashes(shop, call, **kwargs):
    """Where the function died, one message after the other."""
    died = []
    for crash in every_crash():
        with crash as at:
            assert_idempotent_call(shop.app, partial(call, str(uuid.uuid4())), **kwargs)
        died.append(repr(at) if at.happened else "nowhere")
    return died


class TestRight:
    """What is right passes."""

    def test_a_message_that_is_consumed_once(self, shop, consume, order):
        result = assert_idempotent_call(
            shop.app,
            lambda: consume(order),
            changed=lambda: consume(order, amount=6),
            other=lambda: consume(f"{order}-2"),
        )
        assert set(result) == {"id"}

    def test_and_crashes(self, shop, consume):
        assert crashes(shop, consume, effects=shop.payments) == [
            "crash_at('after-commit')", "crash_at('before-commit')", "crash_at('in-view', place=1)",
            "nowhere", "crash_at('after-claim')",
        ]  # fmt: skip

    def test_steps_with_a_derived_key(self, shop, consume):
        def work():
            current_operation.step("charge", shop.charge, current_operation.derive_key("charge"))
            current_operation.step("pay", lambda: shop.pay()[0], atomic=True)

        in_steps = partial(consume, function=work, atomic=False, on_interrupted="retry")
        died = crashes(shop, in_steps, effects=shop.effects)
        assert died[2:6] == [*(f"crash_at('in-view', place={n})" for n in (1, 2, 3)), "nowhere"]

    @SQL
    def test_an_operation_that_nobody_runs_again(self, shop, consume, order):
        with crash_at("in-view"):
            assert_idempotent_call(
                shop.app,
                lambda: consume(order, atomic=False),
                changed=lambda: consume(order, amount=6, atomic=False),
                effects=shop.payments,
                raises=OperationInterrupted,
            )

    @SQL
    def test_a_message_of_two_operations(self, shop, consume):
        def work(order):
            consume(f"{order}-a", function=lambda: shop.charge(order))
            consume(f"{order}-b")

        crashes(shop, work, effects=shop.effects)

    @SQL
    def test_errors_that_the_consumer_translates_for_its_queue(self, shop, consume, order):
        class Redeliver(Exception):
            pass

        def translated(amount=5):
            try:
                return consume(order, amount)
            except RequestInProgress:
                raise Redeliver from None
            except KeyReused:
                return "logged and dropped"

        assert_idempotent_call(
            shop.app, translated, changed=lambda: translated(6), effects=shop.payments
        )


@SQL
class TestWrong:
    """What is wrong is caught, by a message that says what and where to look."""

    def test_a_call_that_is_no_operation(self, shop):
        def consume():
            return shop.pay()[0]

        said = message(shop, consume)
        assert "consume: the first call returned {'id': 1}, and ran no operation\n" in said
        assert "idempotency.run" in said
        assert "no protected request or run() got that far" in message(
            shop, consume, crash_at("in-view")
        )

    def test_a_key_that_was_used_before(self, shop, consume, order):
        call = lambda: consume(order)  # noqa: E731
        assert_idempotent_call(shop.app, call, effects=shop.payments)
        assert "an earlier operation's response\nIts key was used before" in message(shop, call)
        assert "is the key new" in message(shop, call, crash_at("before-commit"))

    @pytest.mark.parametrize(("duplicates", "what"), [(3, "a duplicate"), (0, "a retry")])
    def test_a_key_that_each_delivery_makes_anew(self, shop, consume, duplicates, what):
        said = message(shop, lambda: consume(str(uuid.uuid4())), effects=dict, duplicates=duplicates)
        assert f": {what} returned {{'id': " in said
        assert "which is no replay of the first\n" in said
        assert "Is its key or scope=... another one" in said
        assert "a job's identifier" in message(shop, lambda: consume(str(uuid.uuid4())))

    @pytest.mark.parametrize("crash", [None, "in-view"])
    def test_a_payload_that_each_delivery_makes_anew(self, shop, consume, order, crash):
        times = itertools.count()
        said = message(shop, lambda: consume(order, next(times)), crash and crash_at(crash))
        who = "after crash_at('in-view') a retry" if crash else "a duplicate"
        assert f"{who} raised KeyReused(" in said
        assert "or payload=..., depend on a time" in said

    def test_a_payload_that_is_not_given(self, shop, consume, order):
        same = lambda: consume(order, None)  # noqa: E731
        said = message(shop, same, changed=same)
        assert "a changed call with the same key returned {'id': 1}, and was not rejected" in said

    def test_an_effect_beside_the_operation(self, shop, consume, order):
        said = message(shop, lambda: (shop.charge(), consume(order))[1], effects=shop.effects)
        assert "charges rose by 4, not by 1\nA retry repeats what" in said
        assert "what a call does beside run()" in said

    def test_a_result_that_each_delivery_makes_anew(self, shop, consume, order):
        times = itertools.count()
        said = message(shop, lambda: [consume(order), next(times)], duplicates=0)
        assert "a retry returned [{'id': 1}, 1], which differs from the first\n" in said
        assert "Let a call return what run() returns" in said

    def test_a_function_that_fails(self, shop, consume, order):
        def fails():
            raise LookupError("no such order")

        said = message(shop, lambda: consume(order, function=fails))
        assert "the first call raised LookupError('no such order'), not a result" in said
        said = message(shop, lambda: consume(order), raises=LookupError)
        assert "the first call returned {'id': 1}, not LookupError" in said

    def test_a_duplicate_that_is_swallowed(self, shop, consume, order):
        def call():
            try:
                return consume(order)
            except RequestInProgress:
                return None

        said = message(shop, call)
        assert "call: a duplicate of a running call returned None\n" in said
        assert "Let RequestInProgress out" in said
