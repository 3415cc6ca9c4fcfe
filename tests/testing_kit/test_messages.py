"""What the kit says of single mistakes, of endpoints and of tests. Whole endpoints are in the zoo."""

from __future__ import annotations

import itertools
import uuid
from contextlib import nullcontext

import pytest
import sqlalchemy as sa
from flask import request

from flask_idempotency import Retryable, current_operation, idempotent
from flask_idempotency.testing import CRASH_POINTS, assert_idempotent, crash_at, every_crash
from tests.testing_kit.conftest import Shop

SQL = pytest.mark.parametrize("store", ["sql"], indirect=True)

ALICE, BOB = ({"headers": {"X-User": name, "Accept": "*/*"}} for name in ("alice", "bob"))
NOBODY = {"headers": {}}


def message(shop, crash=None, path="/payments", **kwargs):
    """What the kit says, to somebody who counts everything."""
    kwargs = {"json": {"amount": 5}, "effects": shop.effects, **kwargs}
    crash = crash_at(crash) if isinstance(crash, str) else crash or nullcontext()
    with pytest.raises(AssertionError) as error, crash:
        assert_idempotent(shop.client, "POST", path, **kwargs)
    return str(error.value)


def user():
    return request.headers.get("X-User")


def fail():
    return 1 / 0


def protected(view=Shop.pay, **options):
    """A shop whose view this is."""
    return lambda shop: shop.view(lambda: view(shop), **options)


def unless(condition, view=Shop.pay, **options):
    """One that does nothing if ``condition``."""
    return protected(lambda shop: ({}, 201) if condition() else view(shop), **options)


def pays_and(more, view=Shop.pay, **options):
    return protected(lambda shop: (more(shop), view(shop))[1], **options)


def with_before(more, build):
    def added(shop):
        shop.app.before_request(lambda: more(shop))
        build(shop)

    return added


def with_after(more, build):
    def added(shop):
        shop.app.after_request(more)
        build(shop)

    return added


def with_testing_off(build):
    def off(shop):
        shop.app.testing = False
        build(shop)

    return off


def paid_once(shop):
    def view():
        order = request.get_json()["order"]
        if shop.db.session.scalar(sa.select(shop.Payment).filter_by(order=order)):
            return {"error": "this order is paid"}, 409
        return shop.pay(order)

    shop.view(view)
    with shop.app.app_context():
        shop.pay("1")


def in_two_steps(shop):
    def view():
        for name in "ab":
            current_operation.step(name, lambda: shop.pay()[0], atomic=True)
        return {}, 201

    shop.view(view, atomic=False, on_interrupted="retry")


COUNT = "Does effects() count it?"
ALL = {"effects": Shop.effects}
OTHERS = "another user's request with the same key "

# What is built, what the test passes, and what is said.
CASES = {
    "no route": (protected(), {"path": "/charges"}, ["POST /charges: the first request got 404"]),
    "an error": (protected(lambda _: ({"error": "x"}, 404)), {}, ['404 {"error":"x"}, not a status']),
    "a conflict": (paid_once, {"json": {"order": "1"}}, ["409", "let each send other data"]),
    "retryable": (protected(lambda _: _raise(Retryable()), atomic=False), {}, ["request got 503"]),
    "a hidden error": (
        with_testing_off(protected(lambda _: fail())),
        {},
        ["500", "app.testing = True"],
    ),
    "no crash": (
        protected(lambda _: ({}, 500)),
        {"crash": "after-commit"},
        ["the first request got 500 {}\ncrash_at('after-commit') was not reached"],
    ),
    "held": (
        protected(atomic=False),
        {"crash": "before-commit"},
        ["after crash_at('before-commit') a retry got 409", "stays interrupted: pass status=409"],
    ),
    "a scope for each": (
        protected(scope=uuid.uuid4),
        {},
        ["no replay", "Is its key or scope=... another one"],
    ),
    "a query": (
        protected(fingerprint=lambda: b"same"),
        {"path": "/payments?currency=EUR", "json": None},
        ["a changed request with the same key got 201"],
    ),
    "uncounted": (protected(), {"effects": lambda: {"mails": 0}}, [f"mails did not change\n{COUNT}"]),
    "parts": (
        in_two_steps,
        {"place": 3},
        ["rose by 2, not by 1\n", "use every_crash()"],
    ),
    "others fail": (
        protected(scope=user),
        {**ALICE, "other": NOBODY},
        [f"{OTHERS}got 401", "signed in"],
    ),
    "others twice": (
        with_before(
            lambda shop: shop.charge() if user() == "bob" else None,
            pays_and(Shop.charge, scope=user),
        ),
        {**ALL, **ALICE, "other": BOB},
        ["after retries of both\n  charges rose by 2, not by 1\n"],
    ),
}


def _raise(error):
    raise error


@SQL
@pytest.mark.parametrize("case", CASES)
def test_it_says(shop, case):
    build, kwargs, words = CASES[case]
    build(shop)
    kwargs = {"effects": None, **kwargs}
    if kwargs["effects"] is Shop.effects:
        kwargs["effects"] = shop.effects
    if "place" in kwargs:
        kwargs["crash"] = crash_at("in-view", place=kwargs.pop("place"))
    said = message(shop, **kwargs)
    assert [each for each in words if each not in said] == [], said


