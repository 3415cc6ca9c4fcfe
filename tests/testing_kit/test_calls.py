"""``assert_idempotent_call``: right and wrong consumers of messages, on every store."""

from __future__ import annotations

import itertools
import uuid
from contextlib import nullcontext, suppress
from functools import partial

import pytest

from flask_idempotency import (
    KeyReused,
    OperationInterrupted,
    RequestInProgress,
    current_operation,
)
from flask_idempotency.testing import (
    CRASH_POINTS,
    assert_idempotent_call,
    crash_at,
    every_crash,
    procedure,
)

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
            effects=shop.payments,
        )
        assert set(result) == {"id"}

    def test_and_crashes(self, shop, consume):
        assert crashes(shop, consume, effects=shop.payments) == [
            "crash_at('after-claim')", "crash_at('in-view', place=1)", "nowhere",
            "crash_at('before-commit')", "crash_at('after-commit')",
        ]  # fmt: skip

    def test_steps_with_a_derived_key(self, shop, consume):
        def work():
            current_operation.step("charge", shop.charge, current_operation.derive_key("charge"))
            current_operation.step("pay", lambda: shop.pay()[0], atomic=True)

        in_steps = partial(consume, function=work, atomic=False, on_interrupted="retry")
        died = crashes(shop, in_steps, effects=shop.effects)
        assert died[1:5] == [*(f"crash_at('in-view', place={n})" for n in (1, 2, 3)), "nowhere"]

    def test_rows_are_counted_where_the_test_counts_nothing(self, shop, consume, order):
        assert_idempotent_call(shop.app, lambda: consume(order))

    @pytest.mark.parametrize("store", ["sql", "hybrid"], indirect=True)
    def test_a_dead_attempt_and_its_retry_that_do_a_part_each(self, shop, consume, order):
        def work():
            for step in "ab":
                current_operation.step(step, lambda: shop.pay()[0], atomic=True)

        in_steps = partial(consume, function=work, atomic=False, on_interrupted="retry")
        with crash_at("in-view", place=3):
            assert_idempotent_call(
                shop.app,
                lambda: in_steps(order),
                other=lambda: in_steps(f"{order}-2"),
                effects=shop.payments,
            )

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
    def test_a_duplicate_that_waits_for_the_first(self, shop, consume, order, monkeypatch):
        monkeypatch.setattr(procedure, "IN_VIEW_SECONDS", 0.2)
        assert_idempotent_call(
            shop.app, lambda: consume(order, wait=30), effects=shop.payments, duplicates=2
        )

    @SQL
    def test_a_message_of_two_operations(self, shop, consume):
        def work(order):
            consume(f"{order}-a", function=lambda: shop.charge(order))
            consume(f"{order}-b")

        crashes(shop, work, effects=shop.effects)

    @SQL
    def test_a_message_of_two_operations_that_do_the_same(self, shop, consume, order):
        def work(order):
            for part in "ab":
                consume(f"{order}-{part}")

        def crash_everywhere(**kwargs):
            for number, crash in enumerate(every_crash()):
                mine = f"{order}-{number}-{len(kwargs)}"
                others = {name: partial(call, f"{mine}-2") for name, call in kwargs.items()}
                with crash:
                    assert_idempotent_call(
                        shop.app, partial(work, mine), effects=shop.payments, **others
                    )

        crash_everywhere(other=work)
        with pytest.raises(AssertionError, match="other=... shows what the whole is"):
            crash_everywhere()

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
    def test_a_loop_that_acknowledges_after_the_commit(self, shop, consume):
        acknowledged = []

        def deliver(order, amount=5):
            try:
                consume(order, amount)
            except RequestInProgress:
                return  # it is delivered again
            except KeyReused:
                pass  # a producer's mistake, which no later delivery mends
            acknowledged.append(order)

        died = crashes(shop, deliver, effects=shop.payments, acknowledged=lambda: len(acknowledged))
        assert len(died) == 5


