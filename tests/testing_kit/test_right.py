"""What is right passes, with and without a crash, and what a test may pass."""

from __future__ import annotations

import io
import uuid

import pytest
import sqlalchemy as sa
from flask import Flask, abort, g, redirect, request, session
from flask.testing import FlaskClient
from sqlalchemy import orm

from flask_idempotency import Idempotency, OperationInterrupted, current_operation, idempotent
from flask_idempotency.testing import CRASH_POINTS, assert_idempotent, crash_at, every_crash, procedure
from tests.testing_kit.conftest import Shop, make_shop
from tests.testing_kit.test_messages import SQL

OUTSIDE, CLAIM = ["crash_at('after-commit')", "crash_at('before-commit')"], "crash_at('after-claim')"


def check(shop, **kwargs):
    kwargs = {"json": {"amount": 5}, "effects": shop.payments, **kwargs}
    return assert_idempotent(shop.client, "POST", "/payments", **kwargs)


def crashes(shop, status=lambda point: None, **kwargs):
    """Where the view died, one crash after the other, up to the place that is not there."""
    died = []
    for crash in every_crash():
        with crash as at:
            check(shop, status=status(at.point), **kwargs)
        died.append(repr(at) if at.happened else "nowhere")
    return died


def test_every_crash_in_one_go(shop):
    def view():
        current_operation.step("charge", shop.charge, current_operation.derive_key("charge"))
        current_operation.step("pay", lambda: shop.pay()[0], atomic=True)
        return {}, 201

    shop.view(view, atomic=False, on_interrupted="retry")
    places = [f"crash_at('in-view', place={number})" for number in (1, 2, 3)]
    assert crashes(shop, effects=shop.effects) == [*OUTSIDE, *places, "nowhere", CLAIM]


@SQL
def test_every_crash_of_a_view_without_places_and_of_one_that_is_held(shop):
    shop.view(lambda: ({}, 201))
    assert crashes(shop, effects=dict) == [*OUTSIDE, "nowhere", CLAIM]
    shop.app.view_functions["pay"] = idempotent(atomic=False)(shop.pay)
    status = {"after-commit": 201}
    assert crashes(shop, status=lambda point: status.get(point, 409)) == [
        *OUTSIDE, "crash_at('in-view', place=1)", "nowhere", CLAIM
    ]  # fmt: skip


@SQL
def test_a_client_that_has_signed_in(shop):
    shop.app.secret_key = "secret"
    shop.app.add_url_rule("/in/<name>", "in", lambda name: session.update(user=name) or "")
    shop.view(shop.pay, scope=lambda: session.get("user"))
    alice, bob = shop.client, shop.client
    for client, name in ((alice, "alice"), (bob, "bob")):
        client.get(f"/in/{name}")
    assert_idempotent(alice, "POST", "/payments", other=bob)
    with pytest.raises(AssertionError, match="taken for the first one"):
        assert_idempotent(alice, "POST", "/payments", other=alice)


@pytest.mark.parametrize("store", ["hybrid"], indirect=True)
def test_a_retry_after_the_block_is_not_kept_waiting_by_the_dead(shop):
    shop.view(shop.pay)
    key = {"Idempotency-Key": str(uuid.uuid4())}
    with crash_at("before-commit", shop.app):
        shop.client.post("/payments", headers=key)
    with shop.app.app_context():
        before = shop.payments()
    assert shop.client.post("/payments", headers=key).status_code == 201
    with shop.app.app_context():
        assert shop.payments() == before + 1


@SQL
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


@SQL
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
        assert "Cookie" in check(shop, headers=headers).headers["Vary"]


@pytest.mark.parametrize("store", ["hybrid"], indirect=True)
def test_a_duplicate_may_wait_for_the_first(shop, monkeypatch):
    monkeypatch.setattr(procedure, "IN_VIEW_SECONDS", 0.2)
    shop.view(shop.pay, wait=30)
    check(shop, duplicates=2)


@SQL
def test_work_outside_of_a_request_crashes_too(shop):
    def work():
        return shop.pay()[0]

    with shop.app.app_context():
        for point in CRASH_POINTS:
            with crash_at(point):
                shop.idempotency.run("key", work, name=point)
            done = shop.idempotency.run("key", work, name=point)
            assert shop.idempotency.run("key", work, name=point) == done
        assert shop.payments() == len(CRASH_POINTS)


@SQL
def test_a_view_that_reconciles(shop):
    def reconcile(_operation):
        if shop.payments():
            return {"found": True}, 201
        raise OperationInterrupted

    shop.view(shop.pay, atomic=False, on_interrupted=reconcile)
    with crash_at("in-view"):
        check(shop)


@SQL
def test_a_view_that_redirects_to_a_page(shop):
    shop.view(lambda: (shop.pay(), redirect("/thanks", 303))[1])
    shop.app.add_url_rule("/thanks", "thanks", lambda: "Thank you")
    assert check(shop, follow_redirects=True).text == "Thank you"


