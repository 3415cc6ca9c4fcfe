"""What is right passes, with and without a crash, and what a test may pass."""

from __future__ import annotations

import io
import uuid
from functools import partial

import pytest
import sqlalchemy as sa
from flask import Response, abort, g, redirect, request, session, stream_with_context
from flask.testing import FlaskClient

from flask_idempotency import idempotent
from flask_idempotency.testing import assert_idempotent, crash_at, procedure
from tests.testing_kit.conftest import CLAIM, HYBRID, ON_EACH, OUTSIDE
from tests.testing_kit.test_wrong import ALICE, BOB, RETRY, number, user


def streamed(shop):
    def body():
        yield str(shop.pay()[0]["id"])

    return Response(stream_with_context(body()), 201)


def order():
    return request.get_json()["order"]


def named():
    body = {"order": str(uuid.uuid4()), "amount": 5}
    return {"json": body, "changed": {"json": {**body, "amount": 6}}}


RIGHT = {
    "an insert": (lambda shop: shop.pay(), {}, dict),
    "a natural key": (lambda shop: shop.pay(order()), {"key": order}, named),
    "a stream": (streamed, {}, dict),
    "a scope for each": (lambda shop: shop.pay(), {"scope": user}, lambda: {**ALICE, "other": BOB}),
    "a rejection that is stored": (lambda shop: ({}, 404), {}, lambda: {"status": 404}),
}


@ON_EACH
@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_passes_as_it_is_and_in_every_crash(shop, case):
    function, options, arguments = RIGHT[case]
    shop.view(lambda: function(shop), **options)
    shop.check(**arguments())
    shop.died(lambda status: shop.check(**arguments()))


@ON_EACH
def test_every_crash_of_steps(shop):
    shop.view(shop.in_steps, **RETRY)
    places = [f"crash_at('in-view', place={number})" for number in (1, 2, 3)]
    died = shop.died(lambda status: shop.check(effects=shop.effects))
    assert died == [*OUTSIDE, *places, "nowhere", CLAIM]


def test_every_crash_of_a_view_without_places_and_of_one_that_is_held(shop):
    shop.view(lambda: ({}, 201))
    assert shop.died(lambda status: shop.check(effects=dict)) == [*OUTSIDE, "nowhere", CLAIM]
    shop.check(crash_at("in-view"), effects=dict)
    shop.app.view_functions["pay"] = idempotent(atomic=False)(shop.pay)
    died = shop.died(shop.check, status=lambda point: 201 if point == "after-commit" else 409)
    assert died == [*OUTSIDE, "crash_at('in-view', place=1)", "nowhere", CLAIM]


@HYBRID
@pytest.mark.parametrize("options", [{}, RETRY], ids=["atomic", "leased"])
def test_a_retry_after_the_block_is_not_kept_waiting_by_the_dead(shop, options):
    shop.view(shop.pay, **options)
    key = {"Idempotency-Key": str(uuid.uuid4())}
    with crash_at("before-commit", shop.app):
        shop.client.post("/payments", headers=key)
    assert "Idempotent-Replayed" not in shop.client.post("/payments", headers=key).headers
    assert "Idempotent-Replayed" in shop.client.post("/payments", headers=key).headers


@HYBRID
def test_a_duplicate_may_wait_for_the_first(shop, monkeypatch):
    monkeypatch.setattr(procedure, "IN_VIEW_SECONDS", 0.2)
    shop.view(shop.pay, wait=30)
    shop.check(duplicates=2)


def test_a_form_of_somebody_who_has_signed_in_and_a_redirect(shop):
    """The form's token stays where its other fields are changed."""

    @shop.app.before_request
    def check_token():
        if request.method == "POST" and request.form["token"] != "secret":
            abort(400)

    def pay():
        shop.pay()
        return redirect(f"/thanks/{session['user']}", 303)

    shop.app.config.update(SECRET_KEY="secret", WTF_CSRF_FIELD_NAME="token")
    shop.app.add_url_rule("/in/<name>", "in", lambda name: session.update(user=name) or "")
    shop.app.add_url_rule("/thanks/<name>", "thanks", lambda name: name)
    shop.view(pay, scope=lambda: session.get("user"))
    alice, bob = shop.client, shop.client
    for client, name in ((alice, "alice"), (bob, "bob")):
        client.get(f"/in/{name}")
    form = {"token": "secret", "amount": "5"}
    check = partial(assert_idempotent, alice, "POST", "/payments", data=form)
    assert check(other=bob).location == "/thanks/alice"
    assert check(follow_redirects=True).text == "alice"
    with pytest.raises(AssertionError, match="taken for the first one"):
        check(other=alice)


