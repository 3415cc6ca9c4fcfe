"""Flask-Admin's forms: with the hidden field a form that is sent again creates nothing more."""

from __future__ import annotations

import re
from typing import Any

import pytest
from flask_admin import Admin
from flask_admin.contrib.sqla import ModelView
from flask_admin.form import BaseForm

from flask_idempotency.integrations.wtf import IdempotencyField


class OnceForm(BaseForm):
    """The base of an admin's forms: with the field that is the form's key."""

    idempotency_key = IdempotencyField()


class OnceView(ModelView):
    form_base_class = OnceForm


@pytest.fixture
def shop(make_world: Any) -> Any:
    world = make_world(SECRET_KEY="tests only", init={"scope": None})
    world.idempotency.protect(world.app)
    admin = Admin(world.app, "shop")
    admin.add_view(OnceView(world.Payment, world.db))
    admin.add_view(ModelView(world.Payment, world.db, name="plain", endpoint="plain"))
    return world


def form(client: Any, path: str) -> dict[str, str]:
    """The hidden fields of a page's form."""
    return dict(re.findall(r'name="(idempotency_key)"[^>]*value="([\w.-]+)"', client.get(path).text))


def test_a_form_that_is_sent_again_creates_once(shop):
    client, path = shop.client, "/admin/payment/new/"
    sent = {"amount": "5", **form(client, path)}
    first, again = (client.post(path, data=sent) for _ in range(2))
    assert (first.status_code, first.headers["Location"]) == (302, "/admin/payment/")
    assert (again.status_code, again.headers["Location"]) == (302, "/admin/payment/")
    assert again.headers["Idempotent-Replayed"] == "true"
    assert shop.count() == 1
    assert client.post(path, data={"amount": "5", **form(client, path)}).status_code == 302
    assert shop.count() == 2
    shop.assert_clean()


def test_a_form_to_be_corrected_has_another_key(shop):
    client, path = shop.client, "/admin/payment/new/"
    sent = {"amount": "", **form(client, path)}
    wrong = client.post(path, data=sent)
    [key] = re.findall(r'name="idempotency_key"[^>]*value="([\w.-]+)"', wrong.text)
    assert (wrong.status_code, key == sent["idempotency_key"]) == (200, False)
    assert client.post(path, data={"amount": "5", "idempotency_key": key}).status_code == 302
    assert shop.count() == 1


def test_an_edit_and_a_deletion(shop):
    client = shop.client
    client.post("/admin/payment/new/", data={"amount": "5", **form(client, "/admin/payment/new/")})
    [(number,)] = shop.sql("select id from payment")
    path = f"/admin/payment/edit/?id={number}"
    sent = {"amount": "6", **form(client, path)}
    answers = [client.post(path, data=sent) for _ in range(2)]
    assert [each.status_code for each in answers] == [302, 302]
    assert shop.sql("select amount from payment") == [(6,)]
    # The list's button has no field: a script may send the header.
    gone = [
        client.post("/admin/payment/delete/", data={"id": number}, headers={"Idempotency-Key": "gone"})
        for _ in range(2)
    ]
    assert [each.headers.get("Idempotent-Replayed") for each in gone] == [None, "true"]
    assert shop.count() == 0


def test_without_the_field_a_form_is_refused_and_may_be_left_out(shop):
    client = shop.client
    assert client.post("/admin/plain/new/", data={"amount": "5"}).status_code == 400
    assert shop.count() == 0