def test_a_request_after_which_something_is_there_twice_and_something_missing(shop):
    shop.view(lambda: (shop.charge(), ({}, 201))[1])
    said = message(shop, "before-commit")
    assert "charges rose by 2, not by 1\n  payments did not change\nThe retry repeated" in said
    assert COUNT in said


@SQL
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_an_effect_before_the_view_is_not_put_down_to_the_crash(shop, point):
    with_before(Shop.charge, protected())(shop)
    said = message(shop, point)
    assert "charges rose by 5, not by 1\nA retry repeats what runs outside" in said
    assert "the dead attempt" not in said


@SQL
def test_a_protection_that_is_switched_off_is_named(tmp_path, store):
    shop = Shop(store, f"sqlite:///{tmp_path}/off.db", IDEMPOTENCY_ENABLED=False)
    shop.view(shop.pay)
    assert "IDEMPOTENCY_ENABLED and IDEMPOTENCY_ENFORCE" in message(shop)
    shop.close()


@SQL
def test_an_error_of_the_view_comes_out_as_it_is(shop):
    shop.view(fail)
    with pytest.raises(ZeroDivisionError):
        assert_idempotent(shop.client, "POST", "/payments", json={})


@SQL
def test_a_key_that_was_used_before(shop):
    shop.view(shop.pay)
    mine = {"headers": {"Idempotency-Key": "mine"}}
    assert_idempotent(shop.client, "POST", "/payments", **mine)
    said = message(shop, effects=dict, json=None, **mine)
    assert "the first request got 201 {" in said
    assert "an earlier operation's response\nIts key was used before" in said


@SQL
@pytest.mark.parametrize(
    ("effects", "said"),
    [
        ({"mails": 1}, "effects is {'mails': 1}"),
        (lambda: {"mails": ["a"]}, "mails is ['a']"),
        (lambda: {"balance": None}, "balance is None (SQL's sum() of no rows is NULL: coalesce it)"),
    ],
)
def test_effects_of_a_wrong_type_are_told(shop, effects, said):
    shop.view(shop.pay)
    with pytest.raises(TypeError) as error:
        assert_idempotent(shop.client, "POST", "/payments", effects=effects)
    assert said in str(error.value)


def test_who_writes_before_the_view_is_told_to_commit(tmp_path):
    options = {"connect_args": {"timeout": 0.05}}
    shop = Shop("sql", f"sqlite:///{tmp_path}/db", SQLALCHEMY_ENGINE_OPTIONS=options)
    shop.view(shop.pay)
    connections = []

    @shop.app.before_request
    def begin():
        connections.append(shop.db.engine.connect())
        connections[-1].execute(sa.insert(shop.Payment))

    said = message(shop, duplicates=0)
    assert "the first request got 503" in said
    assert "or something before the view, has a transaction open: commit or close it" in said
    for connection in connections:
        connection.close()
    shop.close()


@pytest.mark.parametrize(("point", "place"), [("after-claim", 1), ("in-view", 0), ("later", None)])
def test_a_point_or_place_that_is_nowhere(point, place):
    with pytest.raises(ValueError, match="only 'in-view' has places|the points are after-claim, in"):
        crash_at(point, place=place)


def test_a_crash_for_which_nothing_was_sent():
    with pytest.raises(AssertionError, match="not reached"), crash_at("in-view"):
        pass


def test_every_crash_is_a_block_each():
    with pytest.raises(RuntimeError, match="with crash"):
        list(every_crash())


@SQL
class TestCrashes:
    """What is said of the crashes themselves."""

    def test_places_are_counted(self, shop):
        def view():
            current_operation.step("charge", shop.charge, current_operation.derive_key("charge"))
            current_operation.step("pay", lambda: shop.pay()[0])
            return {}, 201

        shop.view(view, atomic=False, on_interrupted="retry")
        with crash_at("in-view"):
            assert_idempotent(shop.client, "POST", "/payments", json={}, effects=shop.payments)
        for place in (2, 3):
            said = message(shop, crash_at("in-view", place=place))
            assert said.startswith(
                f"POST /payments: after crash_at('in-view', place={place}) and a retry"
            )
            assert "payments rose by 2" in said
        said = message(shop, crash_at("in-view", place=4))
        assert "the first request got 201" in said
        assert "crash_at('in-view', place=4) was not reached" in said
        assert "attempt 1 passed 3" in said

    @pytest.mark.parametrize("send", ["a request", "a message"])
    def test_what_a_test_sets_up_does_not_die(self, shop, send):
        def set_up():
            key = str(uuid.uuid4())
            if send == "a request":
                return shop.client.post("/payments", headers={"Idempotency-Key": key})
            with shop.app.app_context():
                return shop.idempotency.run(key, lambda: shop.pay()[0], name="set-up")

        def crash_everywhere():
            for crash in every_crash():
                with crash:
                    set_up()
                    assert_idempotent(shop.client, "POST", "/charges", effects=shop.effects)

        shop.view(shop.pay)
        charge = idempotent(lambda: (shop.charge(), shop.pay())[1])
        shop.app.add_url_rule("/charges", "charge", charge, methods=["POST"])
        with pytest.raises(AssertionError, match="charges rose by 2, not by 1"):
            crash_everywhere()

    def test_but_something_must(self, shop):
        shop.view(shop.pay)
        for crash in itertools.islice(every_crash(), 1):
            with (
                pytest.raises(AssertionError, match=r"only what assert_idempotent.*crash_at\(\)"),
                crash,
            ):
                shop.client.post("/payments", headers={"Idempotency-Key": "a"})
