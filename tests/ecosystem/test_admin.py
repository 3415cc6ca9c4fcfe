"""Flask-Admin's forms: with the hidden field a form that is sent again creates nothing more."""

from __future__ import annotations

import re
from typing import Any

import pytest
from flask_admin import Admin
from flask_admin.contrib.sqla import ModelView
from flask_admin.form import BaseForm

from flask_idempotency.integrations.wtf import IdempotencyField

NEW = "/admin/payment/new/"


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


def key_in(page: Any) -> dict[str, str]:
    """The hidden field of a page's form."""
    return dict(re.findall(r'name="(idempotency_key)"[^>]*value="([\w.-]+)"', page.text))


def test_a_form_that_is_sent_again_creates_once_and_a_corrected_one_has_another_key(shop):
    client = shop.client
    sent = {"amount": "5", **key_in(client.get(NEW))}
    first, again = (client.post(NEW, data=sent) for _ in range(2))
    assert [each.headers["Location"] for each in (first, again)] == ["/admin/payment/"] * 2
    assert again.headers["Idempotent-Replayed"] == "true"
    assert shop.count() == 1
    empty = {"amount": "", **key_in(client.get(NEW))}
    wrong = client.post(NEW, data=empty)
    corrected = {"amount": "5", **key_in(wrong)}
    assert (wrong.status_code, corrected["idempotency_key"] == empty["idempotency_key"]) == (200, False)
    assert client.post(NEW, data=corrected).status_code == 302
    assert shop.count() == 2
    assert client.post("/admin/plain/new/", data={"amount": "5"}).status_code == 400  # it has no field
    assert shop.count() == 2
    shop.assert_clean()
