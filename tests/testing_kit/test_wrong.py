"""Endpoints and tests as people write them, each with one mistake, and what the kit says of it."""

from __future__ import annotations

import json
import os
import uuid
from functools import partial

import pytest
import sqlalchemy as sa
from flask import g, request

from flask_idempotency import IdempotencyError, Retryable, after_commit, current_operation, idempotent
from flask_idempotency.testing import CRASH_POINTS, assert_idempotent, crash_at, every_crash
from tests.testing_kit.conftest import HYBRID, Shop

ALICE, BOB = ({"headers": {"X-User": name, "Accept": "*/*"}} for name in ("alice", "bob"))
RETRY = {"atomic": False, "on_interrupted": "retry"}
COUNT = "Does effects() count it?"
ALL = {"effects": Shop.effects}
OTHERS = "another user's request with the same key "
TWICE = "\n  charges changed by +2, not by +1\n"


def view(function=Shop.pay, *, before=None, after=None, **options):
    """A function that gives a shop this view, and what is called before or after each request."""

    def build(shop):
        if before:
            shop.app.before_request(lambda: before(shop))
        if after:
            shop.app.after_request(after)
        shop.view(lambda: function(shop), **options)

    return build


def then(*functions, **options):
    """A view that does all this."""
    return view(lambda shop: [function(shop) for function in functions][-1], **options)


def unprotected(shop):
    shop.app.add_url_rule("/payments", "pay", shop.pay, methods=["POST"])


def rejections_made_successes(shop):
    shop.app.register_error_handler(IdempotencyError, lambda error: {"error": str(error)})
    shop.view(shop.pay)


def with_testing_off(shop):
    shop.app.testing = False
    shop.view(lambda: 1 / 0)


def slow_duplicate(shop):
    if shop.charges:
        shop.over.wait(1.1)


def rolls_back(shop):
    shop.db.session.add(shop.Payment())
    shop.db.session.rollback()
    return {"ok": False}


def writes_through_the_engine(shop):
    with shop.db.engine.begin() as connection:
        connection.execute(sa.insert(shop.Payment))
    return {}, 201


def step(name, function):
    return lambda shop: (current_operation.step(name, lambda: function(shop)), ({}, 201))[1]


def catches_everything(status):
    def function(shop):
        try:
            return shop.pay()
        except BaseException:
            return {"ok": False}, status

    return view(function)


def number(response):
    response.headers["X-Request-Id"] = str(uuid.uuid4())
    return response


def in_an_envelope(response):
    response.set_data(json.dumps({"data": response.json, "served_at": str(uuid.uuid4())}))
    return number(response)


def webhook(shop):
    def pay():
        event = request.get_json()
        return shop.idempotency.run(event["id"], shop.pay, name="pay", payload=event)[0]

    shop.app.add_url_rule("/payments", "pay", pay, methods=["POST"])


def user():
    return request.headers.get("X-User")


def amount():
    return request.get_json()["amount"]


def attempt():
    return current_operation.attempt


