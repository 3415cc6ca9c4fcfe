"""Whatever is sent twice, happens once: also if the worker dies in between."""

import hashlib
import hmac
import json
import re

import pytest
import requests
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import func, select

from example.extensions import db
from example.models import Account, Order, Payment, Product
from example.seed import ALICE, BOB
from flask_idempotency.testing import assert_idempotent, every_crash
from laboratory.card_provider import DECLINED

ALICES, BOBS = ({"headers": {"Authorization": f"Bearer {who.token}"}} for who in (ALICE, BOB))
CARD, KEY = "4242424242424242", {"Idempotency-Key": "1"}


@pytest.fixture
def count(app, provider):
    """Makes a function that counts what must change once, wherever that is written down."""
    rows = {
        "balance": func.sum(Account.balance),
        "stock": func.sum(Product.stock),
        "payments": func.count(Payment.id),
        "orders": func.count(Order.id),
    }

    def one(name):
        if name == "charges":
            return len(requests.get(f"{provider}/charges", timeout=10).json())
        return db.session.scalar(select(rows[name]))

    return lambda *names: lambda: {name: one(name) for name in names}


@pytest.fixture
def product(app):
    with app.app_context():
        return db.session.scalar(select(Product.id).order_by(Product.price))


def survives(client, path, **send):
    """It is done once, wherever the worker dies, and another user's same key is another one's."""
    for crash in every_crash():
        with crash:
            assert_idempotent(client, "POST", path, **send)


def test_payment(app, count):
    send = {"json": {"amount": 500}, "effects": count("balance", "payments")}
    survives(app.test_client(), "/payments", **send, **ALICES, other=BOBS)


def test_order(app, count, product):
    order = {"product": product, "quantity": 2, "card": CARD}
    send = {"json": order, "effects": count("orders", "stock", "charges")}
    survives(app.test_client(), "/orders", **send, **ALICES, other=BOBS)


def test_declined_order(app, count, product):
    with app.app_context():
        stock, before = count("stock"), count("stock")()
        order = {"product": product, "card": DECLINED}
        send = {"json": order, "effects": count("orders"), "status": 402}
        assert_idempotent(app.test_client(), "POST", "/orders", **send, **ALICES)
        assert stock() == before


def sign_in(app, who):
    client = app.test_client()
    assert client.post("/login", data={"name": who.name, "password": who.password}).status_code == 303
    return client


def test_checkout(app, count, product):
    send = {"data": {"quantity": 2}, "effects": count("balance", "payments", "stock")}
    survives(sign_in(app, ALICE), f"/checkout/{product}", **send, other=sign_in(app, BOB))


def test_checkout_by_its_form(app, product):
    client, url = sign_in(app, ALICE), f"/checkout/{product}"
    [key] = re.findall(r'name="idempotency_key"[^>]* value="([^"]+)"', client.get(url).text)
    clicks = [client.post(url, data={"idempotency_key": key, "quantity": 1}) for _ in range(2)]
    assert [click.location for click in clicks] == ["/account"] * 2
    assert clicks[1].headers["Idempotent-Replayed"] == "true"
    assert client.get("/account").text.count("1 × Coffee beans") == 1
    refused = client.post(url, data={"quantity": 11}, headers={"Idempotency-Key": "another"})
    assert (refused.status_code, 'role="alert"' in refused.text) == (400, True)


def deliver(app, event, signed_by="w"):
    body = json.dumps(event)
    signature = hmac.new(signed_by.encode(), body.encode(), hashlib.sha256).hexdigest()
    headers = {"X-Signature": signature, "Content-Type": "application/json"}
    return app.test_client().post("/webhooks/provider", data=body, headers=headers).status_code


def test_events(app, count, product):
    headers = {**ALICES["headers"], **KEY}
    order = {"product": product, "quantity": 2, "card": CARD}
    app.test_client().post("/orders", json=order, headers=headers)
    with app.app_context():
        order = db.session.scalars(select(Order)).one()
        before = count("stock")()["stock"]
        for number, kind in enumerate(["succeeded", "refunded", "refunded"], 1):
            event = {"id": f"evt_{min(number, 2)}", "type": f"charge.{kind}"}
            event["charge"] = {"reference": order.reference}
            assert (deliver(app, event, "guessed"), deliver(app, event)) == (401, 204)
        db.session.refresh(order)
        assert (order.status, count("stock")()["stock"]) == ("refunded", before + 2)


def test_a_cookie_is_no_token(app):
    client, body = sign_in(app, ALICE), {"json": {"amount": 500}}
    assert client.post("/payments", **body, headers=KEY).status_code == 401


@pytest.mark.parametrize("path", ["/metrics", "/operations/"])
def test_operators_only(app, path):
    statuses = [app.test_client().get(path, auth=("ada", word)).status_code for word in ("", "x", "o")]
    assert statuses == [401, 401, 200]


def test_the_migrations_make_what_the_models_say(app):
    with app.app_context(), db.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), db.metadata) == []


def test_nothing_of_the_laboratory_is_deployed(app):
    assert "laboratory" not in " ".join(f"{rule} {rule.endpoint}" for rule in app.url_map.iter_rules())
    fault = {"Laboratory-Fault": "kill the worker after the view's commit"}
    send = {"json": {"amount": 500}, "headers": {**ALICES["headers"], **KEY, **fault}}
    assert app.test_client().post("/payments", **send).status_code == 201
