"""What an operation does is counted, and one run's effect is whatever the first request alone did."""

from __future__ import annotations

import re
import threading
from decimal import Decimal
from functools import wraps

import pytest
import sqlalchemy as sa
from flask import request

from flask_idempotency import current_operation, idempotent
from flask_idempotency.testing import CRASH_POINTS, assert_idempotent, crash_at, every_crash, procedure
from tests.testing_kit.conftest import make_shop
from tests.testing_kit.test_wrong_endpoints import message

ONE_FILE = pytest.mark.parametrize("store", ["sql"], indirect=True)


@pytest.fixture
def balanced(store, tmp_path, request):
    """A shop with an account, whose balance is 500 of whatever type."""
    binds = {"audit": f"sqlite:///{tmp_path}/audit.db"}
    shop = make_shop(store, tmp_path, request, SQLALCHEMY_BINDS=binds)

    class Account(shop.db.Model):
        id = sa.Column(sa.Integer, primary_key=True)
        whole = sa.Column(sa.Integer, default=500)
        real = sa.Column(sa.Float, default=0.7)

    class Seen(shop.db.Model):
        __bind_key__ = "audit"
        id = sa.Column(sa.Integer, primary_key=True)

    with shop.app.app_context():
        shop.db.create_all()
        shop.account = Account()
        shop.db.session.add(shop.account)
        shop.db.session.commit()
        shop.account_id = shop.account.id
    shop.Account, shop.Seen = Account, Seen
    yield shop
    shop.close()


def before_each(shop):
    """What is called before each request, for a test to add to."""
    functions = []

    @shop.app.before_request
    def call():
        for function in functions:
            function()

    return functions


def withdraw(shop):
    account = shop.db.session.get(shop.Account, shop.account_id)
    account.whole -= 50
    account.real -= 0.1
    shop.db.session.commit()
    return {}, 201


def balances(shop):
    account = shop.db.session.get(shop.Account, shop.account_id)
    return {"whole": account.whole, "real": account.real, "decimal": Decimal(account.whole) / 3}


def test_any_number_of_rows_is_one_runs(shop):
    def view():
        shop.db.session.add_all([shop.Payment(), shop.Payment()])
        shop.db.session.commit()
        return {}, 201

    always = before_each(shop)
    shop.view(view)
    for crash in every_crash():
        with crash:
            assert_idempotent(shop.client, "POST", "/payments", effects=shop.payments)
            assert_idempotent(shop.client, "POST", "/payments")
    always.append(shop.pay)
    said = message(shop, effects=shop.payments, duplicates=0)
    assert "after a retry\n  effects() rose by 4, not by 3\n" in said
    assert "rows of payment rose by 4, not by 3" in message(shop, effects=None, duplicates=0)


@pytest.mark.parametrize("store", ["sql", "hybrid"], indirect=True)
def test_a_balance_may_fall(balanced):
    shop = balanced
    always = before_each(shop)
    shop.view(lambda: withdraw(shop))
    for crash in every_crash():
        with crash:
            assert_idempotent(shop.client, "POST", "/payments", effects=lambda: balances(shop))
    always.append(lambda: withdraw(shop))
    said = message(shop, effects=lambda: balances(shop), duplicates=0)
    assert "after a retry\n  whole changed by -150, not by -100" in said
    assert "real changed by -0.3" in said


@ONE_FILE
def test_rows_may_go(shop):
    with shop.app.app_context():
        shop.pay()

    def view():
        shop.db.session.delete(shop.db.session.scalars(sa.select(shop.Payment)).first())
        shop.db.session.commit()
        return "", 204

    shop.view(view)
    assert_idempotent(shop.client, "POST", "/payments")


@ONE_FILE
@pytest.mark.parametrize("counted", [True, False])
def test_what_a_crash_has_divided_is_one_runs_if_a_run_without_it_does_as_much(shop, counted):
    repeated = []

    def view():
        for each in repeated:
            each()
        for name in "ab":
            current_operation.step(name, lambda: shop.pay()[0], atomic=True)
        return {}, 201

    effects = shop.payments if counted else None
    shop.view(view, atomic=False, on_interrupted="retry")
    for crash in every_crash():
        with crash:
            assert_idempotent(shop.client, "POST", "/payments", effects=effects)
    repeated.append(shop.pay)
    said = message(shop, effects=effects, crash=crash_at("in-view", place=2))
    assert "rose by 4, not by 3\n" in said
    assert "The retry repeated what the dead attempt had done" in said


@ONE_FILE
def test_parts_that_may_be_a_repetition_are_to_be_counted_apart(shop):
    def view():
        for name in "ab":
            current_operation.step(name, lambda: shop.pay()[0], atomic=True)
        return {}, 201

    shop.view(view, atomic=False, on_interrupted="retry", key=lambda: request.get_json()["order"])
    body = {"json": {"order": "1"}, "crash": crash_at("in-view", place=3)}
    said = message(shop, effects=shop.payments, **body)
    assert "rose by 2, not by 1\n" in said
    assert "count the parts under names of their own" in said


