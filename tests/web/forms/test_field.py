"""The hidden field of a form: its key, whatever header comes with it."""

import re
import time

import pytest
from flask import Blueprint, render_template_string, request

from flask_idempotency import ConfigurationError
from tests.web.forms.pages import ALICE, BOB, add_page, add_payments, load, send

FORM_TYPES = ["application/x-www-form-urlencoded", "multipart/form-data"]


@pytest.mark.parametrize("media_type", FORM_TYPES)
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


class TestABrowsersOwnHeader:
    """Some browsers send an ``Idempotency-Key`` with each POST, and a new one each time."""

    @pytest.mark.parametrize("required", [True, False])
    def test_it_makes_no_second_payment(self, shop, required):
        runs, field = add_payments(shop, required=required), load(shop.client)
        answers = [send(shop.client, field, **own_header()) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [303] * 3
        assert [answer.headers.get("Idempotent-Replayed") for answer in answers[1:]] == ["true"] * 2
        assert len(runs) == shop.count() == 1

    def test_nor_does_one_that_is_malformed(self, shop):
        add_payments(shop)
        field = load(shop.client)
        for key in '"1", "2"', "", '"1";a=b':
            assert send(shop.client, field, **own_header(key)).status_code == 303
        assert shop.count() == 1

    def test_it_is_no_way_past_a_wrong_field(self, shop, assert_problem):
        """With the header as its key, a form that is sent again would run again."""
        runs = add_payments(shop)
        assert_problem(send(shop.client, "forged", **own_header()), 400, "key-malformed")
        fields = [load(shop.client), load(shop.client)]
        twice = assert_problem(send(shop.client, fields, **own_header()), 400, "key-malformed")
        assert "more than once" in twice["detail"]
        headers = {**own_header()["headers"], **BOB}
        assert_problem(send(shop.client, fields[0], headers=headers), 400, "key-malformed")
        assert runs == shop.records() == []

    def test_a_form_without_a_field_is_known_by_its_header(self, shop, assert_problem):
        runs = add_payments(shop)
        for key in "key-1", "key-1", "key-2":
            assert send(shop.client, None, **own_header(key)).status_code == 303
        assert runs == ["key-1", "key-2"]
        assert_problem(send(shop.client, None, **own_header("a,b")), 400, "key-malformed")

    def test_a_natural_key_wins_too(self, shop):
        runs = add_payments(shop, key=lambda: request.form["amount"])
        for _ in range(2):
            assert send(shop.client, None, **own_header()).status_code == 303
        assert runs == ["5"]

    def test_an_unauthenticated_caller_is_told_that_first(self, shop, assert_problem):
        add_payments(shop)
        headers = {**own_header()["headers"], "X-User": ""}
        assert_problem(send(shop.client, "forged", headers=headers), 401, "scope-unknown")

    def test_observing_knows_what_would_be_replayed(self, shop, heard):
        runs = add_payments(shop, enforce=False)
        field = load(shop.client)
        for sent in field, field, "forged":
            assert send(shop.client, sent, **own_header()).status_code == 303
        events = [event for name, event in heard if name == "operation_observed"]
        assert [(event.would, event.problem) for event in events] == [
            ("executed", None), ("replayed", None), ("rejected", "key-malformed"),
        ]  # fmt: skip
        assert len(runs) == 3


def own_header(key=None):
    """What a browser sends that has a key for each request."""
    return {"headers": {**ALICE, "Idempotency-Key": f'"{time.time_ns()}"' if key is None else key}}


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


def test_a_form_in_json_has_no_field(shop, assert_problem):
    add_payments(shop)
    answer = shop.client.post("/payments", json={"idempotency_key": load(shop.client)}, headers=ALICE)
    assert_problem(answer, 400, "key-required")