# What is built, what the test passes, and what is said.
WRONG = {
    "no route": (
        view(),
        {"path": "/charges"},
        ["POST /charges: the first request got 404", "Send what"],
    ),
    "hidden": (with_testing_off, {}, ["500", "app.testing = True"]),
    "unprotected": (unprotected, {}, ["ran no operation", "Is @idempotent on the view"]),
    "no key": (view(key=lambda: None), {}, ["key-required", "The route saw no key: middleware"]),
    "a key that nobody misses": (
        view(key=lambda: None, required=False),
        {},
        ["ran no operation", "The route saw no key: middleware"],
    ),
    "rejections made successes": (
        rejections_made_successes,
        {},
        ["a duplicate got 200", "no replay", "an error handler turned a rejection into this"],
    ),
    "a view that calls run()": (
        webhook,
        {"json": {"id": "event-1"}},
        ["a retry got 200", "A run() in the view replays", "assert_idempotent_call(app, call)"],
    ),
    # The key, the scope and the fingerprint.
    "one scope": (
        view(),
        {"headers": {"Idempotency-Key": "mine"}, "other": BOB},
        ["taken for the first one", "share their keys"],
    ),
    "no amount": (view(fingerprint=["/currency"]), {}, ["was not rejected", "route's fingerprint"]),
    "chance": (view(fingerprint=lambda: os.urandom(8)), {}, ["duplicate got 422", "a random number"]),
    "half an identity": (
        view(key=lambda: request.get_json()["order"]),
        {
            "json": {"order": "1", "part": 1, "amount": 5},
            "changed": {"json": {"order": "1", "part": 1, "amount": 6}},
            "other": {"json": {"order": "1", "part": 2, "amount": 5}},
        },
        ["got 422", "A key must name the whole operation"],
    ),
    "others fail": (
        view(scope=user),
        {**ALICE, "other": {"headers": {}}},
        [f"{OTHERS}got 401", "signed in"],
    ),
    "others do nothing": (
        view(lambda shop: ({}, 201) if user() == "bob" else shop.pay(), scope=user),
        {**ALICE, "other": BOB},
        [f"{OTHERS}had no effect of its own", COUNT],
    ),
    "others twice": (
        then(
            Shop.charge,
            Shop.pay,
            before=lambda shop: shop.charge() if user() == "bob" else None,
            scope=user,
        ),
        {**ALICE, "other": BOB, **ALL},
        [f"after retries of both{TWICE}"],
    ),
    # Effects that are there twice.
    "before each request": (
        view(before=Shop.charge),
        ALL,
        ["charges changed by +4, not by +1", "before_request, after_request and teardown"],
    ),
    "before a changed request": (
        then(Shop.charge, Shop.pay, before=lambda shop: shop.charge() if amount() == 6 else None),
        ALL,
        [f"after a changed request with the same key{TWICE}"],
    ),
    "a rejected response": (
        then(slow_duplicate, Shop.charge, lambda _: ({}, 202), store=lambda response: False),
        ALL,
        ["charges changed by +", "store=... rejects the response"],
    ),
    "a charge before the commit": (
        then(Shop.charge, Shop.pay),
        ALL,
        [TWICE, "a call to another system", "a key from derive_key", "use every_crash()"],
    ),
    "a commit that is not atomic": (
        view(**RETRY),
        {},
        ["rows of payment changed by +2", "committed where atomic=False: write them in step(..."],
    ),
    "a step without a key": (
        view(step("charge", Shop.charge), **RETRY),
        {**ALL, "crash": lambda: crash_at("in-view")},
        ["between step 'charge' and its record", "derive_key('charge')"],
    ),
    "twice and not at all": (
        then(Shop.charge, lambda _: ({}, 201)),
        {**ALL, "crash": lambda: crash_at("before-commit")},
        [f"{TWICE[:-1]}\n  payments did not change\nThe retry repeated", COUNT],
    ),
    # Effects that are not there.
    "uncounted": (view(), {"effects": lambda _: {"mails": 0}}, [f"mails did not change\n{COUNT}"]),
    "an error inside": (view(rolls_back), {}, ["nothing was counted", "and roll nothing back"]),
    "after the commit": (
        then(lambda shop: after_commit(shop.charge), Shop.pay),
        ALL,
        ["charges", "right after the commit", "after_commit"],
    ),
    "trust": (
        view(lambda shop: ({"id": 0}, 201) if attempt() > 1 else shop.pay()),
        {},
        ["and a retry", "rows of payment changed by +0, not by +1", "is above 1"],
    ),
    # What comes back, and crashes.
    "another body": (view(after=in_an_envelope), {}, ["header X-Request-Id", "body, 'served_at'"]),
    "held": (
        view(atomic=False),
        {},
        ["after crash_at('before-commit') a retry got 409", "stays interrupted if on_interrupted='h"],
    ),
    "no crash": (
        view(lambda _: ({}, 500)),
        {"crash": lambda: crash_at("after-commit")},
        ["the first request got 500 {}\ncrash_at('after-commit') was not reached"],
    ),
    "caught": (
        catches_everything(500),
        {},
        ["something caught the crash, and the first request got 500", "BaseException"],
    ),
    "a success at any price": (
        catches_everything(200),
        {},
        ["something caught the crash, and the view returned", "BaseException"],
    ),
    "for ever": (
        view(lambda shop: shop.over.wait()),
        {"timeout": 0.3},
        ["has not returned within 0.3 s", "It waits for what never comes"],
    ),
}


def message(shop, crash=None, **kwargs):
    """What the kit says, at a crash, or without one and in every one."""
    if effects := kwargs.pop("effects", None):
        kwargs["effects"] = partial(effects, shop)
    check = partial(shop.check, crash()) if crash else shop.check_in_every_crash
    with pytest.raises(AssertionError) as error:
        check(**kwargs)
    return str(error.value)


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(shop, case):
    build, kwargs, words = WRONG[case]
    build(shop)
    said = message(shop, **kwargs)
    assert [each for each in words if each not in said] == [], said


@HYBRID
def test_a_second_writer_is_found_on_postgresql(shop):
    view(writes_through_the_engine)(shop)
    said = message(shop)
    assert "The retry repeated" in said
    assert "write through db.session" in said


def writes_before_the_view(shop):
    def begin():
        g.writer = shop.db.engine.connect()
        g.writer.execute(sa.insert(shop.Payment))

    shop.app.before_request(begin)
    shop.app.teardown_request(lambda _: g.writer.close())
    shop.view(shop.pay)


BUSY = {"connect_args": {"timeout": 0.05}}
POOL_OF_ONE = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 0.05}

