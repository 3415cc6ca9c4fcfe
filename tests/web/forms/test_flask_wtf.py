"""The field of a form class of Flask-WTF, beside the token against cross-site requests."""

import re

import pytest
from flask import redirect, render_template_string
from flask_wtf import CSRFProtect, FlaskForm
from wtforms import IntegerField
from wtforms.validators import NumberRange

from flask_idempotency import idempotent
from flask_idempotency.integrations.wtf import IdempotencyField
from tests.web.forms.pages import ALICE


class TestFlaskWtf:
    @pytest.fixture
    def forms(self, app, world):
        CSRFProtect(app)

        class PaymentForm(FlaskForm):
            idempotency_key = IdempotencyField(endpoint="pay")
            amount = IntegerField(validators=[NumberRange(min=1)])

        def page(form=None):
            form = form or PaymentForm()
            return render_template_string("<form>{{ form.hidden_tag() }}</form>", form=form)

        @idempotent
        def pay():
            form = PaymentForm()
            if not form.validate_on_submit():
                return page(form), 400
            payment = world.Payment()
            form.populate_obj(payment)
            assert not hasattr(payment, "idempotency_key")
            world.db.session.add(payment)
            world.db.session.commit()
            return redirect("/thanks", 303)

        app.add_url_rule("/form", "form", page)
        app.add_url_rule("/payments", "pay", pay, methods=["POST"])
        return world

    @staticmethod
    def values(page):
        token = re.findall(r'name="csrf_token" type="hidden" value="(.*?)"', page)
        key = re.findall(r'name="idempotency_key" type="hidden" value="([\w.-]+)"', page)
        assert len(token) == len(key) == 1
        assert 'autocomplete="off"' in page
        return {"csrf_token": token[0], "idempotency_key": key[0]}

    def test_it_is_sent_and_checked(self, forms):
        client = forms.client
        values = self.values(client.get("/form", headers=ALICE).text)
        for replayed in None, "true":
            answer = client.post("/payments", data={"amount": 5, **values}, headers=ALICE)
            assert answer.status_code == 303
            assert answer.headers.get("Idempotent-Replayed") == replayed
        assert forms.count() == 1

    def test_a_form_to_be_corrected_is_another_operation(self, forms):
        client = forms.client
        values = self.values(client.get("/form", headers=ALICE).text)
        again = client.post("/payments", data={"amount": 0, **values}, headers=ALICE)
        assert again.status_code == 400
        values = self.values(again.text)
        assert client.post("/payments", data={"amount": 5, **values}, headers=ALICE).status_code == 303

    def test_a_replay_needs_the_token_too(self, forms):
        client = forms.client
        values = self.values(client.get("/form", headers=ALICE).text)
        client.post("/payments", data={"amount": 5, **values}, headers=ALICE)
        client.delete_cookie("session")
        answer = client.post("/payments", data={"amount": 5, **values}, headers=ALICE)
        assert answer.status_code == 400
        assert "CSRF" in answer.text

    def test_it_has_the_name_that_is_looked_for_whatever_the_form_calls_it(self, forms):
        class Named(FlaskForm):
            once = IdempotencyField()

        client = forms.client
        forms.app.add_url_rule("/named", "named", lambda: str(Named().hidden_tag()))
        values = self.values(client.get("/named", headers=ALICE).text)
        answer = client.post("/payments", data={"amount": 5, **values}, headers=ALICE)
        assert answer.status_code == 303
