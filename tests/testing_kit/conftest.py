"""A shop whose endpoint each test writes, right or wrong, on every store that can be atomic."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import sqlalchemy as sa
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency, current_operation, idempotent
from flask_idempotency.testing import assert_idempotent, every_crash
from tests.waiting import wait_until

OUTSIDE, CLAIM = ["crash_at('after-commit')", "crash_at('before-commit')"], "crash_at('after-claim')"
"""Where each view dies, before and after the places in it."""
ON_EACH = pytest.mark.parametrize("store", ["sql", "hybrid"])
HYBRID = pytest.mark.parametrize("store", ["hybrid"])


class Shop:
    """An application with a ledger in a database of its own, its provider, and what both have done."""

    def __init__(self, store, uri, **config):
        self.app = Flask("shop")
        binds = {"ledger": uri.replace("shop.db", "ledger.db")}  # PostgreSQL: the same, another engine
        self.app.config.update(
            SQLALCHEMY_DATABASE_URI=uri, SQLALCHEMY_BINDS=binds, IDEMPOTENCY_STORE=store, **config
        )
        self.app.testing = True
        self.db = SQLAlchemy(self.app)
        self.idempotency = Idempotency(self.app, self.db, scope=None)
        self.charges, self.charged_keys, self.over = [], set(), threading.Event()

        class Payment(self.db.Model):
            id = sa.Column(sa.Integer, primary_key=True)
            order = sa.Column(sa.String, unique=True)

        class Account(self.db.Model):
            id = sa.Column(sa.Integer, primary_key=True)
            whole = sa.Column(sa.Integer, default=500)
            real = sa.Column(sa.Float, default=0.7)

        class Entry(self.db.Model):
            __bind_key__ = "ledger"
            id = sa.Column(sa.Integer, primary_key=True)

        self.Payment, self.Account, self.Entry = Payment, Account, Entry
        with self.app.app_context():
            self.db.create_all()

    @property
    def client(self):
        return self.app.test_client()

    def view(self, function, protect=idempotent, **options):
        view = protect(**options)(function) if options else protect(function)
        self.app.add_url_rule("/payments", "pay", view, methods=["POST"])

    def pay(self, order=None):
        payment = self.Payment(order=order)
        self.db.session.add(payment)
        self.db.session.commit()
        return {"id": payment.id}, 201

    def charge(self, key=None):
        """A call to the provider, which knows the keys that it has seen."""
        if key is None or key not in self.charged_keys:
            self.charges.append(key)
            self.charged_keys.add(key)

    def in_steps(self):
        """A right view that calls the provider and pays."""
        current_operation.step("charge", self.charge, current_operation.derive_key("charge"))
        current_operation.step("pay", lambda: self.pay()[0], atomic=True)
        return {}, 201

    def effects(self):
        payments = self.db.session.scalar(sa.select(sa.func.count(self.Payment.id)))
        return {"payments": payments, "charges": len(self.charges)}

    def payments(self):
        return self.effects()["payments"]

    def check(self, crash=None, path="/payments", **kwargs):
        """Assert that the endpoint is idempotent."""
        with crash or nullcontext():
            return assert_idempotent(self.client, "POST", path, **{"json": {"amount": 5}, **kwargs})

    def check_in_every_crash(self, **kwargs):
        self.check(**kwargs)
        for crash in every_crash(self.app):
            self.check(crash, **kwargs)

    def died(self, check, *arguments, status=lambda point: None):
        """Where it died, one crash after the other, up to the place that is not there."""
        died = []
        for crash in every_crash(self.app):
            with crash as at:
                check(*arguments) if arguments else check(status=status(at.point))
            died.append(repr(at) if at.happened else "nowhere")
        return died

    def close(self):
        self.over.set()
        with self.app.app_context():
            for engine in self.db.engines.values():
                wait_until(lambda pool=engine.pool: not pool.checkedout(), "all connections came back")
                engine.dispose()


@pytest.fixture
def store():
    return "sql"


@pytest.fixture(scope="session")
def kit_database(postgres):
    """One for all: what a test leaves there, the next ones do not count."""
    return postgres.database("testing_kit")


@pytest.fixture
def make_shop(store, tmp_path, request):
    """A function that makes a shop."""
    uri, config = f"sqlite:///{tmp_path}/shop.db?timeout=60", {}  # who waits so long is no slow machine
    if store == "hybrid":
        uri = request.getfixturevalue("kit_database")
        config["IDEMPOTENCY_REDIS_URL"] = request.getfixturevalue("redis_server").url
    shops = []

    def make(**more):
        shops.append(Shop(store, uri, **config, **more))
        return shops[-1]

    yield make
    for shop in shops:
        shop.close()


@pytest.fixture
def shop(make_shop):
    return make_shop()
