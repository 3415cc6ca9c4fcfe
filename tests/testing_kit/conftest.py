"""A shop whose endpoint each test writes, right or wrong, on every store that can be atomic."""

from __future__ import annotations

import itertools

import pytest
import sqlalchemy as sa
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency, idempotent

_numbers = itertools.count(1)


class Shop:
    """An application, its provider of payments, and what both have done."""

    def __init__(self, store, uri, **config):
        self.app = Flask("shop")
        self.app.config.update(SQLALCHEMY_DATABASE_URI=uri, IDEMPOTENCY_STORE=store, **config)
        self.app.testing = True
        self.db = SQLAlchemy(self.app)
        self.add_models()
        self.store = store
        self.idempotency = Idempotency(self.app, self.db, scope=None)
        self.charges, self.charged_keys = [], set()
        with self.app.app_context():
            self.db.create_all()

    def add_models(self):
        class Payment(self.db.Model):
            id = sa.Column(sa.Integer, primary_key=True)
            order = sa.Column(sa.String, unique=True)

        self.Payment = Payment

    @property
    def client(self):
        return self.app.test_client()

    def view(self, function, protect=idempotent, **options):
        view = (protect(**options) if options else protect(function)) if protect else function
        view = view(function) if options else view
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

    def effects(self):
        payments = self.db.session.scalar(sa.select(sa.func.count(self.Payment.id)))
        return {"payments": payments, "charges": len(self.charges)}

    def payments(self):
        return self.effects()["payments"]

    def close(self):
        with self.app.app_context():
            for engine in self.db.engines.values():
                assert engine.pool.checkedout() == 0, "a connection was not given back"
                engine.dispose()


@pytest.fixture(params=["sql", "hybrid"])
def store(request):
    return request.param


@pytest.fixture(scope="session")
def kit_database(postgres):
    """One database for all: what a test leaves there, it does not count."""
    return postgres.database("testing_kit")


@pytest.fixture
def shop(store, tmp_path, request):
    shop = make_shop(store, tmp_path, request)
    yield shop
    shop.close()


def make_shop(store, tmp_path, request, make=Shop, **config):
    uri = f"sqlite:///{tmp_path}/shop.db?timeout=60"  # who waits so long is no slow machine
    if store in ("hybrid", "postgres"):
        uri = request.getfixturevalue("kit_database")
    if store == "hybrid":
        config["IDEMPOTENCY_REDIS_URL"] = request.getfixturevalue("redis_server").url
    return make(store, uri, **config)
