"""What is right passes, with and without a crash, on every store."""

from __future__ import annotations

import io
import uuid

import pytest
import sqlalchemy as sa
from flask import abort, g, redirect, request, session
from flask.testing import FlaskClient

from flask_idempotency import OperationInterrupted, current_operation, idempotent
from flask_idempotency.testing import CRASH_POINTS, assert_idempotent, crash_at, every_crash, procedure


def crashes(shop, **kwargs):
    """Where the view died, one crash after the other, up to the place that is not there."""
    died = []
    for crash in every_crash():
        with crash as at:
            status = kwargs["status"](at.point) if "status" in kwargs else None
            assert_idempotent(
                shop.client, "POST", "/payments", json={}, effects=shop.effects, status=status
            )
        died.append(repr(at) if at.happened else "nowhere")
    return died


def test_every_crash_in_one_go(shop):
    def view():
        current_operation.step("charge", shop.charge, current_operation.derive_key("charge"))
        current_operation.step("pay", lambda: shop.pay()[0], atomic=True)
        return {}, 201

    shop.view(view, atomic=False, on_interrupted="retry")
    places = [f"crash_at('in-view', place={number})" for number in (1, 2, 3)]
    outside = ["crash_at('before-commit')", "crash_at('after-commit')"]
    assert crashes(shop) == ["crash_at('after-claim')", *places, "nowhere", *outside]


@pytest.mark.parametrize("store", ["sql", "postgres"], indirect=True)
def test_every_crash_of_a_view_without_places_and_of_one_that_is_held(shop):
    outside = ["crash_at('before-commit')", "crash_at('after-commit')"]
    shop.view(lambda: ({}, 201))
    shop.effects = dict
    assert crashes(shop) == ["crash_at('after-claim')", "nowhere", *outside]
    shop.app.view_functions["pay"] = idempotent(atomic=False)(shop.pay)
    status = {"after-commit": 201}
    assert crashes(shop, status=lambda point: status.get(point, 409)) == [
        "crash_at('after-claim')", "crash_at('in-view', place=1)", "nowhere", *outside
    ]  # fmt: skip


def test_an_operation_that_nobody_runs_again(shop):
    shop.view(shop.pay, atomic=False)
    with crash_at("in-view"):
        assert_idempotent(shop.client, "POST", "/payments", json={}, effects=shop.payments, status=409)


@pytest.mark.parametrize("store", ["hybrid"], indirect=True)
def test_a_retry_after_the_block_need_not_wait_for_the_lock_of_the_dead(shop):
    shop.view(shop.pay)
    key = {"Idempotency-Key": str(uuid.uuid4())}
    with crash_at("before-commit", shop.app):
        shop.client.post("/payments", headers=key)
    with shop.app.app_context():
        before = shop.payments()
    assert shop.client.post("/payments", headers=key).status_code == 201
    with shop.app.app_context():
        assert shop.payments() == before + 1


@pytest.mark.parametrize("store", ["hybrid"], indirect=True)
def test_what_is_dead_leaves_its_lock_in_redis_until_then(shop):
    shop.view(shop.pay)
    key = {"Idempotency-Key": str(uuid.uuid4())}
    lock, looked = shop.app.extensions["idempotency"].lock, []
    with crash_at("in-view"):
        try:
            shop.client.post("/payments", headers=key)
        finally:
            client = lock._client
            looked += [client.get(name) for name in client.keys(f"{lock._prefix}*")]
    assert any(value.startswith(b"1:") and value != b"1:done" for value in looked)


@pytest.mark.parametrize("store", ["sql"], indirect=True)
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


@pytest.mark.parametrize("store", ["sql", "postgres"], indirect=True)
@pytest.mark.parametrize("vary", [None, "Accept"])
def test_a_view_that_reads_or_writes_the_session(shop, vary):
    """Flask says Vary: Cookie after a view that did, and a replay runs no view."""
    shop.app.secret_key = "secret"

    def view():
        response = shop.app.make_response(({"user": session.get("user")}, 201))
        if vary:
            response.vary.add(vary)
        if request.headers.get("X-Write"):
            session["user"] = "alice"
        shop.pay()
        return response

    shop.view(view)
    for headers in ({}, {"X-Write": "1"}):
        first = assert_idempotent(
            shop.client, "POST", "/payments", json={}, effects=shop.payments, headers=headers
        )
        assert "Cookie" in first.headers["Vary"]