# As above, with settings.
SETTINGS = {
    "a second writer": (
        {"SQLALCHEMY_ENGINE_OPTIONS": BUSY},
        then(Shop.pay, writes_through_the_engine),
        ["database is locked\n", "write through db.session"],
    ),
    "a pool of one": (
        {"SQLALCHEMY_ENGINE_OPTIONS": POOL_OF_ONE},
        view(),
        ["no connection left to count the effects\n", "Let the pool have more", "duplicates=0"],
    ),
    "a writer before the view": (
        {"SQLALCHEMY_ENGINE_OPTIONS": BUSY},
        writes_before_the_view,
        ["the first request got 503", "before the view, has a transaction open: commit or close it"],
    ),
    "switched off": (
        {"IDEMPOTENCY_ENABLED": False},
        view(),
        ["IDEMPOTENCY_ENABLED and IDEMPOTENCY_ENFORCE"],
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_what_is_wrong_on_sqlite_or_by_a_setting_is_said(make_shop, case):
    settings, build, words = SETTINGS[case]
    shop = make_shop(**settings)
    build(shop)
    said = message(shop, duplicates=int(case == "a pool of one"))
    assert [each for each in words if each not in said] == [], said


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_an_effect_before_the_view_is_not_put_down_to_the_crash(shop, point):
    view(before=Shop.charge)(shop)
    said = message(shop, lambda: crash_at(point), **ALL)
    assert "charges changed by +5, not by +1\nA retry repeats what runs outside" in said
    assert "the dead attempt" not in said


def test_an_error_of_the_view_comes_out_as_it_is(shop):
    shop.view(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        shop.check()


def test_a_key_that_was_used_before(shop):
    shop.view(shop.pay)
    mine = {"headers": {"Idempotency-Key": "mine"}}
    shop.check(**mine)
    assert "an earlier operation's response\nIts key was used before" in message(shop, **mine)


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
        shop.check(effects=effects)
    assert said in str(error.value)


class TestCrashes:
    """What is said of the crashes themselves."""

    @pytest.mark.parametrize(("point", "place"), [("after-claim", 1), ("in-view", 0), ("later", None)])
    def test_a_point_or_place_that_is_nowhere(self, point, place):
        with pytest.raises(
            ValueError, match="only 'in-view' has places|the points are after-claim, in"
        ):
            crash_at(point, place=place)

    def test_one_for_which_nothing_was_sent(self):
        with pytest.raises(AssertionError, match="not reached"), crash_at("in-view"):
            pass

    def test_every_crash_is_a_block_each(self):
        with pytest.raises(RuntimeError, match="with crash"):
            list(every_crash())

    def test_places_are_counted(self, shop):
        def pay():
            current_operation.step("charge", shop.charge, current_operation.derive_key("charge"))
            current_operation.step("pay", lambda: shop.pay()[0])
            return {}, 201

        shop.view(pay, **RETRY)
        shop.check(crash_at("in-view"), effects=shop.payments)
        said = message(shop, lambda: crash_at("in-view", place=3), **ALL)
        assert said.startswith("POST /payments: after crash_at('in-view', place=3) and a retry")
        assert "payments changed by +2, not by +1\n" in said
        said = message(shop, lambda: crash_at("in-view", place=4))
        assert "the first request got 201" in said
        assert "crash_at('in-view', place=4) was not reached" in said
        assert "attempt 1 passed 3" in said

    def test_a_second_attempt_is_no_whole_run_of_the_view(self, shop):
        """It has no place where the first one recorded a step."""

        def pay():
            shop.in_steps()
            if attempt() == 1:
                raise Retryable
            return {}, 201

        def check(status):
            key = {"headers": {"Idempotency-Key": str(uuid.uuid4())}}
            assert shop.client.post("/payments", json={"amount": 5}, **key).status_code == 503
            shop.check(**key, effects=dict)

        shop.view(pay, **RETRY)
        with pytest.raises(AssertionError, match="was not reached.* attempt 2 passed 0"):
            shop.died(check)

    def test_what_a_test_sets_up_does_not_die(self, shop):
        def check(status):
            with shop.app.app_context():
                shop.idempotency.run(str(uuid.uuid4()), lambda: shop.pay()[0], name="set-up")
            assert_idempotent(shop.client, "POST", "/charges", effects=shop.effects)

        shop.view(shop.pay)
        charge = idempotent(lambda: (shop.charge(), shop.pay())[1])
        shop.app.add_url_rule("/charges", "charge", charge, methods=["POST"])
        with pytest.raises(AssertionError, match=r"charges changed by \+2, not by \+1"):
            shop.died(check)

    def test_but_something_must(self, shop):
        shop.view(shop.pay)
        with pytest.raises(AssertionError, match=r"only what assert_idempotent"), next(every_crash()):
            shop.client.post("/payments", headers={"Idempotency-Key": "a"})