def test_the_clients_of_the_application_are_taken_as_they_are(shop):
    class SignedIn(FlaskClient):
        def open(self, *args, **kwargs):
            kwargs["headers"]["X-User"] = "alice"
            return super().open(*args, **kwargs)

    def view():
        assert request.headers["X-User"] == "alice"
        assert request.cookies["seen"] == "yes"
        return shop.pay()

    @shop.app.before_request
    def begin():
        assert "begun" not in g, "a request shares its context with another"
        g.begun = request.method == "POST"

    shop.view(view)
    shop.app.test_client_class = SignedIn
    # As fixtures have it: a client in a with block, and a context around the whole test.
    with shop.app.app_context(), shop.app.test_client() as client:
        client.set_cookie("seen", "yes")
        client.get("/last", headers={})
        g.pop("begun")
        assert_idempotent(client, "POST", "/payments", json={}, effects=shop.payments)
        assert request.path == "/last"


def test_a_view_that_uses_the_session(shop):
    """Flask says Vary: Cookie after a view that did, and a replay runs no view."""
    shop.app.secret_key = "secret"
    shop.view(lambda: (session.update(user="alice"), shop.pay())[1])
    assert "Cookie" in shop.check().headers["Vary"]


@pytest.mark.parametrize(
    "body",
    [
        {"data": io.BytesIO(b"abc")},
        {"data": '{"amount": 5}'},
        {"data": {"scan": (io.BytesIO(b"content"), "scan.pdf")}},
        {"json": {"paid": True}},
        {"path": "/payments?currency=EUR"},
    ],
    ids=["file", "text", "upload", "json", "query"],
)
def test_bodies_and_queries_are_sent_whole_and_changed(shop, body):
    def view():
        assert request.content_length or request.args
        assert "scan" not in request.files or request.files["scan"].read() == b"content"
        return shop.pay()

    shop.view(view)
    shop.check(**{"json": None, **body})


def test_headers_that_may_differ(shop):
    shop.view(shop.pay)
    shop.app.after_request(number)
    shop.check(ignore_headers=["x-request-id"])


@pytest.fixture
def outside(shop):
    """What is called before each request, for a test to add to."""
    functions = []

    @shop.app.before_request
    def call():
        for each in functions:
            each()

    return functions


def test_a_balance_may_fall(shop, outside):
    def account():
        return shop.db.session.scalars(sa.select(shop.Account)).one()

    def withdraw():
        account().whole -= 50
        account().real -= 0.1
        shop.db.session.commit()
        return {}, 201

    def balances():
        return {"whole": account().whole, "real": account().real}

    with shop.app.app_context():
        shop.db.session.add(shop.Account())
        shop.db.session.commit()
    shop.view(withdraw)
    shop.died(lambda status: shop.check(effects=balances))
    outside.append(withdraw)
    with pytest.raises(AssertionError) as error:
        shop.check(effects=balances, duplicates=0)
    said = "after a retry\n  whole changed by -150, not by -100\n  real changed by -0.3"
    assert said in str(error.value)


def test_without_effects_the_rows_of_all_databases_are_counted(shop, outside):
    def enter():
        with shop.db.engines["ledger"].begin() as connection:
            connection.execute(sa.insert(shop.Entry))

    shop.view(shop.pay)
    shop.check()
    outside.append(enter)
    with pytest.raises(AssertionError, match=r"entry \(bind 'ledger'\) changed by \+4, not by \+1"):
        shop.check()
    outside.clear()
    with shop.app.app_context():
        shop.Entry.__table__.drop(shop.db.engines["ledger"])
    shop.check()