@pytest.mark.parametrize("store", ["hybrid"], indirect=True)
def test_a_duplicate_may_wait_for_the_first(shop, monkeypatch):
    monkeypatch.setattr(procedure, "IN_VIEW_SECONDS", 0.2)
    shop.view(shop.pay, wait=30)
    assert_idempotent(shop.client, "POST", "/payments", json={}, effects=shop.payments, duplicates=2)


@pytest.mark.parametrize("store", ["sql", "postgres"], indirect=True)
def test_work_outside_of_a_request_crashes_too(shop):
    def work():
        return shop.pay()[0]

    with shop.app.app_context():
        key, before = str(uuid.uuid4()), shop.payments()
        shop.db.session.rollback()
        for point in CRASH_POINTS:
            with crash_at(point):
                shop.idempotency.run(key, work, name=point)
            done = shop.idempotency.run(key, work, name=point)
            assert shop.idempotency.run(key, work, name=point) == done
        assert shop.payments() == before + len(CRASH_POINTS)


@pytest.mark.parametrize("store", ["sql", "hybrid"], indirect=True)
def test_afterwards_the_application_is_as_before(shop):
    state = shop.app.extensions["idempotency"]
    before = state.records, state.lock, state.engine, state.settings
    session_class = shop.db.session.session_factory.class_
    shop.view(shop.pay)
    with crash_at("after-commit"):
        assert_idempotent(shop.client, "POST", "/payments", json={}, effects=shop.payments)
    assert (state.records, state.lock, state.engine, state.settings) == before
    assert "commit" not in vars(session_class)


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_a_view_that_reconciles(shop):
    def reconcile(_operation):
        known = shop.db.session.scalar(sa.select(sa.func.count(shop.Payment.id)))
        if known:
            return {"found": True}, 201
        raise OperationInterrupted

    shop.view(shop.pay, atomic=False, on_interrupted=reconcile)
    with crash_at("in-view"):
        assert_idempotent(shop.client, "POST", "/payments", json={}, effects=shop.payments)


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_a_view_that_redirects_to_a_page(shop):
    def view():
        shop.pay()
        return redirect("/thanks", 303)

    shop.view(view)
    shop.app.add_url_rule("/thanks", "thanks", lambda: "Thank you")
    page = assert_idempotent(
        shop.client, "POST", "/payments", json={}, effects=shop.payments, follow_redirects=True
    )
    assert page.text == "Thank you"


@pytest.mark.parametrize("store", ["sql"], indirect=True)
@pytest.mark.parametrize("field", ["csrf_token", "token"])
def test_a_form_keeps_its_token_where_its_other_fields_are_changed(shop, field):
    shop.app.config["WTF_CSRF_FIELD_NAME"] = field

    @shop.app.before_request
    def protect_from_forgery():
        if request.form[field] != "secret":
            abort(400)

    shop.view(shop.pay)
    form = {field: "secret", "amount": "5"}
    assert_idempotent(shop.client, "POST", "/payments", data=form, effects=shop.payments)


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_a_body_that_is_a_stream_is_changed_too(shop):
    shop.view(shop.pay)
    assert_idempotent(shop.client, "POST", "/payments", data=io.BytesIO(b"abc"), effects=shop.payments)


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_a_form_of_files_only_is_changed_too(shop, tmp_path):
    shop.view(lambda: (request.files["scan"].read(), shop.pay())[1])
    scan = io.BytesIO(b"content"), "scan.pdf"
    assert_idempotent(shop.client, "POST", "/payments", data={"scan": scan}, effects=shop.payments)
    (tmp_path / "scan.pdf").write_bytes(b"content")
    with (tmp_path / "scan.pdf").open("rb") as scan, pytest.raises(TypeError, match="io.BytesIO"):
        assert_idempotent(shop.client, "POST", "/payments", data={"scan": scan}, effects=shop.payments)
