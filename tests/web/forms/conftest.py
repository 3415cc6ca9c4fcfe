"""A page with a form, the view it is sent to, and a browser's part: load the page, send its form."""

import re

import pytest
from flask import flash, get_flashed_messages, redirect, render_template_string, request

from flask_idempotency import current_operation, idempotent

FIELD = re.compile(r'<input[^>]* name="idempotency_key"[^>]* value="([\w.-]+)"[^>]*>')


@pytest.fixture
def store():
    return "postgres"  # what is tested here is the same in front of every store


class Shop:
    """Its client is a browser, which follows no redirects but keeps its cookies."""

    def __init__(self, world):
        self.world, self.app, self.browser = world, world.app, world.app.test_client()
        self.runs = []
        self.add_page("/form", "{{ idempotency_field() }}")
        self.app.add_url_rule("/thanks", "thanks", get_flashed_messages)

    def add_page(self, path, field):
        text = f'<form method="post">{field}<input name="amount"></form>'
        self.app.add_url_rule(path, path, lambda: render_template_string(text))

    def add_payments(self, path="/payments", **options):
        """A view that a form is sent to."""

        @idempotent(**options)
        def pay():
            self.runs.append(current_operation.key if current_operation else None)
            self.world.db.session.add(self.world.Payment(amount=int(request.form["amount"])))
            self.world.db.session.commit()
            flash("Paid")
            return redirect("/thanks", 303)

        self.app.add_url_rule(path, path, pay, methods=["POST"])

    def load(self, path="/form", user="alice"):
        """The field of a page."""
        page = self.browser.get(path, headers={"X-User": user}).text
        (tag,) = FIELD.finditer(page)
        assert 'type="hidden"' in tag[0]
        assert 'autocomplete="off"' in tag[0]
        return tag[1]

    def send(self, field, path="/payments", user="alice", header=None, **kwargs):
        """The response to a form; some browsers have a ``header`` of their own for each request."""
        data = {"amount": "5", **kwargs.pop("data", {})}
        if field is not None:
            data["idempotency_key"] = field
        headers = {"X-User": user, **({} if header is None else {"Idempotency-Key": header})}
        return self.browser.post(path, data=data, headers=headers, **kwargs)


@pytest.fixture
def make_shop(make_world):
    def make(**config):
        return Shop(make_world(SECRET_KEY="canary-secret", PROPAGATE_EXCEPTIONS=True, **config))

    return make


@pytest.fixture
def shop(make_shop):
    return make_shop()
