"""The hidden field of a form: its key, whatever header comes with it."""

import re

import pytest
from flask import Blueprint, flash, redirect, render_template_string, request, session
from flask_wtf import CSRFProtect, FlaskForm
from wtforms import IntegerField
from wtforms.validators import NumberRange

from flask_idempotency import ConfigurationError, idempotent
from flask_idempotency.integrations.wtf import IdempotencyField

FORM_TYPES = ["application/x-www-form-urlencoded", "multipart/form-data"]
HEADERS = [None, '"one"', '"one", "two"', "", '"1";a=b']
"""What some browsers send with each form: another one each time, or one that is malformed."""


@pytest.mark.parametrize("media_type", FORM_TYPES)
@pytest.mark.parametrize("required", [True, False])
def test_a_form_that_is_sent_again_is_one_operation_whatever_header_comes_with_it(
    shop, media_type, required
):
    """Its message is shown once, and not again on a replay."""
    shop.add_payments(required=required)
    field, shown = shop.load(), []
    for number, header in enumerate(HEADERS):
        answer = shop.send(field, header=header, content_type=media_type)
        assert answer.status_code == 303
        assert answer.headers.get("Idempotent-Replayed") == ("true" if number else None)
        shown.append(shop.browser.get(answer.location).json)
    assert shown == [["Paid"], *[[]] * 4]
    assert len(shop.runs) == shop.world.count() == 1
    assert re.fullmatch(r"[\w-]{22}", shop.runs[0])
    assert shop.send(shop.load()).status_code == 303
    assert len(set(shop.runs)) == shop.world.count() == 2, "loaded again, it is another one"


def test_what_comes_with_a_field_or_without_one_is_judged_by_it(shop, assert_problem):
    shop.add_payments()
    shop.add_payments("/open", required=False)
    shop.add_payments("/natural", key=lambda: request.form["amount"])
    field = shop.load()
    shop.send(field)
    assert_problem(shop.send(field, data={"amount": "6"}), 422, "key-reused")
    assert_problem(shop.send(None), 400, "key-required")
    assert_problem(shop.send(None, header="a,b"), 400, "key-malformed")
    assert_problem(shop.send("forged", header="key-1"), 400, "key-malformed")
    twice = assert_problem(shop.send([shop.load(), shop.load()]), 400, "key-malformed")
    assert "more than once" in twice["detail"]
    assert_problem(shop.send("forged", user=""), 401, "scope-unknown")
    answer = shop.world.post(json={"idempotency_key": shop.load()}, key=None)
    assert_problem(answer, 400, "key-required")
    assert len(shop.runs) == len(shop.world.records()) == 1
    for path, header in ("/open", None), ("/payments", "key-1"), ("/payments", "key-1"):
        assert shop.send(None, path, header=header).status_code == 303
    for header in "key-2", "key-3":
        assert shop.send(None, "/natural", header=header).status_code == 303
    assert shop.runs[1:] == [None, "key-1", "5"]


def test_a_field_needs_a_protected_view_which_may_be_in_a_blueprint_and_a_secret_key(shop):
    blueprint = Blueprint("shop", __name__)
    page = "{{ idempotency_field('shop.pay') }}"
    blueprint.add_url_rule("/page", "page", lambda: render_template_string(page))
    blueprint.add_url_rule("/pay", "pay", lambda: "paid", methods=["POST"])
    shop.world.idempotency.protect(blueprint)
    shop.app.register_blueprint(blueprint)
    shop.add_page("/wrong", "{{ idempotency_field('nowhere') }}")
    field = shop.load("/page")
    assert shop.send(field, "/pay").status_code == 200
    assert shop.send(field, "/pay").headers["Idempotent-Replayed"] == "true"
    with pytest.raises(ConfigurationError, match="nowhere is not a protected endpoint"):
        shop.browser.get("/wrong")
    shop.app.secret_key = None
    with pytest.raises(ConfigurationError, match="SECRET_KEY"):
        shop.browser.get("/form")


def test_nothing_of_the_session_is_replayed_or_touched(shop):
    def pay():
        session["basket"] = 7
        flash("Paid")
        return redirect("/thanks", 303)

    shop.app.add_url_rule("/payments", "pay", idempotent(pay), methods=["POST"])
    shop.app.add_url_rule("/quiet", "quiet", idempotent(dict), methods=["POST"])
    field = shop.load()
    shop.send(field)
    shop.browser.delete_cookie("session")
    shop.send(field)
    with shop.browser.session_transaction() as cookie:
        assert dict(cookie) == {}
    for answer in shop.send(field, "/quiet"), shop.send(field, "/quiet"):
        assert not {"Vary", "Set-Cookie"} & set(answer.headers.keys())


def test_the_field_of_a_form_class_stands_beside_the_token_against_cross_site_requests(shop):
    """It has the name that is looked for, whatever the form calls it."""
    CSRFProtect(shop.app)

    class PaymentForm(FlaskForm):
        once = IdempotencyField(endpoint="pay")
        amount = IntegerField(validators=[NumberRange(min=1)])

    def page(form=None):
        return render_template_string("{{ form.hidden_tag() }}", form=form or PaymentForm())

    def pay():
        form, payment = PaymentForm(), shop.world.Payment()
        if not form.validate_on_submit():
            return page(form), 400
        form.populate_obj(payment)
        assert not hasattr(payment, "once")
        shop.world.db.session.add(payment)
        shop.world.db.session.commit()
        return redirect("/thanks", 303)

    def send(field, amount):
        text = shop.browser.get("/wtf", headers={"X-User": "alice"}).text
        (token,) = re.findall(r'name="csrf_token" type="hidden" value="(.*?)"', text)
        return shop.send(field, data={"csrf_token": token, "amount": amount})

    shop.app.add_url_rule("/wtf", "wtf", page)
    shop.app.add_url_rule("/payments", "pay", idempotent(pay), methods=["POST"])
    field, other = shop.load("/wtf"), shop.load("/wtf")
    for is_replay in False, True:
        answer = send(field, 5)
        assert (answer.status_code, "Idempotent-Replayed" in answer.headers) == (303, is_replay)
    refused = send(other, 0)
    assert refused.status_code == 400
    assert other not in refused.text, "a form to be corrected is another operation"
    assert "idempotency_key" in refused.text
    shop.browser.delete_cookie("session")
    refused = shop.send(field, data={"csrf_token": "forged"})
    assert (refused.status_code, "CSRF" in refused.text) == (400, True), "a replay needs it, too"
    assert shop.world.count() == 1