@SQL
@pytest.mark.parametrize("field", ["csrf_token", "token"])
def test_a_form_keeps_its_token_where_its_other_fields_are_changed(shop, field):
    shop.app.config["WTF_CSRF_FIELD_NAME"] = field
    shop.app.before_request(lambda: None if request.form[field] == "secret" else abort(400))
    shop.view(shop.pay)
    check(shop, json=None, data={field: "secret", "amount": "5"})


@SQL
def test_bodies_and_queries_are_changed(shop):
    def view():
        if "scan" in request.files:
            request.files["scan"].read()
        return shop.pay()

    shop.view(view)
    check(shop, json=None, data=io.BytesIO(b"abc"))
    check(shop, json=None, data='{"amount": 5}')
    check(shop, json=None, data={"scan": (io.BytesIO(b"content"), "scan.pdf")})
    assert_idempotent(shop.client, "POST", "/payments?currency=EUR")


@SQL
def test_headers_that_may_differ(shop):
    shop.view(shop.pay)

    @shop.app.after_request
    def number(response):
        response.headers["X-Run"] = str(uuid.uuid4())
        return response

    check(shop, ignore_headers=["x-run"])


@SQL
def test_a_crash_that_is_caught_still_commits_nothing(shop):
    def view():
        try:
            return shop.pay()
        except BaseException:
            return shop.pay()

    shop.view(view)
    with crash_at("in-view"):
        check(shop)


class Balanced(Shop):
    """The shop with an account, and a database beside it."""

    def add_models(self):
        super().add_models()

        class Account(self.db.Model):
            id = sa.Column(sa.Integer, primary_key=True)
            whole = sa.Column(sa.Integer, default=500)
            real = sa.Column(sa.Float, default=0.7)

        class Seen(self.db.Model):
            __bind_key__ = "audit"
            id = sa.Column(sa.Integer, primary_key=True)

        self.Account, self.Seen = Account, Seen

    def withdraw(self):
        account = self.db.session.scalars(sa.select(self.Account)).one()
        account.whole -= 50
        account.real -= 0.1
        self.db.session.commit()
        return {}, 201

    def balances(self):
        account = self.db.session.scalars(sa.select(self.Account)).one()
        return {"whole": account.whole, "real": account.real}


@pytest.fixture
def balanced(store, tmp_path, request):
    binds = {"audit": f"sqlite:///{tmp_path}/audit.db"}
    shop = make_shop(store, tmp_path, request, Balanced, SQLALCHEMY_BINDS=binds)
    with shop.app.app_context():
        shop.db.session.add(shop.Account())
        shop.db.session.commit()
    yield shop
    shop.close()


def before_each(shop):
    """What is called before each request, for a test to add to."""
    functions = []

    @shop.app.before_request
    def call():
        for each in functions:
            each()

    return functions


@SQL
def test_a_balance_may_fall(balanced):
    outside = before_each(balanced)
    balanced.view(balanced.withdraw)
    crashes(balanced, effects=balanced.balances)
    outside.append(balanced.withdraw)
    with pytest.raises(AssertionError) as error:
        check(balanced, effects=balanced.balances, duplicates=0)
    assert "after a retry\n  whole changed by -150, not by -100\n  real changed by -0.3" in str(
        error.value
    )


@SQL
def test_without_effects_the_rows_of_all_databases_are_counted(balanced):
    def see():
        with balanced.db.engines["audit"].begin() as connection:
            connection.execute(sa.insert(balanced.Seen))

    sees = before_each(balanced)
    balanced.view(balanced.pay)
    check(balanced, effects=None)
    sees.append(see)
    with pytest.raises(AssertionError, match=r"rows of seen \(bind 'audit'\) rose by 4, not by 1"):
        check(balanced, effects=None)
    sees.clear()
    with balanced.app.app_context():
        balanced.Seen.__table__.drop(balanced.db.engines["audit"])
    check(balanced, effects=None)


def test_sqlite_lets_nobody_write_past_the_session(tmp_path):
    shop = Shop("sql", f"sqlite:///{tmp_path}/shop.db?timeout=0.1")

    def view():
        shop.pay()
        with shop.db.engine.begin() as connection:
            connection.execute(sa.insert(shop.Payment))

    shop.view(view)
    with pytest.raises(AssertionError, match="database is locked\n.*write through db.session"):
        check(shop)
    shop.close()


def test_tables_that_the_tests_own_transaction_made_are_counted(tmp_path):
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    own_session = orm.scoped_session(orm.sessionmaker(engine))
    tables = sa.MetaData()
    payment = sa.Table("payment", tables, sa.Column("id", sa.Integer, primary_key=True))
    app = Flask("shop")
    app.config["IDEMPOTENCY_STORE"] = "sql"
    app.testing = True
    Idempotency(app, session=own_session, metadata=tables, scope=None)

    @app.post("/payments")
    @idempotent
    def pay():
        own_session.execute(sa.insert(payment))
        own_session.commit()
        return {}, 201

    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN")
        tables.create_all(connection)
        own_session.configure(bind=connection, join_transaction_mode="create_savepoint")
        assert_idempotent(app.test_client(), "POST", "/payments", duplicates=0)
        own_session.remove()
        connection.rollback()
    engine.dispose()