class TestWrong:
    """What is wrong is caught, by a message that says what and where to look."""

    def test_a_call_that_is_no_operation(self, shop):
        def consume():
            return shop.pay()[0]

        said = message(shop, consume)
        assert "consume: the first call returned {'id': " in said
        assert "and ran no operation\n" in said
        assert "idempotency.run" in said
        assert "no protected request or run() got that far" in message(
            shop, consume, crash_at("in-view")
        )

    def test_a_key_that_was_used_before(self, shop, consume, order):
        call = lambda: consume(order)  # noqa: E731
        assert_idempotent_call(shop.app, call, effects=shop.payments)
        said = message(shop, call)
        assert "an earlier operation's result" in said
        assert "a message of its own" in said
        assert "is the key new" in message(shop, call, crash_at("before-commit"))

    def test_a_key_that_each_delivery_makes_anew(self, shop, consume):
        said = message(shop, lambda: consume(str(uuid.uuid4())))
        assert "a duplicate returned {'id': " in said
        assert "got no stored result\nIt was another operation" in said
        assert "a retry returned {'id': " in message(
            shop, lambda: consume(str(uuid.uuid4())), duplicates=0
        )

    @SQL
    def test_a_payload_that_each_delivery_makes_anew(self, shop, consume, order):
        times = itertools.count()
        said = message(shop, lambda: consume(order, next(times)))
        assert "a duplicate raised KeyReused(" in said
        assert "Let payload=... depend on what the message says" in said
        said = message(shop, lambda: consume(f"{order}-2", next(times)), crash_at("in-view"))
        assert "after crash_at('in-view') a retry raised KeyReused(" in said
        assert "Let payload=... depend on what the message says" in said

    @SQL
    def test_a_key_that_all_messages_share(self, shop, consume, order):
        said = message(shop, lambda: consume("invoice"), other=lambda: consume("invoice"))
        assert "another message returned {'id': 1}, and ran no operation of its own" in said
        assert "Let key=... and scope=... name what the message is about" in said

    @SQL
    def test_another_message_that_has_no_effect(self, shop, consume, order):
        said = message(shop, lambda: consume(order), other=lambda: consume(f"{order}-2", function=dict))
        assert "another message had no effect of its own" in said

    @SQL
    def test_a_payload_that_is_not_given(self, shop, consume, order):
        same = lambda: consume(order, None)  # noqa: E731
        said = message(shop, same, changed=same)
        assert "the same key with another payload returned {'id': 1}, and was not rejected" in said

    def test_an_effect_beside_the_operation(self, shop, consume, order):
        def call():
            shop.charge()
            return consume(order)

        said = message(shop, call, effects=shop.effects)
        assert "charges rose by 4, not by 1\nA retry repeats what the call does beside run()" in said

    @pytest.mark.parametrize("point", ["in-view", "before-commit"])
    def test_a_charge_before_the_commit(self, shop, consume, order, point):
        def work():
            shop.charge()
            return shop.pay()[0]

        said = message(
            shop, lambda: consume(order, function=work), crash_at(point), effects=shop.effects
        )
        assert "charges rose by 2, not by 1" in said
        assert "a call to another system" in said

    @SQL
    def test_work_of_which_nothing_is_counted(self, shop, consume, order):
        said = message(shop, lambda: consume(order, function=shop.charge), effects=None)
        assert "nothing was counted" in said
        said = message(shop, lambda: consume(f"{order}-2", function=shop.charge))
        assert "effects() did not change\nDoes effects() count it" in said

    @SQL
    def test_a_result_that_each_delivery_makes_anew(self, shop, consume, order):
        times = itertools.count()
        said = message(shop, lambda: [consume(order), next(times)], duplicates=0)
        assert "a retry returned [{'id': 1}, 1], but the first call returned [{'id': 1}, 0]" in said

    @SQL
    def test_a_function_that_fails(self, shop, consume, order):
        def fails():
            raise LookupError("no such order")

        said = message(shop, lambda: consume(order, function=fails))
        assert "the first call raised LookupError('no such order'), not a result" in said
        said = message(shop, lambda: consume(order), raises=LookupError)
        assert "the first call returned {'id': 1}, not LookupError" in said

    @SQL
    def test_an_operation_that_is_held_unexpectedly(self, shop, consume, order):
        said = message(shop, lambda: consume(order, atomic=False), crash_at("in-view"))
        assert "raises=OperationInterrupted" in said

    @SQL
    def test_a_worker_that_catches_everything(self, shop, consume, order):
        def call():
            try:
                return consume(order)
            except:  # noqa: E722
                return "sorry"

        said = message(shop, call, crash_at("in-view"))
        assert "call: something caught the crash, and the first call returned 'sorry'" in said

    @SQL
    def test_a_duplicate_that_is_swallowed(self, shop, consume, order):
        def call():
            try:
                return consume(order)
            except RequestInProgress:
                return None

        said = message(shop, call)
        assert "call: a duplicate of a running call returned None\n" in said
        assert "Let RequestInProgress out" in said


@SQL
class TestAcknowledged:
    """A message that the call acknowledges itself, too early or never."""

    @pytest.fixture
    def acknowledged(self):
        return []

    def said(self, shop, acknowledged, call, crash=None):
        return message(shop, call, crash, acknowledged=lambda: len(acknowledged))

    @pytest.mark.parametrize("point", [None, *CRASH_POINTS[:3]])
    def test_before_the_work(self, shop, consume, order, acknowledged, point):
        def call():
            acknowledged.append(order)
            return consume(order)

        said = self.said(shop, acknowledged, call, crash_at(point) if point else None)
        died = f"the first call died in crash_at('{point}')"
        where = died if point else "the first call was still in its function"
        assert f"call: a message was acknowledged when {where}\n" in said
        assert "its work is lost" in said

    def test_in_the_function(self, shop, consume, order, acknowledged):
        def work():
            shop.pay()
            acknowledged.append(order)

        said = self.said(shop, acknowledged, lambda: consume(order, function=work))
        assert "a message was acknowledged when the first call was still in its function" in said

    def test_by_a_duplicate_beside_the_work(self, shop, consume, order, acknowledged):
        def call():
            with suppress(RequestInProgress):
                consume(order)
            acknowledged.append(order)

        said = self.said(shop, acknowledged, call)
        assert "a message was acknowledged when the first call was still in its function" in said

    def test_in_a_finally_block(self, shop, consume, order, acknowledged):
        def call():
            try:
                return consume(order)
            finally:
                acknowledged.append(order)

        assert "was acknowledged" in self.said(shop, acknowledged, call, crash_at("after-claim"))

    def test_never_for_a_retry(self, shop, consume, order, acknowledged):
        def call():
            result = consume(order)
            if not acknowledged:
                acknowledged.append(order)
            return result

        said = self.said(shop, acknowledged, call)
        assert "a retry's message was not acknowledged" in said
        assert "again and again" in said


@pytest.mark.parametrize("store", ["sql", "hybrid"], indirect=True)
def test_afterwards_the_application_is_as_before(shop, consume, order):
    state = shop.app.extensions["idempotency"]
    before = state.records, state.lock, state.engine
    with crash_at("after-commit"):
        assert_idempotent_call(shop.app, lambda: consume(order), effects=shop.payments)
    assert (state.records, state.lock, state.engine) == before
