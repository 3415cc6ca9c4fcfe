"""The hidden field of a form: the key of clients that send no header."""

from __future__ import annotations

import re
import time

import pytest
from flask import Blueprint, render_template_string, request

from flask_idempotency import ConfigurationError, current_operation, idempotent
from flask_idempotency.cli import cli
from tests.killed import Killed
from tests.web.forms.pages import ALICE, add_page, add_payments, load, send


@pytest.mark.parametrize("media_type", ["application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_form_that_is_sent_twice_is_one_operation(shop, media_type):
    runs, client = add_payments(shop), shop.client
    data = {"amount": 5, "idempotency_key": load(client)}
    answers = [
        client.post("/payments", data=data, content_type=media_type, headers=ALICE) for _ in range(3)
    ]
    assert [answer.status_code for answer in answers] == [303] * 3
    assert [answer.headers.get("Idempotent-Replayed") for answer in answers] == [None, "true", "true"]
    assert len(runs) == shop.count() == 1
    assert re.fullmatch(r"[\w-]{22}", runs[0])


def test_a_form_that_is_loaded_twice_is_two_operations(shop):
    runs, client = add_payments(shop), shop.client
    for _ in range(2):
        assert send(client, load(client)).status_code == 303
    assert len(set(runs)) == shop.count() == 2


def test_a_form_that_was_changed_after_it_was_sent_is_refused(shop, assert_problem):
    add_payments(shop)
    client, field = shop.client, load(shop.client)
    send(client, field)
    assert_problem(send(client, field, amount="6"), 422, "key-reused")


def test_without_a_field_the_key_is_missing(shop, assert_problem):
    add_payments(shop)
    add_payments(shop, "/open", required=False)
    assert_problem(send(shop.client, None), 400, "key-required")
    assert send(shop.client, None, "/open").status_code == 303
    assert shop.records() == []


def test_a_header_comes_before_the_field(shop):
    runs = add_payments(shop)
    for key, field in ("key-1", load(shop.client)), ("key-2", "forged"):
        answer = send(shop.client, field, headers={**ALICE, "Idempotency-Key": key})
        assert answer.status_code == 303
    assert runs == ["key-1", "key-2"]


def test_the_named_view_may_be_in_the_same_blueprint(app, client, world):
    blueprint = Blueprint("shop", __name__)
    blueprint.add_url_rule(
        "/page", "page", lambda: render_template_string("{{ idempotency_field('.pay') }}")
    )
    blueprint.add_url_rule("/pay", "pay", lambda: "paid", methods=["POST"])
    world.idempotency.protect(blueprint)
    app.register_blueprint(blueprint)
    field = load(client, "/page")
    assert send(client, field, "/pay").status_code == 200
    assert send(client, field, "/pay").headers["Idempotent-Replayed"] == "true"


def test_the_named_view_must_be_protected(shop):
    add_page(shop, "/wrong", "{{ idempotency_field('nowhere') }}")
    with pytest.raises(ConfigurationError, match="nowhere is not a protected endpoint"):
        shop.client.get("/wrong", headers=ALICE)


def test_a_field_needs_a_secret_key(shop):
    shop.app.secret_key = None
    with pytest.raises(ConfigurationError, match="SECRET_KEY"):
        shop.client.get("/form", headers=ALICE)


class TestSetting:
    @pytest.fixture
    def config(self, request):
        return {"IDEMPOTENCY_FORM_FIELD": request.param}

    @pytest.mark.parametrize("config", ["once"], indirect=True)
    def test_the_field_may_have_another_name(self, shop, assert_problem):
        add_payments(shop)
        (value,) = re.findall('name="once" value="(.*?)"', shop.client.get("/form", headers=ALICE).text)
        assert send(shop.client, None, once=value).status_code == 303
        assert_problem(send(shop.client, value), 400, "key-required")

    @pytest.mark.parametrize("config", [None], indirect=True)
    def test_without_one_no_body_is_looked_at(self, shop, assert_problem):
        @idempotent(required=False)
        def raw():
            return request.stream.read()

        shop.app.add_url_rule("/raw", "raw", raw, methods=["POST"])
        assert send(shop.client, "forged", "/raw").data == b"amount=5&idempotency_key=forged"
        with pytest.raises(ConfigurationError, match="IDEMPOTENCY_FORM_FIELD"):
            shop.client.get("/form", headers=ALICE)


def test_a_body_that_breaks_off_is_refused_before_its_field_is_looked_for(shop, assert_problem):
    runs = add_payments(shop)
    answer = shop.client.post(
        "/payments",
        data="amount=5",
        content_type="application/x-www-form-urlencoded",
        headers=ALICE,
        environ_overrides={"CONTENT_LENGTH": "100"},
    )
    assert_problem(answer, 400, "body-incomplete")
    assert runs == []


def test_a_form_in_json_has_no_field(shop, assert_problem):
    add_payments(shop)
    answer = shop.client.post("/payments", json={"idempotency_key": load(shop.client)}, headers=ALICE)
    assert_problem(answer, 400, "key-required")


@pytest.mark.parametrize(
    "config",
    [{}, {"IDEMPOTENCY_MIN_KEY_LENGTH": 40}, {"IDEMPOTENCY_MAX_KEY_LENGTH": 8}],
    ids=["usual", "short", "long"],
)
def test_a_resumed_form_may_be_older_than_its_field(shop, monkeypatch):
    """Its key goes along as a header, which has no age, and the limits are for what clients send."""
    attempts = []

    @idempotent(atomic=False, resumable=True, on_interrupted="retry", scope=None, ttl=100)
    def pay():
        attempts.append(current_operation.key)
        if len(attempts) == 1:
            raise Killed
        return {}

    shop.app.add_url_rule("/payments", "pay", pay, methods=["POST"])
    add_page(shop, "/named", "{{ idempotency_field('pay') }}")
    with pytest.raises(Killed):
        send(shop.client, load(shop.client, "/named"))
    later = time.time() + 1000
    monkeypatch.setattr(time, "time", lambda: later)
    past = "now() - interval '1 hour'"
    shop.sql(f"update idempotency_record set lease_expires_at = {past}, created_at = {past}")
    result = shop.app.test_cli_runner().invoke(cli, ["resume"])
    assert result.exit_code == 0, result.output
    assert len(attempts) == 2
    assert len(set(attempts)) == 1