@ONE_FILE
def test_halves_may_differ_from_the_whole_in_a_last_digit(balanced):
    def view():
        for name in "ab":
            current_operation.step(name, lambda: withdraw(balanced)[0], atomic=True)
        return {}, 201

    balanced.view(view, atomic=False, on_interrupted="retry")
    for crash in every_crash():
        with crash:
            assert_idempotent(balanced.client, "POST", "/payments", effects=lambda: balances(balanced))


def test_what_duplicates_write_is_told_where_they_have_to_wait_until_the_first_has_written(
    shop, monkeypatch
):
    monkeypatch.setattr(procedure, "IN_VIEW_SECONDS", 0.5)

    def and_pay(view):
        @wraps(view)
        def pay_and_view():
            response = view()
            if response.status_code == 409:
                shop.pay()
            return response

        return pay_and_view

    always = before_each(shop)
    shop.view(and_pay(idempotent(shop.pay)), protect=None)
    for effects in (shop.payments, None):
        said = message(shop, effects=effects)
        assert "rose by 4, not by 1\nA retry repeats what runs outside the view" in said
    always.append(shop.pay)
    assert re.search("rose by [5-8], not by 2\n", message(shop, effects=shop.payments))


@ONE_FILE
def test_what_only_concurrent_duplicates_do_is_told(shop):
    done = []

    def unless_done():
        if not done:
            shop.charge()

    def note(response):
        if response.status_code == 201:
            done.append(True)
        return response

    shop.app.before_request(unless_done)
    shop.app.after_request(note)
    shop.view(shop.pay)
    said = message(shop)
    assert "3 duplicates at the same time\n  charges rose by 4, not by 1\n" in said
    assert "payments" not in said.split("\n", 1)[1].split("A retry")[0]


def test_without_effects_the_rows_of_all_databases_are_counted(balanced):
    shop = balanced

    def see():
        with shop.db.engines["audit"].begin() as connection:
            connection.execute(sa.insert(shop.Seen))

    always = before_each(shop)
    shop.view(shop.pay)
    assert_idempotent(shop.client, "POST", "/payments")
    always.append(see)
    said = message(shop, effects=None)
    assert "\n  rows of seen (bind 'audit') rose by 4, not by 1\nA retry repeats" in said
    with shop.app.app_context():
        shop.Seen.__table__.drop(shop.db.engines["audit"])
    always.clear()
    assert_idempotent(shop.client, "POST", "/payments")


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_what_nothing_is_known_of_is_not_green(shop):
    shop.view(lambda: ({}, request.args.get("status", 201)))
    said = message(shop, effects=None)
    assert said.startswith("POST /payments: after the first request, with 3 duplicates")
    assert "nothing was counted\nNo row was added to" in said
    assert "effects=dict" in said
    with pytest.raises(AssertionError, match="nothing was counted"), crash_at("before-commit"):
        assert_idempotent(shop.client, "POST", "/payments")
    for point in CRASH_POINTS:
        with crash_at(point):
            assert_idempotent(shop.client, "POST", "/payments", effects=dict)
    assert_idempotent(shop.client, "POST", "/payments?status=404", status=404)


@ONE_FILE
@pytest.mark.parametrize(
    ("effects", "said"),
    [
        ([1, 2], "This is of the type list"),
        ("payments", "This is of the type str"),
        (lambda: ["a"], "effects() is of the type list"),
        (lambda: {"mails": ["a"]}, "'mails' is of the type list"),
        (lambda: {"balance": None}, "'balance' is None (SQL's sum() of no rows is NULL: coalesce it)"),
    ],
)
def test_effects_of_a_wrong_type_are_told(shop, effects, said):
    shop.view(shop.pay)
    with pytest.raises(TypeError) as error:
        assert_idempotent(shop.client, "POST", "/payments", effects=effects)
    assert said in str(error.value)


@ONE_FILE
def test_a_query_is_no_function(shop):
    with shop.app.app_context():
        query = shop.db.session.query(shop.Payment)
    with pytest.raises(TypeError, match="effects=lambda"):
        assert_idempotent(shop.client, "POST", "/payments", effects=query)


@pytest.mark.parametrize(("duplicates", "point"), [(0, "in-view"), (3, None)])
@ONE_FILE
def test_a_view_that_never_returns_is_told(shop, duplicates, point):
    comes = threading.Event()

    def wait_for_what_never_comes():
        comes.wait()
        return shop.pay()

    shop.view(wait_for_what_never_comes)
    try:
        said = message(shop, point, duplicates=duplicates, timeout=1)
        left = [each for each in threading.enumerate() if each.name == "assert_idempotent"]
        assert [thread.daemon for thread in left] == [True], "it would keep the process from ending"
    finally:
        comes.set()
        for thread in threading.enumerate():
            if thread.name == "assert_idempotent":
                thread.join()
    assert said.startswith("POST /payments: a request has not returned within 1 s\n")
    assert "timeout=..." in said
